#pragma once
// A paged KV cache: one layer's pages as kernels see them, and an allocation that holds them for all layers of a group.
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "imbrex/device_stream.h"
#include "imbrex/parallel.h"
#include "imbrex/spec.h"
#include "imbrex/tensor.h"

namespace imbrex {

// One layer's keys and values; views, not ownership.
//   strided:    k [num_blocks, block_size, num_kv_heads, head_dim_qk], v [.., head_dim_v], any strides
//   ragged:     k [num_rows, num_kv_heads, head_dim_qk], v likewise (block_size 0)
//   amx_packed: k, v u8 [num_blocks, num_kv_heads, bytes of a head's block], see docs/kv-formats.md
//   latent:     k as strided or ragged; v empty, or the first head_dim_v elements of k's rows as a view of the same memory
//   latent_rope: k as latent, but of head_dim_v elements; k_rope as k, of the head_dim_qk - head_dim_v elements of a key behind them
//   fp8_ds_mla: k u8 [num_blocks, block_size, 656], see docs/kv-formats.md; v and all scales empty
// An fp8 element e stands for e * scale. The scale of latent values is k_scale: v_scale is empty.
struct KvCache {
  TensorView k, v;
  TensorView k_scale, v_scale;  // f32 [1] or [num_kv_heads], host or device like k; empty: 1
  TensorView k_rope;            // latent_rope only
  TensorView k_rope_scale;      // of k_rope, as k_scale is of k; latent_rope only, and given where k_scale is

  int64_t num_blocks(const AttentionSpec& spec) const { return spec.block_size == 0 ? -1 : k.size(0); }
  // Throws Error kv_cache.* unless the views fit the spec.
  void validate(const AttentionSpec&) const;
};

// Owned, zeroed memory for `num_layers` layers of one spec: memory of the host, on huge pages where the system has them, or of the device
// of a stream.
// `order` names the physical order of the dimensions, outermost first, one letter each: l(ayer), b(lock), h(ead), t(oken), d(im).
// Each tensor of a KvCache is a region of its own inside. Letters of dimensions that the format does not have are ignored: packed
// formats have only l, b, h to order ("lbh").
class KvAllocation {
 public:
  // Throws Error kv_cache.order.* for a bad order, kv_cache.size.* for sizes that overflow or memory that cannot be had.
  KvAllocation(const AttentionSpec&, int num_layers, int64_t num_blocks, std::string_view order = "lbhtd", const DeviceStream* = nullptr);
  KvCache layer(int index) const;
  int64_t bytes() const { return bytes_; }
  int num_layers() const { return num_layers_; }
  int64_t num_blocks() const { return num_blocks_; }
  const AttentionSpec& spec() const { return spec_; }

 private:
  AttentionSpec spec_;
  int num_layers_ = 0;
  int64_t num_blocks_ = 0, bytes_ = 0;
  KvCache all_;  // each tensor with the layers in front: [layer, block, token, head, dim], or [layer, block, head, bytes] when packed
  std::shared_ptr<void> memory_;
};

struct BlockCopy {
  int32_t from, to;  // block ids
};

// Copies whole blocks of one layer, any strides, any format: for copy on write and for moving blocks together. The copies
// are done in no particular order, so a list that would depend on it is refused: Error kv_cache.copy.chained when a block is both
// read and written, kv_cache.copy.twice when one is written twice. Host memory only (kv_cache.copy.device).
void copy_blocks(const AttentionSpec&, const KvCache&, std::span<const BlockCopy>, const ParallelFor& = {});

// Copies whole blocks, as copy_blocks() does, on any device and for caches of any spec in its memory; for instance the blocks of
// BlockPool::make_writable(). Stateless after it is made; any number of threads may use it.
class BlockCopier {
 public:
  virtual ~BlockCopier() = default;
  // The copies are in the order of the stream. The list is read during the call; on a GPU it is a parameter of the launches, so that a
  // graph that captures them repeats these very copies.
  virtual void copy(const AttentionSpec&, const KvCache&, std::span<const BlockCopy>, Stream = nullptr) const = 0;
};
// Makes a copier, and loads a GPU's kernels. `threads` are for a CPU. Error backend.device_absent for a device that is only described.
std::unique_ptr<BlockCopier> make_block_copier(const DeviceInfo&, const ParallelFor& threads = {});

// Bytes of one kv head's block of keys (or values) in KvFormat::amx_packed; head_dim is padded to a multiple of 32.
int64_t packed_block_bytes(int block_size, int head_dim, DType kv_dtype);

}  // namespace imbrex

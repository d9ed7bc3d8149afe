#pragma once
// The host side of attention_sm90.cu: which layers it can run, the constants it is compiled with, and its tensor maps.
#include <string_view>
#include <vector>

#include "cuda/driver/driver.h"
#include "cuda/driver/jit.h"
#include "cuda/driver/tensor_map.h"
#include "imbrex/attention.h"

namespace imbrex::cuda {

struct Sm90Tiles {
  int teams;           // warpgroups that compute
  int rows, keys;      // (query token, q head) of a thread block at most; items' key ranges begin at multiples of `keys`
  int stages;          // tiles of keys and values in shared memory
  int cluster = 1;     // thread blocks that share an item
  int row_blocks = 1;  // tasks, of a thread block or cluster each, that an item's rows are
  int item_rows() const { return rows * cluster * row_blocks; }
  unsigned threads() const { return unsigned(128 * (teams + 1)); }
  // The tiles over flat keys, for specs where flattens() is true: a cluster takes rows that are several tasks over the cache itself.
  Sm90Tiles over_flat() const {
    Sm90Tiles flat = *this;
    flat.cluster = row_blocks, flat.row_blocks = cluster;
    return flat;
  }
};
// Shared memory of a thread block, and what a swizzle's pattern begins at; bytes.
constexpr int kSm90SharedMemory = 227 << 10, kSm90SharedUnit = 1024;
// Dims of 16 bits in a line of shared memory, and the lines of a row.
constexpr int kSm90ChunkDims = kTensorMapLine / 2;
constexpr int sm90_chunks(int dims) { return (dims + kSm90ChunkDims - 1) / kSm90ChunkDims; }
constexpr int kTeamRows = 64;  // of a product of a warpgroup, which takes as many of them as whole tokens have
int sm90_team_rows(const AttentionSpec&);
// Whether prefill reads the mask as bits, which pack_mask.cu makes of the bytes of a custom mask or by computing a mask_mod.
bool reads_mask_bits(const AttentionSpec&);
// Thread blocks that read the same keys from L2 once: those of an item's rows, which see nearly the same, or of different kv heads.
int attention_sm90_cluster(const AttentionSpec&);
Sm90Tiles attention_sm90_tiles(const AttentionSpec&);
// Why the kernel cannot run a spec whose cache is strided; empty: it can.
std::vector<Reason> attention_sm90_refusals(const AttentionSpec&);
// Over the flat keys that flattens() asks for: the same items and the same bits.
KernelKey attention_sm90_flat_key(std::string_view arch, const AttentionSpec&, DType out);
// Whether keys and values of 8 bits are widened to 16 bits before they are multiplied: attention_sm90_widen.cuh.
bool widens(const AttentionSpec&);
// The key of any prefill kernel with wgmma.
KernelKey sm90_prefill_key(const char* path, std::string_view arch, const AttentionSpec&, DType out, const Sm90Tiles&,
                           bool from_bytes = false);
// Entry `pack_mask`, which makes AttentionParams::mask_bits and seen_tiles for it, with kPackMaskThreads; takes AttentionParams.
KernelKey pack_mask_key(std::string_view arch, const AttentionSpec&);
// Entry `attention_sm90`; a block of threads() on every multiprocessor. Parameters: AttentionParams, then the maps of q, k and v.
KernelKey attention_sm90_key(std::string_view arch, const AttentionSpec&, DType out);

struct AttentionMaps {
  CUtensorMap q, k, v;
};
// The map of queries, of which a box has tokens of so many rows in all, or so many q heads of one that has more, `width` bytes of each.
// False where strides or addresses are not multiples of 16 bytes, or dims not neighbours: TMA cannot read such tensors.
bool encode_query_map(CUtensorMap&, const AttentionSpec&, const TensorView& q, int rows, int width = kTensorMapLine);
// All of them.
bool attention_sm90_maps(const AttentionSpec&, const TensorView& q, const KvCache&, AttentionMaps&);
bool attention_sm90_flat_maps(const AttentionSpec&, const TensorView& q, const KvCache& flat, AttentionMaps&);

}  // namespace imbrex::cuda

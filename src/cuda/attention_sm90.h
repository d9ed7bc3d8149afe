#pragma once
// What kernels/attention_sm90.cu can run, the constants it is compiled with, and the descriptors that its loads go through.
#include <string_view>

#include "cuda/driver.h"
#include "cuda/jit.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cuda {

constexpr int kSm90TileRows = 128;  // (query token, q head) of an item at most
constexpr unsigned kSm90Threads = 384;

// Keys of a tile: items' key ranges begin at multiples of it.
int attention_sm90_tile_keys(const AttentionSpec&);
// 16-bit keys of the queries' type, head_dim 64, 128 or 256, a power of two of q heads for a kv head, pages that tiles consist of or that
// consist of tiles, no custom mask, no relative bias.
bool attention_sm90_runs(const AttentionSpec&);
// Entry `attention_sm90`; a block of kSm90Threads on every multiprocessor. Parameters: AttentionParams, then the maps of q, k and v.
KernelKey attention_sm90_key(std::string_view arch, const AttentionSpec&, DType out);

struct AttentionMaps {
  CUtensorMap q, k, v;
};
// False where strides or addresses are not multiples of 16 bytes, or dims not neighbours: TMA cannot read such tensors.
bool attention_sm90_maps(const AttentionSpec&, const TensorView& q, const KvCache&, AttentionMaps&);

}  // namespace imbrex::cuda

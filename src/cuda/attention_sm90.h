#pragma once
// What kernels/attention_sm90.cu can run, the constants it is compiled with, and the descriptors that its loads go through.
#include <string_view>
#include <vector>

#include "cuda/driver.h"
#include "cuda/jit.h"
#include "imbrex/backend.h"

namespace imbrex::cuda {

constexpr int kSm90TileRows = 128;  // (query token, q head) of an item at most
constexpr unsigned kSm90Threads = 384;

// Keys of a tile: items' key ranges begin at multiples of it.
int attention_sm90_tile_keys(const AttentionSpec&);
// Why the kernel cannot run a spec whose cache is strided; empty: it can.
std::vector<Reason> attention_sm90_refusals(const AttentionSpec&);
// Entry `attention_sm90`; a block of kSm90Threads on every multiprocessor. Parameters: AttentionParams, then the maps of q, k and v.
KernelKey attention_sm90_key(std::string_view arch, const AttentionSpec&, DType out);

struct AttentionMaps {
  CUtensorMap q, k, v;
};
// False where strides or addresses are not multiples of 16 bytes, or dims not neighbours: TMA cannot read such tensors.
bool attention_sm90_maps(const AttentionSpec&, const TensorView& q, const KvCache&, AttentionMaps&);

}  // namespace imbrex::cuda

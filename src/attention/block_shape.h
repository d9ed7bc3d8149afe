#pragma once
// How one block of a paged tensor lies in memory, and what a list of copies must be like: for copy_blocks() on every kind of device.
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "imbrex/kv_cache.h"

namespace imbrex {

// One block as pieces of `piece` bytes, at every offset that the three loops give.
struct BlockShape {
  char* base = nullptr;
  int64_t block_stride = 0, piece = 0;                      // bytes
  std::array<int64_t, 3> sizes{1, 1, 1}, strides{0, 0, 0};  // innermost first, strides in bytes
  int64_t bytes() const { return piece * sizes[0] * sizes[1] * sizes[2]; }
};

// The shape of a block of a cache's k or v. Dimensions that follow each other in memory become one, whatever their order in the tensor.
BlockShape block_shape(const TensorView&);
// The shapes of one block in each tensor of the cache that holds tokens.
std::vector<BlockShape> stored_shapes(const AttentionSpec&, const KvCache&);

// Error kv_cache.copy.from, .to, .twice, .chained.
void check_copies(std::span<const BlockCopy>, int64_t num_blocks);

}  // namespace imbrex

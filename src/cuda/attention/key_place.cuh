#pragma once
// Where key j of a request lies in the cache: no other text of a kernel answers that.
//
// `first_block` is the request's entry of block_start: where its blocks begin in the table of ids. A ragged cache has no blocks, and there
// it is the row of the request's key 0. The functions that take a block's id are for the others.
#include "cuda/params.h"
#include "ptx.cuh"

namespace imbrex::cuda {

constexpr int kPage = kBlockSize > 0 ? kBlockSize : 1;  // keys of a block; ragged keys have none: a divisor all the same

// The entry of the table that has the id of the key's block. `Params`: of a kernel that reads keys.
template <class Params>
DEVICE const int* block_id_of(const Params& p, long first_block, int key) {
  return p.block_ids + first_block + u32(key) / u32(kPage);
}

// The key's row in its block; ragged: of all rows.
DEVICE int row_of_key(long first_block, int key) { return kBlockSize == 0 ? int(first_block) + key : int(u32(key) % u32(kPage)); }

// The row of key `begin + step + within` in its block, where `begin` is a multiple of kTile, a constant `step` one of kStep, and `within`
// less than kStep: as little as possible is left to compute.
template <int kTile, int kStep>
DEVICE u32 row_in_tile(int begin, int step, int within) {
  if constexpr (kPage % kTile == 0) return u32(begin) % u32(kPage) + u32(step + within);  // the tile is in one block
  if constexpr (kTile % kPage == 0 && kPage % kStep == 0) return u32(step % kPage + within);
  if constexpr (kTile % kPage == 0 && kStep % kPage == 0) return u32(within % kPage);
  return u32(begin + step + within) % u32(kPage);
}

// The bytes from the memory of keys (or values) to a row: of a block with this id, of a ragged cache.
template <class Id>
DEVICE long offset_of_row(const KvSide& side, Id block, u32 row) {
  return block * side.block_stride + row * side.token_stride;
}
DEVICE long offset_in_block(const KvSide& side, int block, int key) { return offset_of_row(side, block, u32(key) % u32(kPage)); }
DEVICE long ragged_offset(const KvSide& side, long first_block, long key) { return (first_block + key) * side.token_stride; }

}  // namespace imbrex::cuda

#pragma once
// The end of an item in pieces: the thread block whose piece comes last joins all of them.
#include "attention_item.cuh"
#include "row_sums.cuh"

namespace imbrex::cuda {

// Whether a split was the last one of its item to be finished. Called by one thread, after all others have written the sums of the split.
DEVICE bool is_last_piece(const AttentionParams& p, const Item& item) {
  memory_fence();
  int& arrivals = p.arrivals[(item.merge * p.num_kv_heads + item.kv_head) * kRowBlocks + item.row_begin / kTileRows];
  if (atomicAdd(&arrivals, 1) != p.merges[item.merge].num_splits - 1) return false;
  arrivals = 0;
  memory_fence();
  return true;
}

// Merges the pieces of an item. Called by `threads` threads if is_last_piece() was true. Two threads share eight dims of a row where there
// are enough.
template <int threads>
DEVICE void join_pieces(const AttentionParams& p, const Item& item) {
  constexpr int kLanes = threads >= 2 * kGroup * kEights ? 2 : 1;
  const MergeItem merge = p.merges[item.merge];
  const int heads = p.num_kv_heads * kGroup, thread = computed_here(int(threadIdx.x)) % threads, lane = thread % kLanes;
  const long stride = long(merge.q_end - merge.q_begin) * heads, to_first = long(merge.first_partial - item.partial) * heads;
  const bool wide = out_is_wide(p);
  const float v_scale = kv_scale(p.v, item.kv_head);
  for (int begin = 0; begin < item.num_rows * kEights; begin += threads / kLanes) {
    const int i = begin + thread / kLanes, row = min(i / kEights, item.num_rows - 1), d = first_dim_of(i);
    RowSums all = join_splits<2, kLanes>(p, partial_row(p, item, row) + to_first, stride, merge.num_splits, d, lane);
    if (lane == 0 && i < item.num_rows * kEights) all.store(p, item.token_of(row), item.head_of(row), d, v_scale, wide);
  }
}

}  // namespace imbrex::cuda

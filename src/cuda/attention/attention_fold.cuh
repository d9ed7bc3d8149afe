#pragma once
// The end of an item in pieces: the thread block whose piece comes last joins all of them.
#include "attention_item.cuh"
#include "row_sums.cuh"

namespace imbrex::cuda {

// Whether a split was the last one of a merge to be finished. Called by one thread, after all others have written the sums of the split.
DEVICE bool is_last_piece(const AttentionParams& p, const Item& item, int merge) {
  memory_fence();
  int& arrivals = p.arrivals[(merge * p.num_kv_heads + item.kv_head) * kRowBlocks + item.row_begin / kTileRows];
  if (atomicAdd(&arrivals, 1) != p.merges[merge].num_splits - 1) return false;
  arrivals = 0;
  memory_fence();
  return true;
}

// Which merges an item's split was the last one of: bit 0, if it was that of the item's merge; of an item that several requests share, bit
// t, if it was that of the merge of token t and of those behind it that have the same. Called by a warp.
DEVICE u32 ended_merges(const AttentionParams& p, const Item& item) {
  const int lane = lane_id();
  int merge = lane == 0 ? item.merge : -1;
  if (item.is_shared() && lane * kGroup < item.num_rows) {
    const SharedToken* const token = p.shared_tokens + item.q_begin + lane;
    if (lane == 0 || token[0].merge != token[-1].merge) merge = token[0].merge;
  }
  return __ballot_sync(kFullWarp, merge >= 0 && is_last_piece(p, item, merge));
}

// Merges the pieces of the rows that a merge and an item's task have. Called by `threads` threads. Two threads share eight dims of a row
// where there are enough.
template <int threads>
DEVICE void join_pieces(const AttentionParams& p, const Item& item, MergeItem merge) {
  constexpr int kLanes = threads >= 2 * kGroup * kEights ? 2 : 1;
  const int heads = p.num_kv_heads * kGroup, thread = computed_here(int(threadIdx.x)) % threads, lane = thread % kLanes;
  const int queries = merge.q_end - merge.q_begin, num_rows = item.is_shared() ? queries * kGroup : item.num_rows;
  const bool wide = out_is_wide(p);
  const float v_scale = value_scale(p, item.kv_head);
  for (int begin = 0; begin < num_rows * kEights; begin += threads / kLanes) {
    const int i = begin + thread / kLanes, row = item.row_begin + min(i / kEights, num_rows - 1), d = first_dim_of(i);
    const int token = row / kGroup, head = item.kv_head * kGroup + row % kGroup;
    const long first = long(merge.first_partial + token) * heads + head, stride = long(queries) * heads;
    const auto row_of_split = [&](int split) {
      if (kShares && merge.first_partial < 0) return long(p.merge_parts[~merge.first_partial + split] + token) * heads + head;
      return first + split * stride;
    };
    RowSums all = join_splits<2, kLanes>(p, row_of_split, merge.num_splits, d, lane);
    if (lane == 0 && i < num_rows * kEights) all.store(p, merge.q_begin + token, head, d, v_scale, wide);
  }
}

// Merges the pieces of all merges that are ended_merges(). Called by `threads` threads. They merge one after the other, together; but of a
// shared item, where a merge has rows for a warp alone, each warp takes merges of its own.
template <int threads>
DEVICE void join_ended(const AttentionParams& p, const Item& item, u32 ended) {
  if constexpr (kShares) {
    constexpr bool kWarpEach = threads > 32 && kGroup * kEights <= 32;
    const auto merge_of = [&](u32 left) { return p.merges[p.shared_tokens[item.q_begin + lowest_bit(left)].merge]; };
    if (kWarpEach && item.is_shared()) {
      const int warp = computed_here(int(threadIdx.x)) % threads / 32;
      int number = 0;
#pragma unroll 1
      for (; ended != 0; ended &= ended - 1)
        if (number++ % (threads / 32) == warp) join_pieces<32>(p, item, merge_of(ended));
      return;
    }
#pragma unroll 1
    for (; ended != 0; ended &= ended - 1) join_pieces<threads>(p, item, item.is_shared() ? merge_of(ended) : p.merges[item.merge]);
  } else if (ended != 0) {  // a loop would take registers from the rest of the kernel
    join_pieces<threads>(p, item, p.merges[item.merge]);
  }
}

}  // namespace imbrex::cuda

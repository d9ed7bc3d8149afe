// Joins the pieces of items, or runs of them, whose sums attention kernels have left in memory; launched once behind them by
// cuda/plan/plan_run.cpp. Kernels whose own thread blocks do it (attention_fold.cuh) need no launch.
//
// Memory: every partial row is read once, 4 * kHeadDimV bytes and a state.
#include "async.cuh"
#include "cuda/merge_params.h"
#include "join_many.cuh"

namespace imbrex::cuda {

constexpr int kKeptItems = 64;
constexpr int kMostLanes = most_merge_lanes(kHeadDimV), kSomeLanes = kMostLanes < 2 ? kMostLanes : 2;  // of a row's eight dims
constexpr int kManyParts = many_merge_parts(kHeadDimV);
static_assert(kEights <= kMergeThreads);

struct SharedStorage {
  MergeItem items[kPlanRegimes][kKeptItems];        // the first of each list
  int num_items[kPlanRegimes], ends[kPlanRegimes];  // of each list; where its tasks end, one list behind the other
};
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

extern __shared__ __align__(1024) char memory[];

// Rows of an item and kv head, a share of them: row r is token r / kGroup and, of the head's q heads, number r % kGroup. kLanes threads
// share out the splits of eight dims, and kParts blocks the dims, of which this one has number `part`.
template <int kLanes, int kParts>
DEVICE void merge_rows(const AttentionParams& p, const MergeItem& item, int kv_head, int share, int shares, int part, bool are_short) {
  constexpr int kRowThreads = kEights / kParts * kLanes, kRows = kMergeThreads / kRowThreads;
  static_assert(kParts == 1 || (kRows == 1 && kLanes == kManyMergeLanes));
  const int thread = int(threadIdx.x), lane = thread % kLanes, d = first_dim_of(part * (kEights / kParts) + thread / kLanes),
            heads = p.num_kv_heads * kGroup;
  const int end = (item.q_end - item.q_begin) * kGroup;
  const long stride = long(item.q_end - item.q_begin) * heads;
  const bool has_parts = kShares && item.first_partial < 0;
#pragma unroll 1
  for (int begin = share * kRows; begin < end; begin += shares * kRows) {
    const int row = begin + thread / kRowThreads, read = min(row, end - 1), token = read / kGroup, head = kv_head * kGroup + read % kGroup;
    const long first = long(item.first_partial + token) * heads + head;
    const auto row_of_split = [&](int split) {
      if (has_parts) return long(__ldg(p.merge_parts + (~item.first_partial + split)) + token) * heads + head;
      return first + split * stride;
    };
    RowSums all;
    if constexpr (kParts > 1)
      all = join_many_splits(p, row_of_split, item.num_splits, d, lane, are_short);
    else
      all = join_splits<1, kLanes, kShortSums>(p, row_of_split, item.num_splits, d, lane, are_short);
    if (lane == 0 && row < end && thread < kRows * kRowThreads)
      all.store(p, item.q_begin + token, head, d, kv_scale(p.v, kv_head), out_is_wide(p));
  }
}

// Merges rows of an item, with no more lanes than it has splits for, so that every lane has something to load.
DEVICE void merge_rows(const AttentionParams& p, const MergeItem& item, int kv_head, int share, int shares, bool are_short) {
  if (item.num_splits <= kPiecesTogether) {
    merge_rows<1, 1>(p, item, kv_head, share, shares, 0, are_short);
  } else if (item.num_splits <= kSomeLanes * kPiecesTogether) {
    merge_rows<kSomeLanes, 1>(p, item, kv_head, share, shares, 0, are_short);
  } else {
    merge_rows<kMostLanes, 1>(p, item, kv_head, share, shares, 0, are_short);
  }
}

extern "C" __global__ void __launch_bounds__(kMergeThreads, 2) merge(const __grid_constant__ AttentionParams p) {
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  griddep_launch();
  if (!p.lists_are_there) griddep_wait();
  int items[kPlanRegimes], all = 0;  // of each list; tasks of all
#pragma unroll
  for (int i = 0; i < kPlanRegimes; ++i) {
    const MergeList& list = p.merge_lists[i];
    items[i] = list.counts == nullptr ? 0 : list.counts->num_merges;
    all += items[i] * p.num_kv_heads * list.shares;
  }
  bool any_long = false, any_many = false;
#pragma unroll
  for (int i = 0; i < kPlanRegimes; ++i) {
    const int thread = int(threadIdx.x);
    if (thread >= min(items[i], kKeptItems)) continue;
    const MergeItem item = p.merge_lists[i].items[thread];
    shared.items[i][thread] = item;
    any_long = any_long || item.num_splits > kSomeLanes * kPiecesTogether;
    any_many = any_many || item.num_splits > kManySplits;
  }
  any_long = __syncthreads_or(any_long) != 0;
  // Where there are more shares than blocks, an item has so few that none is empty, however few splits there are. Rows of many splits need
  // all of them, so that no block has several such rows when others have none left.
  constexpr int kMostEach = 32;
  const bool all_shares = all <= int(gridDim.x) || (any_long && all <= kMostEach * int(gridDim.x));
  const int fewer = all_shares ? 1 : kMostLanes;
  const auto shares_of = [&](int list) { return (p.merge_lists[list].shares + fewer - 1) / fewer; };
  all = 0;
#pragma unroll
  for (int i = 0; i < kPlanRegimes; ++i) {
    all += items[i] * p.num_kv_heads * shares_of(i);
    if (threadIdx.x == 0) shared.num_items[i] = items[i], shared.ends[i] = all;
  }
  any_many = __syncthreads_or(any_many) != 0;
  // Rows of very many splits, where there is a block for each part of every row.
  const bool in_parts = kManyParts > 0 && all_shares && all * kManyParts <= int(gridDim.x) && any_many;
  const int parts = in_parts ? kManyParts : 1;
  if (p.lists_are_there && (int(blockIdx.x) < all * parts || blockIdx.x == 0)) griddep_wait();
  for (int number = int(blockIdx.x); number < all * parts; number += int(gridDim.x)) {
    const int task = number / parts;
    int list = 0, begin = 0;
    while (task >= shared.ends[list]) begin = shared.ends[list++];
    // The first share of each item comes first: the last ones of items with few rows or splits have nothing to do, and lie at the end.
    const MergeList& from = p.merge_lists[list];
    const int heads = p.num_kv_heads, of_share = shared.num_items[list] * heads, share = (task - begin) / of_share,
              rest = (task - begin) % of_share;
    const int index = rest / heads;
    const MergeItem item = *(index < kKeptItems ? &shared.items[list][index] : from.items + index);
    const bool are_short = kShortSums && from.are_short;
    if constexpr (kManyParts > 0) {
      if (in_parts) {
        merge_rows<kManyMergeLanes, kManyParts>(p, item, rest % heads, share, shares_of(list), number % parts, are_short);
        continue;
      }
    }
    merge_rows(p, item, rest % heads, share, shares_of(list), are_short);
  }
}

}  // namespace imbrex::cuda

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
static_assert(kEights <= kMergeThreads);

struct SharedStorage {
  ManyShared many;
  MergeItem items[kPlanRegimes][kKeptItems];        // the first of each list
  int num_items[kPlanRegimes], ends[kPlanRegimes];  // of each list; where its tasks end, one list behind the other
};
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

extern __shared__ __align__(1024) char memory[];

DEVICE bool has_many(const MergeItem& item) {
  return kManyParts > 0 && item.num_splits > many_splits(kHeadDimV) && item.num_splits <= kMostManySplits;
}

// Which row of the partial buffers has a split of an item's row.
struct RowOfSplit {
  long first, stride;  // kShares, of an item of parts: a row's place in each part, and parts
  const int* parts = nullptr;

  DEVICE RowOfSplit(const AttentionParams& p, const MergeItem& item, int token, int head) {
    const int heads = p.num_kv_heads * kGroup;
    stride = long(item.q_end - item.q_begin) * heads, first = long(item.first_partial + token) * heads + head;
    if (kShares && item.first_partial < 0) parts = p.merge_parts + ~item.first_partial, stride = heads, first = long(token) * heads + head;
  }
  DEVICE long operator()(int split) const { return first + (kShares && parts != nullptr ? __ldg(parts + split) : split) * stride; }
};

// Rows of an item and kv head, a share of them: row r is token r / kGroup and, of the head's q heads, number r % kGroup.
struct Rows {
  MergeItem item;
  int kv_head, share, shares;
  bool are_short;

  DEVICE int end() const { return (item.q_end - item.q_begin) * kGroup; }
  DEVICE int token(int row) const { return row / kGroup; }
  DEVICE int head(int row) const { return kv_head * kGroup + row % kGroup; }
  DEVICE RowOfSplit splits_of(const AttentionParams& p, int row) const { return {p, item, token(row), head(row)}; }
};

// kLanes threads share out the splits of eight dims.
template <int kLanes>
DEVICE void merge_rows(const AttentionParams& p, const Rows& rows) {
  constexpr int kRowThreads = kEights * kLanes, kRows = kMergeThreads / kRowThreads;
  const int thread = int(threadIdx.x), lane = thread % kLanes, d = first_dim_of(thread / kLanes), end = rows.end();
#pragma unroll 1
  for (int begin = rows.share * kRows; begin < end; begin += rows.shares * kRows) {
    const int row = begin + thread / kRowThreads;
    RowSums all =
        join_splits<1, kLanes, kShortSums>(p, rows.splits_of(p, min(row, end - 1)), rows.item.num_splits, d, lane, rows.are_short);
    if (lane == 0 && row < end && thread < kRows * kRowThreads)
      all.store(p, rows.item.q_begin + rows.token(row), rows.head(row), d, kv_scale(p.v, rows.kv_head), out_is_wide(p));
  }
}

// The block has so many parts of the dims, from `first_part` on.
DEVICE void merge_many(const AttentionParams& p, ManyJoiner& joiner, const Rows& rows, int first_part, int parts) {
#pragma unroll 1
  for (int row = rows.share; row < rows.end(); row += rows.shares)
    joiner.join(rows.splits_of(p, row), rows.item.num_splits, rows.item.q_begin + rows.token(row), rows.head(row), first_part, parts,
                kv_scale(p.v, rows.kv_head), rows.are_short);
}

// Merges rows of an item, with no more lanes than it has splits for, so that every lane has something to load.
DEVICE void merge_rows(const AttentionParams& p, const Rows& rows) {
  if (rows.item.num_splits <= kPiecesTogether) {
    merge_rows<1>(p, rows);
  } else if (rows.item.num_splits <= kSomeLanes * kPiecesTogether) {
    merge_rows<kSomeLanes>(p, rows);
  } else {
    merge_rows<kMostLanes>(p, rows);
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
    any_many = any_many || has_many(item);
  }
  if constexpr (kManyParts > 0) ManyJoiner::begin(shared.many);
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
  // Rows of many splits have as many blocks each as there are for all rows. Those of few dims leave warps idle, which is for blocks to
  // spare.
  const bool joins_many = any_many && all_shares && (kHeadDimV > 256 || all <= int(gridDim.x));
  int parts = 1;
#pragma unroll
  for (int blocks = 2; blocks <= kManyParts; ++blocks)
    if (joins_many && kManyParts % blocks == 0 && all * blocks <= int(gridDim.x)) parts = blocks;
  if (p.lists_are_there && (int(blockIdx.x) < all * parts || blockIdx.x == 0)) griddep_wait();
  const auto each_task = [&](const auto& run) {
#pragma unroll 1
    for (int number = int(blockIdx.x); number < all * parts; number += int(gridDim.x)) {
      const int task = number / parts;
      int list = 0, begin = 0;
      while (task >= shared.ends[list]) begin = shared.ends[list++];
      // The first share of each item comes first: the last ones of items with few rows or splits have nothing to do, and lie at the end.
      const MergeList& from = p.merge_lists[list];
      const int heads = p.num_kv_heads, of_share = shared.num_items[list] * heads, share = (task - begin) / of_share,
                rest = (task - begin) % of_share;
      const int index = rest / heads;
      run(Rows{*(index < kKeptItems ? &shared.items[list][index] : from.items + index), rest % heads, share, shares_of(list),
               kShortSums && from.are_short},
          number % parts);
    }
  };
  each_task([&](const Rows& rows, int part) {
    if (part == 0 && !(joins_many && has_many(rows.item))) merge_rows(p, rows);
  });
  if constexpr (kManyParts > 0) {
    if (joins_many) {
      ManyJoiner joiner(p, shared.many);
      each_task([&](const Rows& rows, int part) {
        if (has_many(rows.item)) merge_many(p, joiner, rows, part * (kManyParts / parts), kManyParts / parts);
      });
    }
  }
}

}  // namespace imbrex::cuda

// Joins the pieces of items, or runs of them, whose sums attention kernels have left in memory; launched once behind them by cuda/plan.cpp.
// Kernels whose own thread blocks do it (attention_fold.cuh) need no launch.
//
// Memory: every partial row is read once, 4 * kHeadDimV bytes and a state.
#include "async.cuh"
#include "row_sums.cuh"

namespace imbrex::cuda {

extern "C" __device__ const unsigned smem_bytes = 0;

constexpr int kEights = kHeadDimV / 8, kMostLanes = 4 * kEights <= kMergeThreads ? 4 : 1;
static_assert(kEights <= kMergeThreads);

// Rows of an item and kv head, a share of them: row r is token r / kGroup and, of the head's q heads, number r % kGroup. kLanes threads
// share out the splits of eight dims.
template <int kLanes>
DEVICE void merge_rows(const AttentionParams& p, const MergeItem& item, int kv_head, int share) {
  constexpr int kRowThreads = kEights * kLanes, kRowsAtOnce = kMergeThreads / kRowThreads;
  const int thread = int(threadIdx.x), lane = thread % kLanes, d = thread / kLanes % kEights * 8, heads = p.num_kv_heads * kGroup;
  const int end = (item.q_end - item.q_begin) * kGroup;
  const long stride = long(item.q_end - item.q_begin) * heads;
  for (int begin = share * kRowsAtOnce; begin < end; begin += kMergeShares * kRowsAtOnce) {
    const int row = begin + thread / kRowThreads, read = min(row, end - 1), token = read / kGroup, head = kv_head * kGroup + read % kGroup;
    RowSums all = join_splits<1, kLanes>(p, long(item.first_partial + token) * heads + head, stride, item.num_splits, d, lane);
    if (lane == 0 && row < end && thread < kRowsAtOnce * kRowThreads)
      all.store(p, item.q_begin + token, head, d, kv_scale(p.v, kv_head), out_is_wide(p));
  }
}

extern "C" __global__ void __launch_bounds__(kMergeThreads, 2) merge(const __grid_constant__ AttentionParams p) {
  griddep_launch();
  if (!p.lists_are_there) griddep_wait();
  const int shares = p.num_kv_heads * kMergeShares;
  int ends[kPlanShapes], all = 0;  // tasks of the lists, one behind the other
#pragma unroll
  for (int i = 0; i < kPlanShapes; ++i) {
    const PlanCounts* const counts = p.merge_lists[i].counts;
    ends[i] = all += counts == nullptr ? 0 : counts->num_merges * shares;
  }
  const auto item_of = [&](int task) {
    int list = 0, begin = 0;
#pragma unroll
    for (int i = 1; i < kPlanShapes; ++i)
      if (task >= ends[i - 1]) list = i, begin = ends[i - 1];
    return p.merge_lists[list].items[(task - begin) / shares];
  };
  int task = int(blockIdx.x);
  MergeItem item{};
  if (task < all) item = item_of(task);
  if (p.lists_are_there) griddep_wait();
  while (task < all) {
    const int kv_head = task % shares / kMergeShares, share = task % kMergeShares;  // lists end with whole items
    if (item.num_splits > kPiecesTogether) {
      merge_rows<kMostLanes>(p, item, kv_head, share);
    } else {
      merge_rows<1>(p, item, kv_head, share);
    }
    task += int(gridDim.x);
    if (task < all) item = item_of(task);
  }
}

}  // namespace imbrex::cuda

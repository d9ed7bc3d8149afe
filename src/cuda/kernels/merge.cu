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
  griddep_wait();
  const int shares = p.num_kv_heads * kMergeShares;
  int first = 0;  // task of the list
  for (const MergeList& list : p.merge_lists) {
    const int tasks = list.counts == nullptr ? 0 : list.counts->num_merges * shares;
    int task = int(blockIdx.x) - first % int(gridDim.x);  // lists go on where the one before ended
    if (task < 0) task += int(gridDim.x);
    for (first += tasks; task < tasks; task += int(gridDim.x)) {
      const MergeItem item = list.items[task / shares];
      const int kv_head = task % shares / kMergeShares, share = task % kMergeShares;
      if (item.num_splits > kPiecesTogether) {
        merge_rows<kMostLanes>(p, item, kv_head, share);
      } else {
        merge_rows<1>(p, item, kv_head, share);
      }
    }
  }
}

}  // namespace imbrex::cuda

// Joins the pieces of items, or runs of them, whose sums an attention kernel has left in memory; launched behind it by cuda/plan.cpp.
// Kernels whose own thread blocks do it (attention_fold.cuh) need no launch.
//
// Memory: every partial row is read once, 4 * kHeadDimV bytes and a state. A thread has eight dims of a row.
#include "async.cuh"
#include "row_sums.cuh"

namespace imbrex::cuda {

extern "C" __device__ const unsigned smem_bytes = 0;

constexpr int kEights = kHeadDimV / 8, kRowsAtOnce = kMergeThreads / kEights;
static_assert(kRowsAtOnce > 0);

// Row r of an item and kv head is token r / kGroup and, of the head's q heads, number r % kGroup.
DEVICE void merge_rows(const AttentionParams& p, const MergeItem& item, int kv_head, int begin, int end) {
  const int row = begin + int(threadIdx.x) / kEights, d = int(threadIdx.x) % kEights * 8, heads = p.num_kv_heads * kGroup;
  if (row >= end || int(threadIdx.x) >= kRowsAtOnce * kEights) return;
  const int token = row / kGroup, head = kv_head * kGroup + row % kGroup;
  const long first = long(item.first_partial + token) * heads + head, stride = long(item.q_end - item.q_begin) * heads;
  RowSums all = join_splits<1, 1>(p, first, stride, item.num_splits, d, 0);
  all.store(p, item.q_begin + token, head, d, kv_scale(p.v, kv_head), out_is_wide(p));
}

extern "C" __global__ void __launch_bounds__(kMergeThreads, 2) merge(const __grid_constant__ AttentionParams p) {
  griddep_launch();
  griddep_wait();
  const int shares = p.num_kv_heads * kMergeShares, tasks = p.counts->num_merges * shares;
  for (int task = int(blockIdx.x); task < tasks; task += int(gridDim.x)) {
    const MergeItem item = p.merges[task / shares];
    const int end = (item.q_end - item.q_begin) * kGroup, share = task % kMergeShares;
    for (int begin = share * kRowsAtOnce; begin < end; begin += kMergeShares * kRowsAtOnce)
      merge_rows(p, item, task % shares / kMergeShares, begin, end);
  }
}

}  // namespace imbrex::cuda

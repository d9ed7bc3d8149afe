// Small tables that a plan makes on the device, because what they are made of lies there; launched by cuda/plan/plan_tables.cpp.
//
// A few thousand elements: both are bound by the launch.
#include "async.cuh"
#include "cuda/params.h"

namespace imbrex::cuda {

// Widens the starts of each request's blocks (kv_indptr) or rows (kv_start_loc) from i32 to the type that the attention kernels read.
extern "C" __global__ void __launch_bounds__(kPlanTableThreads) widen_starts(const int* from, long* to, int count) {
  griddep_wait();
  for (int i = int(blockIdx.x) * kPlanTableThreads + int(threadIdx.x); i < count; i += int(gridDim.x) * kPlanTableThreads) to[i] = from[i];
}

// T5's bias of a bucket, for every distance; blockIdx.y is the head.
extern "C" __global__ void __launch_bounds__(kPlanTableThreads) expand_bias(const __grid_constant__ ExpandBiasParams p) {
  griddep_wait();
  const int head = int(blockIdx.y);
  for (int i = int(blockIdx.x) * kPlanTableThreads + int(threadIdx.x); i < p.width; i += int(gridDim.x) * kPlanTableThreads)
    p.bias_by_distance[long(head) * p.width + i] = p.bias[p.buckets[i] * p.bucket_stride + head * p.head_stride];
}

}  // namespace imbrex::cuda

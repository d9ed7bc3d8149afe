// Joins the partial results of split requests, in the order of the splits; launched behind an attention kernel by cuda/plan.cpp.
//
// Memory: every partial row is read once, 4 * kHeadDimV bytes and a state. A thread block takes a (token, head) at a time and its warps
// share out the splits, since a long request alone has a hundred of them and a warp has only a few loads under way.
#include "async.cuh"
#include "attention_output.cuh"

namespace imbrex::cuda {

constexpr int kWarps = kMergeThreads / 32;
constexpr int kLaneFours = (kHeadDimV / 4 + 31) / 32;  // of 4 dims, that a lane adds up
constexpr int kUnroll = kLaneFours == 1 ? 8 : 4;       // rows under way

struct Part {
  float reference;
  float sum;
  float4 x[kLaneFours];
};

// Rows first, first + kWarps, ... of the splits of one token and head, `stride` apart.
DEVICE Part part_of(const AttentionParams& p, long row, long stride, int first, int num_splits, float reference) {
  Part part{reference, 0.f, {}};
#pragma unroll kUnroll
  for (int split = first; split < num_splits; split += kWarps) {
    const long at = row + split * stride;
    const float2 state = reinterpret_cast<const float2*>(p.partial_state)[at];
    const float weight = exp2_approx(state.x - reference);
    part.sum += state.y * weight;
#pragma unroll
    for (int i = 0; i < kLaneFours; ++i) {
      const int four = lane_id() + 32 * i;
      if (four * 4 >= kHeadDimV) continue;
      const float4 v = reinterpret_cast<const float4*>(p.partial_out + at * kHeadDimV)[four];
      part.x[i].x += v.x * weight, part.x[i].y += v.y * weight, part.x[i].z += v.z * weight, part.x[i].w += v.w * weight;
    }
  }
  return part;
}

struct alignas(16) SharedStorage {
  float top[kWarps];
  float sum[kWarps];
  float4 x[kWarps][kHeadDimV / 4];
};

extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);
extern __shared__ char memory[];

DEVICE void merge_row(const AttentionParams& p, const MergeItem& item, int token, int head, SharedStorage& shared) {
  const int num_q_heads = p.num_kv_heads * kGroup, warp = warp_id(), lane = lane_id();
  const long row = long(item.first_partial + token) * num_q_heads + head, stride = long(item.q_end - item.q_begin) * num_q_heads;
  float top = -infinity();
  for (int split = int(threadIdx.x); split < item.num_splits; split += kMergeThreads)
    top = fmaxf(top, p.partial_state[2 * (row + split * stride)]);
  top = max_over(top);
  if (lane == 0) shared.top[warp] = top;
  __syncthreads();
  float reference = shared.top[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) reference = fmaxf(reference, shared.top[i]);
  const Part part = part_of(p, row, stride, warp, item.num_splits, reference);
  if (lane == 0) shared.sum[warp] = part.sum;
#pragma unroll
  for (int i = 0; i < kLaneFours; ++i) {
    if ((lane + 32 * i) * 4 < kHeadDimV) shared.x[warp][lane + 32 * i] = part.x[i];
  }
  __syncthreads();
  const bool wide = out_is_wide(p);
  for (int eight = int(threadIdx.x); eight < kHeadDimV / 8; eight += kMergeThreads) {
    float sum = 0.f, x[8] = {};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const float4 low = shared.x[i][2 * eight], high = shared.x[i][2 * eight + 1];
      sum += shared.sum[i];
      x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
      x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
    }
    const RowEnd end = row_end(p, head, reference, sum);
    if (eight == 0) store_lse(p, item.q_begin + token, head, end.lse);
#pragma unroll
    for (float& value : x) value = ended(value, end.factor);
    store_out(out_row(p, item.q_begin + token, head) + eight * 8 * element_bytes(kOutType), wide, x);
  }
}

extern "C" __global__ void __launch_bounds__(kMergeThreads, 2) merge(const __grid_constant__ AttentionParams p) {
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  griddep_launch();
  griddep_wait();
  const int num_q_heads = p.num_kv_heads * kGroup, tasks = p.counts->num_merges * num_q_heads;
  for (int task = int(blockIdx.x); task < tasks; task += int(gridDim.x)) {
    const MergeItem item = p.merges[task / num_q_heads];
    for (int token = 0; token < item.q_end - item.q_begin; ++token) merge_row(p, item, token, task % num_q_heads, shared);
  }
}

}  // namespace imbrex::cuda

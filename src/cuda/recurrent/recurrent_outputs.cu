// The gate and the norm of outputs of recurrent layers, in place; launched by cuda/recurrent/recurrent_plan.cpp behind the kernels that
// compute outputs, docs/kernels/recurrent.md.
//
// Memory: outputs and z are read once and outputs written once, for a few operations a number. kOutputLanes lanes share a group of a token,
// whose numbers stay in registers between the sum of squares and the result as far as they are kKept eights of a lane; larger groups are
// read again. Loads do not wait for the search of the token's request, which says whether the token is one that is computed.
#include "eight.cuh"
#include "recurrent_finish.cuh"

namespace imbrex::cuda {

constexpr int kThreads = kRecurrentOutputThreads, kGroups = kThreads / kOutputLanes;  // groups that a thread block takes at a time
constexpr int kSize = element_bytes(kType);

extern "C" __device__ const unsigned smem_bytes = kThreads / 32 * sizeof(float);
extern __shared__ __align__(16) char memory[];

// Some neighbours of a group.
template <int n>
struct Numbers {
  float x[n], z[n], weight[n];
};

template <int n>
DEVICE void load_numbers(const char* p, bool is_f32, float (&x)[n]) {
  if constexpr (n == 1) {
    x[0] = load_number(p, is_f32);
  } else if (is_f32) {
    Eight<kF32> e;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 v = reinterpret_cast<const uint4*>(p)[i];
      e.words[4 * i] = v.x, e.words[4 * i + 1] = v.y, e.words[4 * i + 2] = v.z, e.words[4 * i + 3] = v.w;
    }
    to_floats<kF32>(e, x);
  } else {
    Eight<kType> e;
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) {
      const uint4 v = reinterpret_cast<const uint4*>(p)[i];
      e.words[4 * i] = v.x, e.words[4 * i + 1] = v.y, e.words[4 * i + 2] = v.z, e.words[4 * i + 3] = v.w;
    }
    to_floats<kType>(e, x);
  }
}

// A place of a group: where its row of the token is, and the number in it.
struct Place {
  int row, column;
};

template <int n>
DEVICE char* output_at(const RecurrentOutputParams& p, int token, const Place& at) {
  return p.out + token * p.out_token_stride + at.row * p.out_row_stride + at.column * kSize;
}
template <int n>
DEVICE void load_at(const RecurrentOutputParams& p, int token, const Place& at, Numbers<n>& to) {
  load_numbers(output_at<n>(p, token, at), false, to.x);
  if (kGated) load_numbers(p.z + token * p.z_token_stride + at.row * p.z_row_stride + at.column * kSize, false, to.z);
  if (kNormed)
    load_numbers(p.weight + at.row * p.weight_row_stride + at.column * (p.weight_is_f32 ? 4 : kSize), p.weight_is_f32, to.weight);
}
template <int n>
DEVICE void gate(Numbers<n>& of) {
#pragma unroll
  for (int i = 0; i < n; ++i) of.x[i] = gated(of.x[i], of.z[i]);
}
template <int n>
DEVICE float squares_of(const Numbers<n>& of) {
  float sum = 0.f;
#pragma unroll
  for (const float x : of.x) sum = __fmaf_rn(x, x, sum);
  return sum;
}
// `factor`: of the norm.
template <int n>
DEVICE void finish(const RecurrentOutputParams& p, int token, const Place& at, float factor, Numbers<n>& of) {
#pragma unroll
  for (int i = 0; i < n; ++i)
    if (kNormed) of.x[i] *= factor * of.weight[i];
  if (!kGateFirst) gate(of);
  char* const to = output_at<n>(p, token, at);
  if constexpr (n == 1) {
    store_number<kType>(to, of.x[0]);
  } else {
    store_eight<kType, true>(to, kSize, from_floats<kType>(of.x));
  }
}

// Whether a token is of a request that is computed, and not one that the kernel which computed it has finished.
DEVICE bool is_computed(const RecurrentOutputParams& p, int token) {
  const int count = p.counts->num_reqs;
  int first = min(token, count - 1), last = first;  // where each request has a token
  if (p.requests[first].begin > token || p.requests[first + 1].begin <= token) first = 0, last = count - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    p.requests[middle].begin <= token ? first = middle : last = middle - 1;
  }
  const StateRequest r = p.requests[first];
  const int end = p.requests[first + 1].begin;
  if (p.least_chunked > 0 && token - r.begin >= chunked_tokens(p.least_chunked, end - r.begin, r.drafts)) return false;
  return r.slot >= 0 && r.slot < p.num_slots && r.begin <= token && end <= p.num_tokens;
}

// The sum of all lanes of a group.
DEVICE float sum_of_group(float x) {
  if constexpr (kOutputLanes <= 32) return sum_over<kOutputLanes>(x);
  constexpr int kWarps = kOutputLanes / 32;
  x = sum_over<32>(x);
  float* const sums = reinterpret_cast<float*>(memory);  // of warps
  const int warp = int(threadIdx.x) / 32;
  __syncthreads();  // sums that were here have been read
  if (lane_id() == 0) sums[warp] = x;
  __syncthreads();
  x = 0.f;
#pragma unroll
  for (int i = 0; i < (kWarps > 0 ? kWarps : 1); ++i) x += sums[warp / (kWarps > 0 ? kWarps : 1) * kWarps + i];
  return x;
}

template <bool aligned>
DEVICE void finish_outputs(const RecurrentOutputParams& p) {
  constexpr int n = aligned ? 8 : 1, kHeld = aligned ? kKept : 0;
  const int tokens = min(p.counts->num_tokens, p.num_tokens), lane = int(threadIdx.x) % kOutputLanes;
  const long units = long(tokens) * p.groups;
#pragma unroll 1
  for (long first = long(blockIdx.x) * kGroups; first < units; first += long(gridDim.x) * kGroups) {
    const long unit = first + int(threadIdx.x) / kOutputLanes;
    const bool is_there = unit < units;
    const int token = is_there ? int(unit / p.groups) : 0, begin = is_there ? int(unit % p.groups) * p.group_numbers : 0;
    const int count = is_there ? min(p.group_numbers, p.token_numbers - begin) : 0;
    const auto place = [&](int i) {
      const int row = (begin + i) / p.row_numbers;
      return Place{row, begin + i - row * p.row_numbers};
    };
    Numbers<n> held[kHeld > 0 ? kHeld : 1];
    float squares = 0.f;
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
        if (const int i = (lane + k * kOutputLanes) * n; i < count) load_at(p, token, place(i), held[k]);
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if ((lane + k * kOutputLanes) * n >= count) continue;
        if (kGateFirst) gate(held[k]);
        squares += squares_of(held[k]);
      }
    } else if (kNormed) {
      for (int i = lane * n; i < count; i += kOutputLanes * n) {
        load_at(p, token, place(i), held[0]);
        if (kGateFirst) gate(held[0]);
        squares += squares_of(held[0]);
      }
    }
    const float factor = kNormed ? norm_factor(sum_of_group(squares), p.inverse_numbers, p.eps) : 1.f;
    if (!is_there || !is_computed(p, token)) continue;
    if constexpr (kHeld > 0) {
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
        if (const int i = (lane + k * kOutputLanes) * n; i < count) finish(p, token, place(i), factor, held[k]);
    } else {
      for (int i = lane * n; i < count; i += kOutputLanes * n) {
        load_at(p, token, place(i), held[0]);
        if (kGateFirst) gate(held[0]);
        finish(p, token, place(i), factor, held[0]);
      }
    }
  }
}

// Rows that are aligned to 16 bytes and have whole eights, and others.
extern "C" __global__ void __launch_bounds__(kThreads) recurrent_outputs_aligned(const __grid_constant__ RecurrentOutputParams p) {
  griddep_wait();
  finish_outputs<true>(p);
  griddep_launch();
}
extern "C" __global__ void __launch_bounds__(kThreads) recurrent_outputs_unaligned(const __grid_constant__ RecurrentOutputParams p) {
  griddep_wait();
  finish_outputs<false>(p);
  griddep_launch();
}

}  // namespace imbrex::cuda

// Partial results that are there as tensors become one, by their log-sum-exps; launched by cuda/ops/merge_results.cpp.
//
// Memory: every part is read once, and the result written once. A thread block takes a few rows (token, head): it reads all their
// log-sum-exps first, then each thread adds up a piece of a row in all parts before it writes that piece, so that the result may lie where
// a part does. Sums are in the order of the parts.
#include "async.cuh"
#include "eight.cuh"

namespace imbrex::cuda {

struct SharedStorage {
  float weights[kMergeResultRows][kMostMergeParts];
};
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

extern __shared__ __align__(1024) char memory[];

// Elements of a row's piece: eight neighbours, or one anywhere.
template <int type, int width>
DEVICE void load_piece(const char* from, float (&x)[width]) {
  if constexpr (width == 8) {
    to_floats(load_eight<type, true>(from, 0), x);
  } else if constexpr (type == kF32) {
    x[0] = *reinterpret_cast<const float*>(from);
  } else {
    const u32 element = *reinterpret_cast<const u16*>(from);
    x[0] = type == kBf16 ? unpack_bf16(element).x : unpack_f16(element).x;
  }
}
template <int type, int width>
DEVICE void store_piece(char* to, const float (&x)[width]) {
  if constexpr (width == 8) {
    store_eight<type, true>(to, 0, from_floats<type>(x));
  } else if constexpr (type == kF32) {
    *reinterpret_cast<float*>(to) = x[0];
  } else {
    *reinterpret_cast<u16*>(to) = u16(type == kBf16 ? pack_bf16(x[0], 0.f) : pack_f16(x[0], 0.f));
  }
}

template <int width>
DEVICE void load_piece(int type, const char* from, float (&x)[width]) {
  if (type == kF32) return load_piece<kF32>(from, x);
  if (type == kBf16) return load_piece<kBf16>(from, x);
  load_piece<kF16>(from, x);
}
template <int width>
DEVICE void store_piece(int type, char* to, const float (&x)[width]) {
  if (type == kF32) return store_piece<kF32>(to, x);
  if (type == kBf16) return store_piece<kBf16>(to, x);
  store_piece<kF16>(to, x);
}

// Log-sum-exps of a row's parts become weights; returns the joint one. Infinity of either sign says that a part is empty. A NaN anywhere
// makes all of them NaN.
DEVICE float make_weights(float* row, int num_parts) {
  float highest = -infinity(), sum = 0.f;
  for (int part = 0; part < num_parts; ++part) {
    if (row[part] == infinity()) row[part] = -infinity();
    if (row[part] > highest) highest = row[part];
  }
  for (int part = 0; part < num_parts; ++part) {
    row[part] = row[part] == -infinity() ? 0.f : expf(row[part] - highest);
    sum += row[part];
  }
  if (sum == 0.f) return -infinity();
  for (int part = 0; part < num_parts; ++part) row[part] /= sum;
  return highest + logf(sum);
}

template <int width>
DEVICE void merge_results(const MergeResultsParams& p) {
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  griddep_wait();
  const long first = long(blockIdx.x) * kMergeResultRows, rows = long(p.num_tokens) * p.num_heads;
  const int here = rows - first < kMergeResultRows ? int(rows - first) : kMergeResultRows, thread = int(threadIdx.x);
  for (int i = thread; i < here * p.num_parts; i += kMergeResultsThreads) {
    const long row = first + i / p.num_parts;
    const MergePart& part = p.parts[i % p.num_parts];
    shared.weights[i / p.num_parts][i % p.num_parts] =
        part.lse[row / p.num_heads * part.lse_token_stride + row % p.num_heads * part.lse_head_stride];
  }
  __syncthreads();
  if (thread < here) {
    const long row = first + thread;
    p.result.lse[row / p.num_heads * p.result.lse_token_stride + row % p.num_heads * p.result.lse_head_stride] =
        make_weights(shared.weights[thread], p.num_parts);
  }
  __syncthreads();
  const int pieces = p.dim / width;
  for (int i = thread; i < here * pieces; i += kMergeResultsThreads) {
    const long row = first + i / pieces, token = row / p.num_heads, head = row % p.num_heads, d = i % pieces * width;
    const auto place = [&](const MergePart& part) {
      return part.out + token * part.token_stride + head * part.head_stride + d * part.dim_stride;
    };
    float sum[width] = {};
    for (int part = 0; part < p.num_parts; ++part) {
      const float weight = shared.weights[i / pieces][part];
      if (weight == 0.f) continue;  // an empty part may hold anything
      float x[width];
      load_piece(p.parts[part].type, place(p.parts[part]), x);
#pragma unroll
      for (int j = 0; j < width; ++j) sum[j] += weight * x[j];
    }
    store_piece(p.result.type, place(p.result), sum);
  }
}

extern "C" __global__ void __launch_bounds__(kMergeResultsThreads) merge_results_8(const __grid_constant__ MergeResultsParams p) {
  merge_results<8>(p);
}
extern "C" __global__ void __launch_bounds__(kMergeResultsThreads) merge_results_1(const __grid_constant__ MergeResultsParams p) {
  merge_results<1>(p);
}

}  // namespace imbrex::cuda

#pragma once
// The end of an output row, for kernels that hold all of its sums: sink, division, LSE, and the way to memory.
#include "cuda/params.h"
#include "eight.cuh"

namespace imbrex::cuda {

struct RowEnd {
  float factor;  // of the sums of weighted values; 0: no key was seen, and they may be anything
  float lse;     // natural log
};

// From the row's reference (log2 units) and its sum of exponentials.
DEVICE RowEnd row_end(const AttentionParams& p, int head, float reference, float sum) {
  if (sum == 0.f) return {0.f, -infinity()};
  float weight = 1.f;
  if constexpr (kSinks) {
    const float sink = p.sinks[head] * kLog2e, top = fmaxf(reference, sink);
    weight = exp2_approx(reference - top);
    sum = sum * weight + exp2_approx(sink - top);
    reference = top;
  }
  return {weight * reciprocal_approx(sum), (reference + log2_approx(sum)) * kLn2};
}

DEVICE float ended(float sum, float factor) { return factor == 0.f ? 0.f : sum * factor; }

DEVICE char* out_row(const AttentionParams& p, int token, int head) {
  return p.out + token * p.out_token_stride + head * p.out_head_stride;
}

DEVICE void store_lse(const AttentionParams& p, int token, int head, float lse) {
  if (p.lse != nullptr) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = lse;
}

// Whether rows of the output allow accesses of 16 bytes.
DEVICE bool out_is_wide(const AttentionParams& p) {
  return ((reinterpret_cast<u64>(p.out) | u64(p.out_token_stride) | u64(p.out_head_stride)) & 15) == 0;
}

DEVICE void store_out(char* at, bool wide, const float (&x)[8]) {
  const Eight<kOutType> e = from_floats<kOutType>(x);
  if (wide) {
    store_eight<kOutType, true>(at, element_bytes(kOutType), e);
  } else {
    store_eight<kOutType, false>(at, element_bytes(kOutType), e);
  }
}

}  // namespace imbrex::cuda

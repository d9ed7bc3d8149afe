#pragma once
// A layer's keys or values, and scales of fp8 elements, as kernels see them: from the caller's views.
#include "cuda/params.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cuda {

struct Fp8Scales {
  const float* device = nullptr;  // [1] or [num_kv_heads]; null: `host`
  int stride = 0;                 // elements; 0: one for all heads
  float host = 1.f;
};
// One scale for all heads may lie on the host, and is then read now; scales of each head must be on the device: Error cuda.scales.
Fp8Scales fp8_scales(const TensorView&, Device);

// Strided formats only. Error cuda.scales.
KvSide kv_side(const TensorView& kv, const TensorView& scale, const AttentionSpec&);

// Whether every row of the tensor can be read in pieces of `bytes`: innermost stride 1, and all else a multiple of that.
bool is_aligned(const TensorView&, int64_t bytes);

}  // namespace imbrex::cuda

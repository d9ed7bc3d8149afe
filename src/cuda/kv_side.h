#pragma once
// A layer's keys or values as kernels see them, from the views of a KvCache.
#include "cuda/params.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cuda {

// Strided formats only. One scale for all heads may lie on the host, and is then read now; scales of each head must be on the
// device: Error cuda.scales.
KvSide kv_side(const TensorView& kv, const TensorView& scale, const AttentionSpec&);

// Whether every row of the tensor can be read in pieces of `bytes`: innermost stride 1, and all else a multiple of that.
bool is_aligned(const TensorView&, int64_t bytes);

}  // namespace imbrex::cuda

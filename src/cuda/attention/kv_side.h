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

// Rows of elements, as strided formats and the parts of latent_rope have them. Error cuda.scales.
KvSide kv_side(const TensorView& kv, const TensorView& scale, const AttentionSpec&);

// Sets k and v of a layer in the parameters of the attention kernels, which take `v` for the place and the scale of k_rope where the format
// is latent_rope, and do not read it where records have all. Error cuda.scales.
void set_sides(const AttentionSpec&, const KvCache&, AttentionParams&);
// The records of fp8_ds_mla.
KvSide record_side(const TensorView&);

// Whether every row of the tensor can be read in pieces of `bytes`: innermost stride 1, and all else a multiple of that.
bool is_aligned(const TensorView&, int64_t bytes);

}  // namespace imbrex::cuda

// kv_side() and its parts: from tensors to strides in bytes.
#include "cuda/attention/kv_side.h"

#include "attention/kv_codec.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"

namespace imbrex::cuda {

static_assert(int(DType::f32) == kF32 && int(DType::f16) == kF16 && int(DType::bf16) == kBf16 && int(DType::fp8_e4m3) == kE4m3 &&
              int(DType::fp8_e5m2) == kE5m2);

Fp8Scales fp8_scales(const TensorView& scale, Device device) {
  if (scale.empty()) return {};
  if (scale.device.type == DeviceType::cuda)
    return {.device = scale.as<const float>(), .stride = scale.size(0) > 1 ? int(scale.stride(0)) : 0};
  check(scale.size(0) == 1, "cuda.scales", "expected scales of each head on {}, got {}", device, scale);
  return {.host = *scale.as<const float>()};
}

KvSide kv_side(const TensorView& kv, const TensorView& scale, const AttentionSpec& spec) {
  const int token = spec.block_size > 0 ? 1 : 0;
  KvSide side{};
  side.data = kv.as<char>();
  if (token == 1) side.block_stride = byte_stride(kv, 0);
  side.token_stride = byte_stride(kv, token);
  side.head_stride = byte_stride(kv, token + 1);
  side.dim_stride = byte_stride(kv, token + 2);
  const Fp8Scales scales = fp8_scales(scale, kv.device);
  side.scales = scales.device;
  side.scale_stride = scales.stride;
  side.scale = scales.host;
  return side;
}

KvSide record_side(const TensorView& records) {
  KvSide side{};
  side.data = records.as<char>();
  side.block_stride = byte_stride(records, 0), side.token_stride = byte_stride(records, 1);
  side.dim_stride = 1;
  side.scale = 1.f;
  return side;
}

void set_sides(const AttentionSpec& spec, const KvCache& kv, AttentionParams& a) {
  if (spec.kv_format == KvFormat::fp8_ds_mla) {
    a.k = a.v = record_side(kv.k);
    return;
  }
  a.k = kv_side(kv.k, kv.k_scale, spec);
  a.v = spec.kv_format == KvFormat::latent_rope ? kv_side(kv.k_rope, kv.k_rope_scale, spec) : kv_side(kv.v, kv.v_scale, spec);
}

bool is_aligned(const TensorView& t, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(bytes) != 0 || t.stride(t.rank - 1) != 1) return false;
  for (int d = 0; d + 1 < t.rank; ++d)
    if (t.size(d) > 1 && t.stride(d) * size_of(t.dtype) % bytes != 0) return false;
  return true;
}

}  // namespace imbrex::cuda

// kv_side() and is_aligned(): from tensors to strides in bytes.
#include "cuda/kv_side.h"

#include "core/check.h"
#include "core/tensor_format.h"

namespace imbrex::cuda {

static_assert(int(DType::f32) == kF32 && int(DType::f16) == kF16 && int(DType::bf16) == kBf16 && int(DType::fp8_e4m3) == kE4m3 &&
              int(DType::fp8_e5m2) == kE5m2);

KvSide kv_side(const TensorView& kv, const TensorView& scale, const AttentionSpec& spec) {
  const long size = size_of(kv.dtype);
  const int token = spec.block_size > 0 ? 1 : 0;
  KvSide side{};
  side.data = kv.as<char>();
  if (token == 1) side.block_stride = kv.stride(0) * size;
  side.token_stride = kv.stride(token) * size;
  side.head_stride = kv.stride(token + 1) * size;
  side.dim_stride = kv.stride(token + 2) * size;
  side.scale = 1;
  if (scale.empty()) return side;
  if (scale.device.type == DeviceType::cuda) {
    side.scales = scale.as<const float>();
    side.scale_stride = scale.size(0) > 1 ? int(scale.stride(0)) : 0;
  } else {
    check(scale.size(0) == 1, "cuda.scales", "expected scales of each head on {}, got {}", kv.device, scale);
    side.scale = *scale.as<const float>();
  }
  return side;
}

bool is_aligned(const TensorView& t, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(bytes) != 0 || t.stride(t.rank - 1) != 1) return false;
  for (int d = 0; d + 1 < t.rank; ++d)
    if (t.size(d) > 1 && t.stride(d) * size_of(t.dtype) % bytes != 0) return false;
  return true;
}

}  // namespace imbrex::cuda

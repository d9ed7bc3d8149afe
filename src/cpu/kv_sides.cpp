// See kv_sides.h. This file names the formats that CPU kernels read by themselves.
#include "cpu/kv_sides.h"

#include <algorithm>

#include "attention/ds_mla.h"
#include "core/tensor_layout.h"

namespace imbrex::cpu {

static_assert(int(DType::f32) == kF32 && int(DType::f16) == kF16 && int(DType::bf16) == kBf16 && int(DType::fp8_e4m3) == kE4m3 &&
              int(DType::fp8_e5m2) == kE5m2);

KvSides::KvSides(const AttentionSpec& spec, int widened)
    : spec_(spec), widened_(widened), dims_(codec_of(spec).layout(spec, KvPart::k)->dims) {
  if (spec.kv_format == KvFormat::latent_rope) second_factors_.resize(size_t(spec.num_kv_heads));
}

// Of a tensor with the dimensions of the format's keys, which are those of its other tensors too.
KvSide KvSides::side(const TensorView& t, const TensorView& scale, int dim) const {
  KvSide side{};
  side.data = t.as<const char>();
  for (int d = 0; d < t.rank; ++d) {
    const long stride = byte_stride(t, d);
    switch (dims_[size_t(d)]) {
      case 'b': side.block_stride = stride; break;
      case 'r':
      case 't': side.token_stride = stride; break;
      case 'h': side.head_stride = stride; break;
      case 'd': side.dim_stride = stride; break;
      default: break;  // bytes in one piece
    }
  }
  side.scales = scale.as<const float>();
  side.scale_stride = !scale.empty() && scale.size(0) > 1 ? int(scale.stride(0)) : 0;
  side.type = int(spec_.kv_dtype);
  side.dim = dim;
  side.row_bytes = dim * size_of(spec_.kv_dtype);
  return side;
}

void KvSides::describe(AttentionParams& a) const {
  const int type = int(spec_.kv_dtype), behind = spec_.head_dim_qk - spec_.head_dim_v;
  a.k.dim = spec_.head_dim_qk, a.v.dim = spec_.head_dim_v;
  a.k.type = a.v.type = type;
  a.packed = spec_.kv_format == KvFormat::amx_packed;
  a.values_in_keys = codec_of(spec_).values_in_keys;
  if (spec_.kv_format == KvFormat::latent_rope) {
    a.row_parts = {.first = spec_.head_dim_v, .second = behind, .first_type = type, .second_type = type};
    a.row_parts.twice = widened_ == kBf16 && is_fp8(spec_.kv_dtype);
    a.k.dim += a.row_parts.twice ? behind : 0;
    a.k.row_bytes = spec_.head_dim_v * size_of(spec_.kv_dtype), a.v.row_bytes = behind * size_of(spec_.kv_dtype);
  } else if (spec_.kv_format == KvFormat::fp8_ds_mla) {
    a.row_parts = {.first = kDsMlaLatent,
                   .second = kDsMlaRope,
                   .first_type = kE4m3,
                   .second_type = kBf16,
                   .first_stride = 1,
                   .second_stride = 2,
                   .group = kDsMlaGroup,
                   .scales_at = kDsMlaScalesAt};
    a.k.type = a.v.type = widened_;
    a.k.row_bytes = kDsMlaRopeAt, a.v.row_bytes = kDsMlaBytes - kDsMlaRopeAt;
  }
}

void KvSides::read(const KvCache& cache, AttentionParams& a) {
  const KvCache kv = spec_.kv_format == KvFormat::latent ? with_values(spec_, cache) : cache;
  a.k = side(kv.k, kv.k_scale, spec_.head_dim_qk);
  if (spec_.kv_format == KvFormat::latent_rope) {
    a.v = side(kv.k_rope, kv.k_scale, spec_.head_dim_v);
  } else if (spec_.kv_format == KvFormat::fp8_ds_mla) {
    a.v = a.k;
    a.v.data += kDsMlaRopeAt;
  } else {
    a.v = side(kv.v, kv.v_scale, spec_.head_dim_v);
  }
  const long first_stride = a.k.dim_stride, second_stride = a.v.dim_stride;
  describe(a);
  if (a.row_parts.first == 0) return;
  a.k.dim_stride = a.v.dim_stride = 0;
  if (spec_.kv_format != KvFormat::latent_rope) return;
  a.row_parts.first_stride = first_stride, a.row_parts.second_stride = second_stride;
  for (int h = 0; h < spec_.num_kv_heads; ++h)
    second_factors_[size_t(h)] = scale_of_head(kv.k_rope_scale, spec_.kv_dtype, h) / scale_of_head(kv.k_scale, spec_.kv_dtype, h);
  if (std::ranges::any_of(second_factors_, [](float factor) { return factor != 1.f; }))
    a.row_parts.second_factors = second_factors_.data();
  else
    a.row_parts.twice = false, a.k.dim = spec_.head_dim_qk;
}

void KvSides::write(const KvCache& cache, WriteKvParams& w) const {
  w.packed = spec_.kv_format == KvFormat::amx_packed;
  w.ds_mla = spec_.kv_format == KvFormat::fp8_ds_mla;
  if (spec_.kv_format == KvFormat::latent_rope) {
    w.k = side(cache.k, cache.k_scale, spec_.head_dim_v);
    w.v = side(cache.k_rope, cache.k_rope_scale, spec_.head_dim_qk - spec_.head_dim_v);
    w.src_v = w.src_k + spec_.head_dim_v * w.k_dim_stride;
    w.v_token_stride = w.k_token_stride, w.v_head_stride = w.k_head_stride, w.v_dim_stride = w.k_dim_stride;
    return;
  }
  w.k = side(cache.k, cache.k_scale, spec_.head_dim_qk);
  if (codec_of(spec_).values_in_keys)
    w.src_v = nullptr;
  else
    w.v = side(cache.v, cache.v_scale, spec_.head_dim_v);
}

}  // namespace imbrex::cpu

// MlaSpec: the attention that it is made of, printing, and the rules that hold for every backend.
#include "mla/spec_fields.h"

#include <fmt/format.h>

#include <cmath>

#include "attention/kv_codec.h"
#include "core/check.h"

namespace imbrex {

float MlaSpec::logit_scale() const { return scale != 0.f ? scale : float(1.0 / std::sqrt(double(qk_dim()))); }

AttentionSpec MlaSpec::latent_spec() const {
  AttentionSpec spec;
  spec.num_q_heads = num_heads;
  spec.num_kv_heads = 1;
  spec.head_dim_qk = latent_dim();
  spec.head_dim_v = kv_lora_rank;
  spec.q_dtype = dtype;
  spec.kv_dtype = kv_dtype;
  spec.kv_format = kv_format;
  spec.block_size = block_size;
  spec.mask = mask;
  spec.score.scale = logit_scale();
  spec.score.sinks = sinks;
  return spec;
}

AttentionSpec MlaSpec::expanded_spec() const {
  AttentionSpec spec;
  spec.num_q_heads = spec.num_kv_heads = num_heads;
  spec.head_dim_qk = qk_dim();
  spec.head_dim_v = v_dim;
  spec.q_dtype = spec.kv_dtype = dtype;
  spec.block_size = 0;
  spec.mask = mask;
  spec.score.scale = logit_scale();
  spec.score.sinks = sinks;
  return spec;
}

void MlaSpec::validate() const {
  const auto check_dim = [](std::string_view code, int dim, int least, int most) {
    check(dim >= least && dim <= most && dim % 8 == 0, code, "expected a multiple of 8 from {} to {}, got {}", least, most, dim);
  };
  constexpr int kMost = AttentionSpec::kMaxHeadDim;
  check_dim("mla.kv_lora_rank", kv_lora_rank, 8, kMost);
  check_dim("mla.qk_rope_dim", qk_rope_dim, 0, kMost - kv_lora_rank);
  check_dim("mla.qk_nope_dim", qk_nope_dim, 8, kMost - qk_rope_dim);
  check_dim("mla.v_dim", v_dim, 8, kMost);
  check(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, "mla.dtype", "expected f32, bf16 or f16, got {}",
        to_string(dtype));
  check(codec_of(kv_format).values_in_keys, "mla.kv_format", "expected a format whose values are a part of its keys, such as {}, got {}",
        to_string(KvFormat::latent), to_string(kv_format));
  check(block_size >= 1, "mla.block_size", "expected 1 token or more in a block, got {}", block_size);
  check(std::isfinite(scale), "mla.scale", "expected a finite scale, got {}", scale);
  latent_spec().validate();
  expanded_spec().validate();
}

std::string MlaSpec::str() const {
  std::string text =
      fmt::format("mla q{} latent{} nope{} rope{} v{} {}", num_heads, kv_lora_rank, qk_nope_dim, qk_rope_dim, v_dim, to_string(dtype));
  if (kv_dtype != dtype) text += fmt::format(" kv={}", to_string(kv_dtype));
  text += fmt::format(" block{}", block_size);
  if (kv_format != KvFormat::latent) text += fmt::format(" {}", to_string(kv_format));
  text += " " + mask.str();
  if (scale != 0.f) text += fmt::format(" scale={:.6g}", scale);
  if (sinks) text += " sinks";
  if (absorbed) text += " absorbed";
  return text;
}

}  // namespace imbrex

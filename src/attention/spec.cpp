// AttentionSpec: printing, and the rules that hold for every backend.
#include "imbrex/spec.h"

#include <fmt/format.h>

#include <cmath>

#include "attention/kv_codec.h"
#include "attention/spec_fields.h"
#include "core/check.h"

namespace imbrex {

const char* to_string(AttentionKind kind) {
  switch (kind) {
    case AttentionKind::decoder: return "decoder";
    case AttentionKind::encoder: return "encoder";
    case AttentionKind::encoder_only: return "encoder_only";
    case AttentionKind::encoder_decoder: return "encoder_decoder";
  }
  return "unknown";
}

static void append(std::string& text, std::string_view word) {
  if (word.empty()) return;
  if (!text.empty()) text += ' ';
  text += word;
}

// What the fields of a part say. Those of T5's bias are one word.
static std::string str_of(std::string_view part, const Mask& mask, const ScoreMod& score) {
  AttentionSpec spec;
  const AttentionSpec usual;
  spec.mask = mask, spec.score = score;
  std::string text;
  for_each_field(spec, usual, [&](const SpecField& field, const auto& value, const auto& default_value) {
    if (field.part != part) return;
    if (!field.member.starts_with("relative_")) append(text, field_text(field, value, default_value));
    if (field.member == "relative_buckets" && score.relative_buckets > 0)
      append(text, fmt::format("relative={}/{}{}", score.relative_buckets, score.relative_max_distance,
                               score.relative_bidirectional ? "/bidirectional" : ""));
  });
  return text;
}

std::string Mask::str() const {
  const std::string text = str_of("mask", *this, {});
  return text.empty() ? "full" : text;
}

std::string ScoreMod::str() const { return str_of("score", {}, *this); }

std::span<const DType> AttentionSpec::out_dtypes() const {
  static constexpr DType kF32[] = {DType::f32}, kBf16[] = {DType::bf16, DType::f32}, kF16[] = {DType::f16, DType::f32},
                         kFp8[] = {DType::bf16, DType::f16, DType::f32};
  switch (q_dtype) {
    case DType::f32: return kF32;
    case DType::bf16: return kBf16;
    case DType::f16: return kF16;
    default: return kFp8;
  }
}

std::span<const DType> AttentionSpec::new_kv_dtypes() const {
  const std::span<const DType> outputs = out_dtypes();
  return q_dtype == DType::f32 ? outputs : outputs.first(outputs.size() - 1);  // f32 is the last
}

float AttentionSpec::scale() const { return score.scale != 0.f ? score.scale : float(1.0 / std::sqrt(double(head_dim_qk))); }

std::string AttentionSpec::str() const {
  std::string text = fmt::format("{} q{}/kv{} d{}", to_string(kind), num_q_heads, num_kv_heads, head_dim_qk);
  if (head_dim_v != head_dim_qk) text += fmt::format("/{}", head_dim_v);
  append(text, to_string(q_dtype));
  if (kv_dtype != q_dtype) append(text, fmt::format("kv={}", to_string(kv_dtype)));
  append(text, block_size == 0 ? "ragged" : fmt::format("block{}", block_size));
  if (kv_format != KvFormat::strided) append(text, to_string(kv_format));
  append(text, mask.str());
  append(text, score.str());
  if (!score_mod.empty()) append(text, fmt::format("score_mod({})", score_mod.str()));
  if (!mask_mod.empty()) append(text, fmt::format("mask_mod({})", mask_mod.str()));
  return text;
}

// Bounds that keep products of a few sizes within an int; no model comes near them.
static constexpr int kMaxSpecHeads = 4096, kMaxBlockSize = 65536, kMaxRelativeDistance = 1 << 20;

static void check_head_dim(std::string_view code, int head_dim) {
  check(head_dim > 0 && head_dim <= AttentionSpec::kMaxHeadDim && head_dim % 8 == 0, code, "expected a multiple of 8, at most {}, got {}",
        AttentionSpec::kMaxHeadDim, head_dim);
}

static void validate_mask(const Mask& mask) {
  check(mask.window_left >= -1, "spec.mask.window_left", "expected -1 (no limit) or more, got {}", mask.window_left);
  check(mask.window_right >= -1, "spec.mask.window_right", "expected -1 (no limit) or more, got {}", mask.window_right);
  check(mask.chunk >= 0, "spec.mask.chunk", "expected 0 (off) or more, got {}", mask.chunk);
  check(mask.chunk_lookback == 0 || (mask.chunk > 0 && mask.chunk_lookback > 0), "spec.mask.chunk_lookback",
        "expected 0, or 1 or more beside a chunk, got {} with chunk {}", mask.chunk_lookback, mask.chunk);
}

static void validate_tree(const AttentionSpec& spec) {
  const Mask& mask = spec.mask;
  if (!mask.tree) return;
  check(spec.kind == AttentionKind::decoder && mask.causal, "spec.mask.tree.causal", "expected a causal decoder beside a tree, got {}",
        spec.str());
  check(!mask.custom && !mask.positions, "spec.mask.tree.alone",
        "a tree says which keys queries see, and their positions: expected no custom mask and no given positions, got {}", mask.str());
}

static void check_type(const Expression& e, ExpressionType type, std::string_view code) {
  check(e.type() == type, code, "expected a {} expression, got {}: {}", to_string(type), to_string(e.type()), e.str());
}

static void validate_expressions(const AttentionSpec& spec) {
  const Mask& mask = spec.mask;
  if (!spec.score_mod.empty()) {
    check_type(spec.score_mod, ExpressionType::real, "spec.score_mod.type");
    check(!mask.tree, "spec.score_mod.tree", "expected no tree of drafts beside a score_mod, got {}", mask.str());
  }
  if (!spec.mask_mod.empty()) {
    check_type(spec.mask_mod, ExpressionType::boolean, "spec.mask_mod.type");
    check(!spec.mask_mod.uses(ExpressionVariable::score), "spec.mask_mod.score",
          "expected a mask that does not depend on the score, got {}", spec.mask_mod.str());
    check(!mask.tree && !mask.custom && !mask.positions, "spec.mask_mod.alone",
          "expected no tree, custom mask or given positions beside a mask_mod, got {}", mask.str());
  }
}

static void validate_score(const ScoreMod& score) {
  check(std::isfinite(score.scale), "spec.score.scale", "expected a finite scale, got {}", score.scale);
  check(std::isfinite(score.soft_cap) && score.soft_cap >= 0, "spec.score.soft_cap", "expected 0 (off) or a finite positive cap, got {}",
        score.soft_cap);
  check(score.alibi || !score.alibi_sqrt, "spec.score.alibi_sqrt", "expected alibi where alibi_sqrt is set, got none");
  check(score.relative_buckets >= 0, "spec.score.relative_buckets.negative", "expected 0 (off) or more, got {}", score.relative_buckets);
  if (score.relative_buckets == 0) {
    check(score.relative_max_distance == 0 && !score.relative_bidirectional, "spec.score.relative_unused",
          "relative_max_distance {} and relative_bidirectional {} mean nothing with 0 buckets", score.relative_max_distance,
          score.relative_bidirectional);
    return;
  }
  check(!score.alibi, "spec.score.two_biases", "alibi and {} relative buckets exclude each other", score.relative_buckets);
  // Half of the buckets of a direction are for exact distances, the others grow by logarithms of distance / exact.
  const int directions = score.relative_bidirectional ? 2 : 1, exact = score.relative_buckets / directions / 2;
  check(score.relative_buckets % directions == 0 && exact >= 1, "spec.score.relative_buckets.count", "expected {} or more{}, got {}",
        2 * directions, directions == 2 ? " and even" : "", score.relative_buckets);
  check(score.relative_max_distance > exact && score.relative_max_distance <= kMaxRelativeDistance, "spec.score.relative_max_distance",
        "expected more than {} (the exact buckets), at most {}, got {}", exact, kMaxRelativeDistance, score.relative_max_distance);
}

void AttentionSpec::validate() const {
  check(kind <= AttentionKind::encoder_decoder, "spec.kind", "{} is no attention kind", int(kind));
  const KvCodec& codec = codec_of(kv_format);
  check(num_q_heads > 0 && num_q_heads <= kMaxSpecHeads, "spec.num_q_heads", "expected 1 to {}, got {}", kMaxSpecHeads, num_q_heads);
  check(num_kv_heads > 0, "spec.num_kv_heads.positive", "expected 1 or more, got {}", num_kv_heads);
  check(num_q_heads % num_kv_heads == 0, "spec.num_kv_heads.divides", "expected a divisor of num_q_heads {}, got {}", num_q_heads,
        num_kv_heads);
  check_head_dim("spec.head_dim_qk", head_dim_qk);
  check_head_dim("spec.head_dim_v", head_dim_v);
  const bool fp8_queries = q_dtype == DType::fp8_e4m3;
  check(fp8_queries || q_dtype == DType::f32 || q_dtype == DType::bf16 || q_dtype == DType::f16, "spec.q_dtype",
        "expected f32, bf16, f16 or fp8_e4m3, got {}", to_string(q_dtype));
  check(!fp8_queries || kv_dtype == q_dtype, "spec.kv_dtype.fp8_queries", "expected {}, as the queries, got {}", to_string(q_dtype),
        to_string(kv_dtype));
  check(block_size >= 0 && block_size <= kMaxBlockSize, "spec.block_size", "expected 0 (ragged) to {}, got {}", kMaxBlockSize, block_size);
  codec.check(*this);
  validate_mask(mask);
  validate_tree(*this);
  validate_score(score);
  validate_expressions(*this);
}

}  // namespace imbrex

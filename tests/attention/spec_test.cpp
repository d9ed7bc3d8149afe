// AttentionSpec: printing, the effective scale, and one refusal for every rule.
#include "imbrex/spec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "attention/spec_fields.h"
#include "expect_error.h"
#include "spec_table.h"

namespace imbrex {
namespace {

AttentionSpec good_spec() { return {.num_q_heads = 32, .num_kv_heads = 8, .head_dim_qk = 128, .head_dim_v = 128, .mask = {}, .score = {}}; }

TEST(Spec, Prints) {
  AttentionSpec spec = good_spec();
  EXPECT_EQ(spec.str(), "decoder q32/kv8 d128 bf16 block16 causal");
  spec.kv_dtype = DType::fp8_e4m3;
  EXPECT_EQ(spec.str(), "decoder q32/kv8 d128 bf16 kv=fp8_e4m3 block16 causal");
  spec.kind = AttentionKind::encoder_only;
  spec.head_dim_v = 64;
  spec.block_size = 0;
  spec.mask = {.causal = false};
  spec.score = {.scale = 0.25f, .soft_cap = 50, .sinks = true};
  EXPECT_EQ(spec.str(), "encoder_only q32/kv8 d128/64 bf16 kv=fp8_e4m3 ragged full scale=0.25 soft_cap=50 sinks");
  const Mask mask{.window_left = 127, .window_right = 0, .chunk = 8192, .custom = true};
  EXPECT_EQ(mask.str(), "causal window_left=127 window_right=0 chunk=8192 custom");
  const ScoreMod score{.head_scales = true, .relative_buckets = 32, .relative_max_distance = 128, .relative_bidirectional = true};
  EXPECT_EQ(score.str(), "head_scales relative=32/128/bidirectional");
  EXPECT_EQ((Mask{.chunk = 64, .chunk_lookback = 1}.str()), "causal chunk=64 chunk_lookback=1");
  EXPECT_EQ((ScoreMod{.alibi = true, .alibi_sqrt = true}.str()), "alibi alibi_sqrt");
}

// A field that the table of fields does not have would be lost on the way through the C ABI, Python and case files.
TEST(Spec, TheTableHasEveryFieldOnce) {
  auto rows = test::rows_of_parts<AttentionSpec>();
  EXPECT_EQ(rows["spec"], test::num_fields<AttentionSpec>() - 2);  // its mask and its score have rows of their own
  EXPECT_EQ(rows["mask"], test::num_fields<Mask>());
  EXPECT_EQ(rows["score"], test::num_fields<ScoreMod>());
}

TEST(Spec, ExpressionsAreRefusedWhereTheyHaveNoMeaning) {
  const auto code_of = [](auto change) {
    AttentionSpec spec = good_spec();
    change(spec);
    return test::error_code([&] { spec.validate(); });
  };
  const Expression mask = parse_expression("kv <= q"), score = parse_expression("2.0 * score");
  AttentionSpec both = good_spec();
  both.mask_mod = mask, both.score_mod = score;
  both.validate();
  EXPECT_EQ(both.str(), "decoder q32/kv8 d128 bf16 block16 causal score_mod(2.0 * score) mask_mod(kv <= q)");
  EXPECT_NE(both, good_spec());
  EXPECT_EQ(code_of([&](AttentionSpec& s) { s.mask_mod = score; }), "spec.mask_mod.type");
  EXPECT_EQ(code_of([&](AttentionSpec& s) { s.score_mod = mask; }), "spec.score_mod.type");
  EXPECT_EQ(code_of([&](AttentionSpec& s) { s.score_mod = parse_expression("q - kv"); }), "spec.score_mod.type");
  EXPECT_EQ(code_of([&](AttentionSpec& s) { s.mask_mod = parse_expression("score < 1.0"); }), "spec.mask_mod.score");
  EXPECT_EQ(code_of([&](AttentionSpec& s) { s.mask_mod = mask, s.mask.custom = true; }), "spec.mask_mod.alone");
  EXPECT_EQ(code_of([&](AttentionSpec& s) { s.mask_mod = mask, s.mask.positions = true; }), "spec.mask_mod.alone");
  EXPECT_EQ(code_of([&](AttentionSpec& s) { s.mask_mod = mask, s.mask.tree = true; }), "spec.mask_mod.alone");
  EXPECT_EQ(code_of([&](AttentionSpec& s) { s.score_mod = score, s.mask.tree = true; }), "spec.score_mod.tree");
}

TEST(Spec, EveryEnumValuePrints) {
  for (int i = 0; i <= int(AttentionKind::encoder_decoder); ++i) EXPECT_STRNE(to_string(AttentionKind(i)), "unknown");
  for (int i = 0; i <= int(KvFormat::latent); ++i) EXPECT_STRNE(to_string(KvFormat(i)), "unknown");
}

TEST(Spec, ScaleDefaultsToTheRootOfTheHeadDimension) {
  AttentionSpec spec = good_spec();
  EXPECT_FLOAT_EQ(spec.scale(), 1.f / std::sqrt(128.f));
  spec.score.scale = 0.5f;
  EXPECT_EQ(spec.scale(), 0.5f);
}

TEST(Spec, TypesFollowTheQueries) {
  const auto types = [](DType q) {
    AttentionSpec spec = good_spec();
    spec.q_dtype = q;
    const auto out = spec.out_dtypes(), from = spec.new_kv_dtypes();
    return std::pair{std::vector(out.begin(), out.end()), std::vector(from.begin(), from.end())};
  };
  using Types = std::vector<DType>;
  EXPECT_EQ(types(DType::f32), (std::pair{Types{DType::f32}, Types{DType::f32}}));
  EXPECT_EQ(types(DType::f16), (std::pair{Types{DType::f16, DType::f32}, Types{DType::f16}}));
  EXPECT_EQ(types(DType::bf16), (std::pair{Types{DType::bf16, DType::f32}, Types{DType::bf16}}));
  EXPECT_EQ(types(DType::fp8_e4m3), (std::pair{Types{DType::bf16, DType::f16, DType::f32}, Types{DType::bf16, DType::f16}}));
}

TEST(Spec, UsualModelsAreValid) {
  std::vector<void (*)(AttentionSpec&)> changes = {
      [](AttentionSpec&) {},
      [](AttentionSpec& s) { s.num_q_heads = 128, s.num_kv_heads = 1, s.head_dim_qk = 576, s.head_dim_v = 512; },
      [](AttentionSpec& s) { s.head_dim_qk = 80, s.head_dim_v = 80, s.block_size = 1; },
      [](AttentionSpec& s) { s.score = {.scale = 1, .relative_buckets = 32, .relative_max_distance = 128}; },
      [](AttentionSpec& s) { s.mask.window_left = 0; },
      [](AttentionSpec& s) { s.kv_format = KvFormat::amx_packed, s.block_size = 32, s.kv_dtype = DType::fp8_e5m2; },
      [](AttentionSpec& s) { s.q_dtype = s.kv_dtype = DType::f32, s.block_size = 0; },
      [](AttentionSpec& s) { s.kv_format = KvFormat::latent, s.head_dim_qk = 576, s.head_dim_v = 512, s.block_size = 64; },
      [](AttentionSpec& s) { s.kv_format = KvFormat::latent, s.head_dim_qk = s.head_dim_v, s.block_size = 0; },
      [](AttentionSpec& s) { s.q_dtype = s.kv_dtype = DType::fp8_e4m3; },
  };
  for (const auto& change : changes) {
    AttentionSpec spec = good_spec();
    change(spec);
    EXPECT_NO_THROW(spec.validate()) << spec.str();
  }
}

struct BadSpec {
  const char* code;
  void (*spoil)(AttentionSpec&);
};

const std::vector<BadSpec>& bad_specs() {
  using S = AttentionSpec&;
  static const std::vector<BadSpec> all = {
      {"spec.kind", [](S s) { s.kind = AttentionKind(9); }},
      {"spec.kv_format", [](S s) { s.kv_format = KvFormat(9); }},
      {"spec.num_q_heads", [](S s) { s.num_q_heads = 0; }},
      {"spec.num_q_heads", [](S s) { s.num_q_heads = -32; }},
      {"spec.num_q_heads", [](S s) { s.num_q_heads = INT32_MAX; }},
      {"spec.num_kv_heads.positive", [](S s) { s.num_kv_heads = 0; }},
      {"spec.num_kv_heads.positive", [](S s) { s.num_kv_heads = INT32_MIN; }},
      {"spec.num_kv_heads.divides", [](S s) { s.num_kv_heads = 5; }},
      {"spec.num_kv_heads.divides", [](S s) { s.num_kv_heads = 64; }},
      {"spec.head_dim_qk", [](S s) { s.head_dim_qk = 0; }},
      {"spec.head_dim_qk", [](S s) { s.head_dim_qk = -8; }},
      {"spec.head_dim_qk", [](S s) { s.head_dim_qk = 100; }},
      {"spec.head_dim_qk", [](S s) { s.head_dim_qk = 584; }},
      {"spec.head_dim_v", [](S s) { s.head_dim_v = 0; }},
      {"spec.head_dim_v", [](S s) { s.head_dim_v = 4; }},
      {"spec.head_dim_v", [](S s) { s.head_dim_v = INT32_MAX; }},
      {"spec.q_dtype", [](S s) { s.q_dtype = s.kv_dtype = DType::fp8_e5m2; }},
      {"spec.q_dtype", [](S s) { s.q_dtype = DType::i32; }},
      {"spec.kv_dtype", [](S s) { s.kv_dtype = DType::u8; }},
      {"spec.kv_dtype", [](S s) { s.kv_dtype = DType::i64; }},
      {"spec.kv_dtype.fp8_queries", [](S s) { s.q_dtype = DType::fp8_e4m3; }},
      {"spec.kv_dtype.fp8_queries", [](S s) { s.q_dtype = DType::fp8_e4m3, s.kv_dtype = DType::fp8_e5m2; }},
      {"spec.block_size", [](S s) { s.block_size = -1; }},
      {"spec.block_size", [](S s) { s.block_size = INT32_MAX; }},
      {"spec.block_size.packed", [](S s) { s.kv_format = KvFormat::amx_packed, s.block_size = 24; }},
      {"spec.block_size.packed", [](S s) { s.kv_format = KvFormat::amx_packed, s.block_size = 0; }},
      {"spec.kv_dtype.packed", [](S s) { s.kv_format = KvFormat::amx_packed, s.kv_dtype = DType::f16; }},
      {"spec.head_dim_v.latent", [](S s) { s.kv_format = KvFormat::latent, s.head_dim_v = s.head_dim_qk + 8; }},
      {"spec.kv_dtype", [](S s) { s.kv_format = KvFormat::latent, s.kv_dtype = DType::u8; }},
      {"spec.mask.window_left", [](S s) { s.mask.window_left = -2; }},
      {"spec.mask.window_right", [](S s) { s.mask.window_right = INT32_MIN; }},
      {"spec.mask.chunk", [](S s) { s.mask.chunk = -1; }},
      {"spec.mask.chunk_lookback", [](S s) { s.mask.chunk_lookback = 1; }},
      {"spec.mask.chunk_lookback", [](S s) { s.mask = {.chunk = 16, .chunk_lookback = -1}; }},
      {"spec.score.alibi_sqrt", [](S s) { s.score.alibi_sqrt = true; }},
      {"spec.score.scale", [](S s) { s.score.scale = NAN; }},
      {"spec.score.scale", [](S s) { s.score.scale = INFINITY; }},
      {"spec.score.soft_cap", [](S s) { s.score.soft_cap = -1; }},
      {"spec.score.soft_cap", [](S s) { s.score.soft_cap = NAN; }},
      {"spec.score.relative_buckets.negative", [](S s) { s.score.relative_buckets = -1; }},
      {"spec.score.relative_unused", [](S s) { s.score.relative_max_distance = 128; }},
      {"spec.score.relative_unused", [](S s) { s.score.relative_bidirectional = true; }},
      {"spec.score.two_biases", [](S s) { s.score = {.alibi = true, .relative_buckets = 32, .relative_max_distance = 128}; }},
      {"spec.score.relative_buckets.count", [](S s) { s.score = {.relative_buckets = 1, .relative_max_distance = 128}; }},
      {"spec.score.relative_buckets.count",
       [](S s) { s.score = {.relative_buckets = 31, .relative_max_distance = 128, .relative_bidirectional = true}; }},
      {"spec.score.relative_buckets.count",
       [](S s) { s.score = {.relative_buckets = 2, .relative_max_distance = 128, .relative_bidirectional = true}; }},
      {"spec.score.relative_max_distance", [](S s) { s.score = {.relative_buckets = 32, .relative_max_distance = 16}; }},
      {"spec.score.relative_max_distance", [](S s) { s.score = {.relative_buckets = 32}; }},
      {"spec.score.relative_max_distance", [](S s) { s.score = {.relative_buckets = 32, .relative_max_distance = (1 << 20) + 1}; }},
      {"spec.score.relative_max_distance", [](S s) { s.score = {.relative_buckets = 32, .relative_max_distance = INT32_MAX}; }},
  };
  return all;
}

TEST(Spec, EveryBrokenRuleHasItsCode) {
  std::set<std::string> codes;
  for (const BadSpec& bad : bad_specs()) {
    AttentionSpec spec = good_spec();
    bad.spoil(spec);
    EXPECT_EQ(test::error_code([&] { spec.validate(); }), bad.code) << spec.str();
    codes.insert(bad.code);
  }
  EXPECT_EQ(codes.size(), 26u);  // every code of spec.cpp is in the table
}

}  // namespace
}  // namespace imbrex

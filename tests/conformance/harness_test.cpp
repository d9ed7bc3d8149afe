// The harness itself: a backend with any of the usual mistakes must fail. Each mistake is made around the reference.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "attention/reference.h"
#include "core/float_types.h"
#include "matrix.h"

namespace imbrex::test {
namespace {

using Mistake = std::function<void(const AttentionSpec&, int num_tokens, const Outputs&)>;

struct FaultyPlan final : Plan {
  AttentionSpec spec;
  std::unique_ptr<Plan> plan;
  const Mistake* after_run = nullptr;
  bool truncate_keys = false;
  int num_tokens = 0;

  void update(const Batch& batch, Stream) override {
    num_tokens = batch.num_tokens();
    plan->update(batch);
  }
  void write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream) const override {
    plan->write_kv(cache, k, v);
    if (!truncate_keys) return;
    uint16_t* first = cache.k.as<uint16_t>();
    for (int64_t block = 0; block < cache.k.size(0); ++block) first[block * cache.k.stride(0)] ^= 1;
  }
  void run(const Inputs& in, const Outputs& out, Stream) const override {
    plan->run(in, out);
    if (*after_run) (*after_run)(spec, num_tokens, out);
  }
  std::string str() const override { return "faulty"; }
};

struct FaultyBackend final : Backend {
  std::function<void(AttentionSpec&)> change_spec;
  Mistake after_run;
  bool truncate_keys = false;

  std::string_view name() const override { return "faulty"; }
  std::string_view description() const override { return "the reference with a mistake"; }
  std::vector<Reason> unsupported(const AttentionSpec&, const DeviceInfo&) const override { return {}; }
  std::unique_ptr<Plan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    auto plan = std::make_unique<FaultyPlan>();
    plan->spec = spec;
    AttentionSpec changed = spec;
    if (change_spec) change_spec(changed);
    plan->plan = reference_backend().plan(changed, device, options);
    plan->after_run = &after_run;
    plan->truncate_keys = truncate_keys;
    return plan;
  }
};

Judgement judge_faulty(const FaultyBackend& backend, const char* case_name) {
  const Case* c = find_case(case_name);
  EXPECT_NE(c, nullptr) << case_name;
  const Prepared& prepared = prepare(*c);
  return judge(prepared.expected, run_case(backend, probe_cpu(), prepared.inputs, default_options(*c)));
}

TEST(Harness, PassesWithoutAMistake) { EXPECT_EQ(judge_faulty({}, "dtype_bf16_bf16_mixed").failure, ""); }

TEST(Harness, FindsChangedSpecs) {
  const struct {
    const char* case_name;
    void (*change)(AttentionSpec&);
  } mistakes[] = {
      {"dtype_bf16_bf16_mixed", [](AttentionSpec& s) { s.score.scale = s.scale() * 1.01f; }},
      {"dtype_f32_f32_prefill", [](AttentionSpec& s) { s.score.scale = s.scale() * 1.00001f; }},
      {"dtype_bf16_bf16_prefill", [](AttentionSpec& s) { s.mask.causal = false; }},
      {"mask_window_128_chunked", [](AttentionSpec& s) { ++s.mask.window_left; }},
      {"mask_window_4_decode", [](AttentionSpec& s) { s.mask.window_left = s.mask.window_left == 3 ? 2 : -1; }},
      {"mask_chunk_16_prefill", [](AttentionSpec& s) { s.mask.chunk = 17; }},
      {"score_cap_30_g6_prefill", [](AttentionSpec& s) { s.score.soft_cap = 0; }},
      {"score_cap_2_g1_decode", [](AttentionSpec& s) { s.score.soft_cap = 2.2f; }},
      {"score_relative_g1_chunked", [](AttentionSpec& s) { s.score.relative_max_distance = s.score.relative_buckets > 0 ? 100 : 0; }},
  };
  for (const auto& mistake : mistakes) {
    FaultyBackend backend;
    backend.change_spec = mistake.change;
    EXPECT_FALSE(judge_faulty(backend, mistake.case_name).pass()) << mistake.case_name;
  }
}

TEST(Harness, FindsWrongOutputs) {
  const std::pair<const char*, Mistake> mistakes[] = {
      {"one element off",
       [](const AttentionSpec& s, int tokens, const Outputs& out) {
         if (tokens < 3) return;
         const int64_t at = 2 * out.out.stride(0) + out.out.stride(1) + s.head_dim_v - 1;
         store_from_float(out.out.data, out.out.dtype, at, load_as_float(out.out.data, out.out.dtype, at) + 0.06f);
       }},
      {"lse in base 2",
       [](const AttentionSpec&, int tokens, const Outputs& out) {
         for (int t = 0; t < tokens; ++t) out.lse.as<float>()[t * out.lse.stride(0)] *= 1.4426950f;
       }},
      {"lse off by a thousandth",
       [](const AttentionSpec&, int tokens, const Outputs& out) {
         for (int t = 0; t < tokens; ++t) out.lse.as<float>()[t * out.lse.stride(0)] += 1e-3f;
       }},
      {"a NaN", [](const AttentionSpec&, int, const Outputs& out) { store_from_float(out.out.data, out.out.dtype, 0, std::nanf("")); }},
      {"a padding row written", [](const AttentionSpec&, int tokens,
                                   const Outputs& out) { store_from_float(out.out.data, out.out.dtype, tokens * out.out.stride(0), 0.f); }},
      {"a gap between heads written",
       [](const AttentionSpec& s, int, const Outputs& out) { store_from_float(out.out.data, out.out.dtype, s.head_dim_v, 0.f); }},
  };
  for (const auto& [what, mistake] : mistakes) {
    FaultyBackend backend;
    backend.after_run = mistake;
    EXPECT_FALSE(judge_faulty(backend, "dtype_bf16_bf16_mixed").pass()) << what;
  }
}

TEST(Harness, FindsWrongCacheContents) {
  FaultyBackend backend;
  backend.truncate_keys = true;
  const Judgement judgement = judge_faulty(backend, "dtype_bf16_bf16_mixed");
  EXPECT_NE(judgement.failure.find("write_kv"), std::string::npos) << judgement.failure;
}

// Two implementations that share nothing but the mask and the bucket function: a mistake in the law would show as a large difference.
TEST(Harness, NaiveImplementationInFloatAgreesWithTheReference) {
  int count = 0;
  for (const Case& c : cases()) {
    if (c.spec.q_dtype != DType::f32 || c.q_gain != 1.f) continue;
    ++count;
    const Expected& expected = prepare(c).expected;
    EXPECT_LT(expected.naive.max, 1e-5) << c.name;
  }
  EXPECT_GT(count, 100);
}

TEST(Harness, ContentsDoNotDependOnTheBatch) {
  Case c = *find_case("dtype_bf16_bf16_mixed");
  const CaseInputs all = make_inputs(c);
  c.requests = {c.requests[2]};
  const CaseInputs one = make_inputs(c);
  const size_t row = size_t(c.spec.num_q_heads) * size_t(c.spec.head_dim_qk) * 2;  // request 2 begins at token 1
  EXPECT_TRUE(std::equal(one.q.bytes.begin(), one.q.bytes.end(), all.q.bytes.begin() + long(row)));
}

}  // namespace
}  // namespace imbrex::test

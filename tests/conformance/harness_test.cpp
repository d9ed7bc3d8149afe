// The harness itself: a backend with any of the usual mistakes must fail. Each mistake is made around the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>

#include "attention/reference.h"
#include "core/float_types.h"
#include "matrix.h"

namespace imbrex::test {
namespace {

using Mistake = std::function<void(const AttentionSpec&, int num_tokens, const AttentionOutputs&)>;

struct FaultyPlan final : AttentionPlan {
  AttentionSpec spec;
  std::unique_ptr<AttentionPlan> plan;
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
  void run(const AttentionInputs& in, const AttentionOutputs& out, Stream) const override {
    plan->run(in, out);
    if (*after_run) (*after_run)(spec, num_tokens, out);
  }
  std::string str() const override { return "faulty"; }
};

struct FaultyBackend final : BackendOf<AttentionFamily> {
  std::function<void(AttentionSpec&)> change_spec;
  Mistake after_run;
  bool truncate_keys = false;

  std::string_view name() const override { return "faulty"; }
  std::string_view description() const override { return "the reference with a mistake"; }
  std::vector<Reason> unsupported(const AttentionSpec&, const DeviceInfo&) const override { return {}; }
  std::unique_ptr<AttentionPlan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
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
  return judge(expected_of(*c), run_case(backend, probe_cpu(), inputs_of(*c), default_options(*c)));
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
       [](const AttentionSpec& s, int tokens, const AttentionOutputs& out) {
         if (tokens < 3) return;
         const int64_t at = 2 * out.out.stride(0) + out.out.stride(1) + s.head_dim_v - 1;
         store_from_float(out.out.data, out.out.dtype, at, load_as_float(out.out.data, out.out.dtype, at) + 0.06f);
       }},
      {"lse in base 2",
       [](const AttentionSpec&, int tokens, const AttentionOutputs& out) {
         for (int t = 0; t < tokens; ++t) out.lse.as<float>()[t * out.lse.stride(0)] *= 1.4426950f;
       }},
      {"lse off by a thousandth",
       [](const AttentionSpec&, int tokens, const AttentionOutputs& out) {
         for (int t = 0; t < tokens; ++t) out.lse.as<float>()[t * out.lse.stride(0)] += 1e-3f;
       }},
      {"a NaN",
       [](const AttentionSpec&, int, const AttentionOutputs& out) { store_from_float(out.out.data, out.out.dtype, 0, std::nanf("")); }},
      {"a padding row written",
       [](const AttentionSpec&, int tokens, const AttentionOutputs& out) {
         store_from_float(out.out.data, out.out.dtype, tokens * out.out.stride(0), 0.f);
       }},
      {"a gap between heads written",
       [](const AttentionSpec& s, int, const AttentionOutputs& out) { store_from_float(out.out.data, out.out.dtype, s.head_dim_v, 0.f); }},
  };
  for (const auto& [what, mistake] : mistakes) {
    FaultyBackend backend;
    backend.after_run = mistake;
    EXPECT_FALSE(judge_faulty(backend, "dtype_bf16_bf16_mixed").pass()) << what;
  }
}

// A sum of thousands of floats is further off than the exponentials in it; but by less than a key of the sum.
TEST(Harness, KnowsWhatRoundingMakesOfLongSums) {
  constexpr int kKeys = 6000, kLanes = 4;
  Case c = *find_case("dtype_f32_f32_decode");
  c.requests = {{1, kKeys, 0}};
  const Expected expected = expect(make_inputs(c));
  const auto failure_of = [&](double off) {
    RunResult result;
    result.out = expected.out, result.lse = expected.lse;
    result.lse.back() = float(double(result.lse.back()) + off);
    return judge(expected, result).failure;
  };
  double worst = 0;  // of what lanes may make of keys that all weigh the same
  for (float weight = 0.5f; weight < 1.f; weight += 0.01f) {
    float sum = 0;
    for (int i = 0; i < kKeys / kLanes; ++i) sum += weight;
    worst = std::max(worst, std::abs(std::log(double(sum) / (double(weight) * kKeys / kLanes))));
  }
  EXPECT_GT(worst, 2 * (expected.bounds.lse_absolute + expected.bounds.lse_relative * std::abs(expected.lse.back())));
  EXPECT_EQ(failure_of(worst), "");
  EXPECT_EQ(failure_of(-worst), "");
  for (const double wrong : {1e-3, -1e-3, std::log1p(-1. / kKeys), std::log1p(1. / kKeys)}) EXPECT_NE(failure_of(wrong), "") << wrong;
}

TEST(Harness, FindsWrongCacheContents) {
  FaultyBackend backend;
  backend.truncate_keys = true;
  const Judgement judgement = judge_faulty(backend, "dtype_bf16_bf16_mixed");
  EXPECT_NE(judgement.failure.find("write_kv"), std::string::npos) << judgement.failure;
}

// Why there is more than one poison: what looks beyond a request's bytes for a larger number does not see a NaN.
TEST(Harness, FindsAMaximumOverForeignBytesAmongZerosOnly) {
  FaultyBackend backend;
  backend.after_run = [](const AttentionSpec& s, int tokens, const AttentionOutputs& o) {
    for (int d = 0; d < s.head_dim_v; ++d) {
      const float foreign = load_as_float(o.out.data, o.out.dtype, tokens * o.out.stride(0) + d);
      if (foreign > load_as_float(o.out.data, o.out.dtype, d)) store_from_float(o.out.data, o.out.dtype, d, foreign);
    }
  };
  const Case& c = *find_case("dtype_bf16_bf16_mixed");
  RunOptions options = default_options(c);
  options.padding_tokens = 1;
  const auto among = [&](Poison poison) {
    options.poison = poison;
    return run_case(backend, probe_cpu(), inputs_of(c), options);
  };
  const RunResult nan = among(Poison::nan);
  EXPECT_EQ(judge(expected_of(c), nan).failure, "");
  EXPECT_TRUE(bit_identical(nan.out, among(Poison::ones).out));
  EXPECT_FALSE(bit_identical(nan.out, among(Poison::zero).out));
}

// What a kernel with an online softmax may do wrong when a block of keys has a new maximum.
enum class Online { correct, output_not_rescaled, sum_not_rescaled, first_maximum_kept, no_maximum };

// A causal case without any feature, in blocks of 128 keys. Like real kernels it takes a new reference only when it has to.
RunResult online_softmax(const CaseInputs& in, Online mistake) {
  const AttentionSpec& spec = in.spec;
  const int heads = spec.num_q_heads, kv_heads = spec.num_kv_heads, dim_qk = spec.head_dim_qk, dim_v = spec.head_dim_v;
  RunResult result;
  int64_t token = 0, first_key = 0;
  for (const CaseRequest& r : in.requests) {
    for (int64_t end = token + r.q_len; token < end; ++token)
      for (int h = 0; h < heads; ++h) {
        const int64_t keys = r.seq_len - (end - token) + 1;
        float reference = mistake == Online::no_maximum ? 0.f : -1e30f, sum = 0;
        std::vector<float> out(size_t(dim_v), 0.f);
        for (int64_t begin = 0; begin < keys; begin += 128) {
          std::vector<float> logits;
          for (int64_t j = begin; j < std::min(keys, begin + 128); ++j) {
            double dot = 0;
            for (int d = 0; d < dim_qk; ++d)
              dot +=
                  in.q.get((token * heads + h) * dim_qk + d) * in.k.get(((first_key + j) * kv_heads + h / spec.group_size()) * dim_qk + d);
            logits.push_back(float(dot * double(spec.scale())));
          }
          const float top = *std::max_element(logits.begin(), logits.end());
          const bool may_change = mistake != Online::no_maximum && (mistake != Online::first_maximum_kept || begin == 0);
          if (may_change && top > reference + 10.f) {
            const float rescale = std::exp(reference - top);
            reference = top;
            if (mistake != Online::sum_not_rescaled) sum *= rescale;
            for (float& x : out) x *= mistake == Online::output_not_rescaled ? 1.f : rescale;
          }
          for (size_t i = 0; i < logits.size(); ++i) {
            const float p = std::exp(logits[i] - reference);
            sum += p;
            for (int d = 0; d < dim_v; ++d)
              out[size_t(d)] += p * float(in.v.get(((first_key + begin + int64_t(i)) * kv_heads + h / spec.group_size()) * dim_v + d));
          }
        }
        for (float x : out) result.out.push_back(x / sum);
        result.lse.push_back(reference + std::log(sum));
      }
    first_key += r.seq_len;
  }
  return result;
}

TEST(Harness, FindsMistakesOfAnOnlineSoftmaxByLogitsWithATrend) {
  const auto passes = [](const char* case_name, Online mistake) {
    const Case* c = find_case(case_name);
    if (c == nullptr || c->spec.kv_dtype != c->spec.q_dtype) throw std::logic_error(case_name);
    return judge(expected_of(*c), online_softmax(inputs_of(*c), mistake)).pass();
  };
  for (const char* c :
       {"dtype_f32_f32_verify", "value_rising_f32", "value_falling_f32", "value_spike_f32", "value_large_f32", "value_constant_f32"})
    EXPECT_TRUE(passes(c, Online::correct)) << c;
  for (Online mistake : {Online::output_not_rescaled, Online::sum_not_rescaled, Online::first_maximum_kept})
    for (const char* c : {"value_rising_f32", "value_rising_f16", "value_spike_f32", "value_large_f32"})
      EXPECT_FALSE(passes(c, mistake)) << c << " does not show mistake " << int(mistake);
  for (const char* c : {"value_large_f32", "value_large_f16"}) EXPECT_FALSE(passes(c, Online::no_maximum)) << c;
  // The reason why there are such cases: logits without a trend show none of this.
  for (Online mistake : {Online::output_not_rescaled, Online::sum_not_rescaled, Online::first_maximum_kept, Online::no_maximum})
    EXPECT_TRUE(passes("length_300_decode_f32", mistake)) << int(mistake);
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

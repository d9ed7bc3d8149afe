// Laws of MLA, for every backend and each of the two ways: what changes no bit of a result, and what a caller may do itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "mla_targets.h"

namespace imbrex::test {
namespace {

struct MlaWay {
  const char* name;
  MlaPlanMaker make;
};

std::vector<MlaWay> ways_of(const BackendOf<MlaFamily>& backend) {
  std::vector<MlaWay> ways{{"as it chooses", {}}};
  if (!is_composite(backend)) return ways;
  ways.push_back({"in latent space", forced_way(false, 0)});
  ways.push_back({"expanded", forced_way(true, 0)});
  ways.push_back({"expanded by 48 keys", forced_way(true, 48)});
  ways.push_back({"both ways", both_ways(48)});
  ways.push_back({"in latent space in slices", in_slices(false, 16, 0)});
  ways.push_back({"expanded in slices", in_slices(true, 16, 2)});
  return ways;
}

MlaCase mla_law_case(const MlaSpec& spec, const std::vector<CaseRequest>& requests) {
  MlaCase c{.spec = spec, .attention = {}};
  c.attention.spec = spec.latent_spec();
  c.attention.requests = requests;
  c.attention.q_gain = 3.f;
  c.attention.out_dtype = spec.dtype;
  c.attention.seed = 77;
  return c;
}

std::vector<MlaSpec> mla_law_specs() {
  MlaSpec plain{.num_heads = 5, .kv_lora_rank = 64, .qk_nope_dim = 40, .qk_rope_dim = 8, .v_dim = 24}, sinks = plain, window = plain;
  sinks.sinks = true;
  sinks.dtype = sinks.kv_dtype = DType::f32;
  window.mask.window_left = 90;
  window.kv_dtype = DType::fp8_e4m3;
  return {plain, sinks, window};
}

const std::vector<CaseRequest> kMlaRequests{{70, 300, 0}, {1, 131, 1}, {5, 201, 2}, {0, 0, 3}, {40, 40, 4}, {1, 1, 5}};

class MlaLaws : public testing::TestWithParam<MlaTarget> {
 protected:
  bool runs(const MlaSpec& spec) const { return GetParam().backend->unsupported(spec, GetParam().device).empty(); }
  RunResult run(const MlaCase& c, const RunOptions& options, const MlaWay& way) const {
    RunResult result = run_case(*GetParam().backend, GetParam().device, make_inputs(c), options, way.make);
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    return result;
  }
};

// Elements of the tokens of request r.
std::vector<float> rows_of_request(const std::vector<float>& all, const std::vector<CaseRequest>& requests, size_t r) {
  size_t tokens = 0, before = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    if (i < r) before += size_t(requests[i].q_len);
    tokens += size_t(requests[i].q_len);
  }
  const size_t row = all.size() / tokens, begin = before * row;
  return {all.begin() + long(begin), all.begin() + long(begin + size_t(requests[r].q_len) * row)};
}

TEST_P(MlaLaws, OtherRequestsAndPagesChangeNoBit) {
  for (const MlaSpec& spec : mla_law_specs()) {
    if (!runs(spec)) continue;
    for (const MlaWay& way : ways_of(*GetParam().backend)) {
      const MlaCase c = mla_law_case(spec, kMlaRequests);
      RunOptions options = default_options(c.attention);
      const RunResult together = run(c, options, way);
      for (size_t r = 0; r < kMlaRequests.size(); ++r) {
        if (kMlaRequests[r].q_len == 0) continue;
        const RunResult alone = run(mla_law_case(spec, {kMlaRequests[r]}), options, way);
        EXPECT_TRUE(bit_identical(alone.out, rows_of_request(together.out, kMlaRequests, r)))
            << spec.str() << " " << way.name << " request " << r;
        EXPECT_TRUE(bit_identical(alone.lse, rows_of_request(together.lse, kMlaRequests, r)))
            << spec.str() << " " << way.name << " request " << r;
      }
      options.page_seed = 5;
      options.block_size = 64;
      options.csr = true;
      options.order = "lbthd";
      options.padding_tokens = 7;
      const RunResult other = run(c, options, way);
      EXPECT_TRUE(bit_identical(other.out, together.out)) << spec.str() << " " << way.name;
      EXPECT_TRUE(bit_identical(other.lse, together.lse)) << spec.str() << " " << way.name;
    }
  }
}

TEST_P(MlaLaws, ThreadsChangeNoBit) {
  ThreadPool pool(5);
  const MlaSpec spec = mla_law_specs()[0];
  for (const MlaWay& way : ways_of(*GetParam().backend)) {
    const MlaCase c = mla_law_case(spec, {{70, 150, 0}, {1, 131, 1}, {5, 60, 2}, {40, 40, 3}});
    RunOptions options = default_options(c.attention);
    const RunResult alone = run(c, options, way);
    options.threads = pool.parallel_for();
    const RunResult together = run(c, options, way);
    EXPECT_TRUE(bit_identical(together.out, alone.out)) << way.name;
    EXPECT_TRUE(bit_identical(together.lse, alone.lse)) << way.name;
  }
}

// A way that is given does not depend on the number of queries, so that a prompt in steps is the prompt at once. A GPU's kernels for few
// queries and for many round at other places.
TEST_P(MlaLaws, WithAGivenWayAPromptInStepsIsThePromptAtOnce) {
  if (GetParam().device.device.type == DeviceType::cuda) GTEST_SKIP() << "steps change roundings on GPUs";
  for (const MlaSpec& spec : mla_law_specs()) {
    if (!runs(spec)) continue;
    for (const MlaWay& way : ways_of(*GetParam().backend)) {
      if (is_composite(*GetParam().backend) && (!way.make || std::string_view(way.name) == "both ways")) continue;
      if (spec.mask.window_left >= 0) continue;  // the first piece begins where the first query's window does
      const MlaCase c = mla_law_case(spec, kMlaRequests);
      RunOptions options = default_options(c.attention);
      const RunResult at_once = run(c, options, way);
      options.chunk = 17;
      const RunResult in_steps = run(c, options, way);
      EXPECT_TRUE(bit_identical(in_steps.out, at_once.out)) << spec.str() << " " << way.name;
      EXPECT_TRUE(bit_identical(in_steps.lse, at_once.lse)) << spec.str() << " " << way.name;
    }
  }
}

// What `absorbed` means: a caller that multiplies queries by W_UK and outputs by W_UV gets what the plan computes.
TEST_P(MlaLaws, AbsorbedQueriesGiveWhatTheWeightGives) {
  MlaSpec spec = mla_law_specs()[1];
  if (!runs(spec)) GTEST_SKIP() << "does not run f32";
  const MlaCase c = mla_law_case(spec, kMlaRequests);
  const MlaCaseInputs in = make_inputs(c);
  const RunOptions options = default_options(c.attention);
  const RunResult expected = run_case(*GetParam().backend, GetParam().device, in, options);
  MlaCaseInputs absorbed = in;
  absorbed.spec.absorbed = true;
  absorbed.spec.scale = spec.logit_scale();
  absorbed.attention.spec = absorbed.spec.latent_spec();
  absorbed.kv_b = {};
  const int heads = spec.num_heads, rank = spec.kv_lora_rank, nope = spec.qk_nope_dim, rope = spec.qk_rope_dim, v = spec.v_dim;
  const auto weight = [&](int h, int n, int d) { return in.kv_b.get((int64_t(h) * (nope + v) + n) * rank + d); };
  for (int64_t row = 0; row < in.attention.q.sizes[0] * heads; ++row) {
    const int64_t at = row * (rank + rope);
    for (int d = 0; d < rank; ++d) {
      double sum = 0;
      for (int n = 0; n < nope; ++n) sum += in.attention.q.get(at + n) * weight(int(row % heads), n, d);
      absorbed.attention.q.set(at + d, sum);
    }
    for (int d = 0; d < rope; ++d) absorbed.attention.q.set(at + rank + d, in.attention.q.get(at + nope + d));
  }
  const RunResult latent = run_case(*GetParam().backend, GetParam().device, absorbed, options);
  ASSERT_EQ(latent.lse.size(), expected.lse.size());
  double worst = 0;
  for (size_t row = 0; row < latent.lse.size(); ++row) {
    EXPECT_NEAR(latent.lse[row], expected.lse[row], 2e-5 * (1 + std::abs(double(expected.lse[row]))));
    for (int n = 0; n < v; ++n) {
      double sum = 0;
      for (int d = 0; d < rank; ++d) sum += latent.out[row * size_t(rank) + size_t(d)] * weight(int(row) % heads, nope + n, d);
      worst = std::max(worst, std::abs(sum - double(expected.out[row * size_t(v) + size_t(n)])));
    }
  }
  EXPECT_LT(worst, 5e-5);
}

// A graph is captured with a first step, and later steps are replayed through it.
TEST_P(MlaLaws, GraphsChangeNoBit) {
  if (GetParam().device.device.type != DeviceType::cuda) GTEST_SKIP() << "for GPUs";
  for (const MlaSpec& spec : mla_law_specs()) {
    if (!runs(spec)) continue;
    for (const MlaWay& way : {MlaWay{"in latent space", forced_way(false, 0)}, MlaWay{"in slices", in_slices(false, 16, 0)}}) {
      const MlaCase c = mla_law_case(spec, kMlaRequests);
      RunOptions options = default_options(c.attention);
      options.chunk = 17;
      const RunResult eager = run(c, options, way);
      const RunResult replayed = run_case(*GetParam().backend, GetParam().device, make_inputs(c), options, way.make, {.in_graph = true});
      EXPECT_TRUE(replayed.violations.empty()) << replayed.violations.front();
      EXPECT_TRUE(bit_identical(replayed.out, eager.out)) << spec.str() << " " << way.name;
      EXPECT_TRUE(bit_identical(replayed.lse, eager.lse)) << spec.str() << " " << way.name;
    }
  }
}

// A number that is not finite reaches the rows that see its key, and no others; pieces of a request are no exception. On GPUs other rows of
// its request, those of some heads, may get a NaN, too, since a product multiplies what a mask hides by zero.
TEST_P(MlaLaws, ANonFiniteLatentReachesTheRowsThatSeeIt) {
  for (const MlaSpec& spec : mla_law_specs()) {
    if (!runs(spec) || is_fp8(spec.kv_dtype)) continue;
    for (const MlaWay& way : ways_of(*GetParam().backend)) {
      const std::vector<CaseRequest> requests{{60, 100, 0}, {20, 80, 1}};
      const MlaCase c = mla_law_case(spec, requests);
      MlaCaseInputs in = make_inputs(c);
      const RunOptions options = default_options(c.attention);
      const RunResult clean = run_case(*GetParam().backend, GetParam().device, in, options, way.make);
      constexpr int kKey = 70;  // of the first request; its query at position 70 is the first that sees it
      in.attention.k.set(int64_t(kKey) * spec.latent_dim() + 3, std::nan(""));
      const RunResult result = run_case(*GetParam().backend, GetParam().device, in, options, way.make);
      const size_t row = size_t(spec.num_heads * spec.v_dim);
      for (size_t t = 0; t < 80; ++t) {
        const bool sees = t < 60 && int(t) + 40 >= kKey;
        const std::vector<float> mine(result.out.begin() + long(t * row), result.out.begin() + long((t + 1) * row));
        const std::vector<float> before(clean.out.begin() + long(t * row), clean.out.begin() + long((t + 1) * row));
        const auto is_nan = [](float x) { return std::isnan(x); };
        const bool all_nan = std::ranges::all_of(mine, is_nan);
        const bool beside = GetParam().device.device.type == DeviceType::cuda && t < 60 && !sees;
        bool some_nan = beside;
        for (size_t i = 0; i < row; ++i) some_nan = some_nan && (is_nan(mine[i]) || mine[i] == before[i]);
        const bool right = sees ? all_nan : bit_identical(mine, before) || some_nan;
        EXPECT_TRUE(right) << spec.str() << " " << way.name << " token " << t;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MlaLaws, testing::ValuesIn(mla_targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test

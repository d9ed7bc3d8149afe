// Laws of every backend of recurrent layers: what must not change a result does not change a bit of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "recurrent_targets.h"

namespace imbrex::test {
namespace {

const StateCaseRequests kRecurrentLawRequests{{1, 99}, {0, 0}, {70, 0}, {0, 25}, {6, 271}, {1, 0}, {130, 5}, {65, 1}};

std::vector<RecurrentSpec> recurrent_law_specs() {
  std::vector<RecurrentSpec> specs;
  for (const char* layer : {"gdn", "kda", "lightning", "mamba2", "mamba1"}) {
    RecurrentSpec spec = recurrent_layer(layer);
    spec.layout = StateLayout(specs.size() % 2);
    spec.dtype = specs.size() % 3 == 1 ? DType::f32 : DType::bf16;
    specs.push_back(spec);
  }
  specs.front().head_dim_k = 128, specs.front().head_dim_v = 96;
  return specs;
}

RecurrentCaseInputs law_inputs(const RecurrentSpec& spec, StateCaseRequests requests) {
  for (size_t r = 0; r < requests.size(); ++r)
    if (requests[r].id == 0) requests[r].id = int(r) + 1;
  return make_inputs({.name = "law", .spec = spec, .requests = std::move(requests), .seed = 7});
}

class RecurrentLaws : public testing::TestWithParam<RecurrentTarget> {
 protected:
  RecurrentRunResult run(const RecurrentCaseInputs& in, const RecurrentRunOptions& options = {}) const {
    RecurrentRunResult result = run_case(*GetParam().backend, GetParam().device, in, options);
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    return result;
  }
};

TEST_P(RecurrentLaws, StepsOfAPromptDoNotMatterWhereTheyEndAtMultiplesOfItsStep) {
  for (const RecurrentSpec& spec : recurrent_law_specs()) {
    const RecurrentCaseInputs in = law_inputs(spec, kRecurrentLawRequests);
    const int step = GetParam().backend->plan(spec, GetParam().device, {.limits = limits_of(in.requests)})->step_tokens();
    if (step == 0) continue;
    const RecurrentRunResult whole = run(in);
    for (const int chunk : {1, 7, 64}) {
      RecurrentRunOptions options;
      options.chunk = chunk * step;
      EXPECT_TRUE(same_bits(run(in, options), whole)) << spec.str() << " in steps of " << options.chunk;
    }
  }
}

TEST_P(RecurrentLaws, ThreadsDoNotMatter) {
  for (const RecurrentSpec& spec : recurrent_law_specs()) {
    const RecurrentCaseInputs in = law_inputs(spec, kRecurrentLawRequests);
    const RecurrentRunResult expected = run(in);
    EXPECT_TRUE(same_bits(run(in), expected)) << spec.str() << ", a second run";
    for (const int count : {2, 5}) {
      ThreadPool pool(count);
      RecurrentRunOptions options;
      options.threads = pool.parallel_for();
      EXPECT_TRUE(same_bits(run(in, options), expected)) << spec.str() << ", " << count << " threads";
    }
  }
}

TEST_P(RecurrentLaws, NeighboursOrderAndSlotsDoNotMatter) {
  std::mt19937_64 random(5);
  for (const RecurrentSpec& spec : recurrent_law_specs()) {
    const RecurrentCaseInputs in = law_inputs(spec, kRecurrentLawRequests);
    const RecurrentRunResult together = run(in);
    const size_t values = size_t(spec.num_v_heads) * size_t(spec.head_dim_v), slot = size_t(spec.state_bytes());
    size_t token = 0;
    for (size_t r = 0; r < in.requests.size(); token += size_t(in.requests[r++].q_len)) {
      StateCaseRequest request = in.requests[r];
      RecurrentRunOptions options;
      options.slot_seed = r + 2;
      const RecurrentRunResult alone = run(law_inputs(spec, {request}), options);
      EXPECT_TRUE(std::equal(alone.out.begin(), alone.out.end(), together.out.begin() + long(token * values)))
          << spec.str() << ", request " << r;
      EXPECT_TRUE(std::equal(alone.state.bytes.begin(), alone.state.bytes.end(), together.state.bytes.begin() + long(r * slot)))
          << spec.str() << ", state of request " << r;
    }
  }
}

// Drafts that are taken back leave the state that the tokens before them left; those that are kept leave theirs.
TEST_P(RecurrentLaws, VerifyIsDecodeTokenByToken) {
  for (RecurrentSpec spec : recurrent_law_specs()) {
    spec.num_drafts = 3;
    const RecurrentCaseInputs in = law_inputs(spec, {{9, 20, 0, 1}, {8, 0}});
    if (GetParam().backend->plan(spec, GetParam().device, {.limits = limits_of(in.requests)})->step_tokens() != 1) continue;
    const RecurrentRunResult whole = run(in);
    for (int kept = 0; kept <= 3; ++kept) {
      // Four tokens of which three are drafts, then the others from behind those that were kept.
      RecurrentRunOptions options;
      options.steps = {{{0, 4, 3, 1}, {0, 4, 3, 0}}, {{kept + 1, 9, 0, kept}, {kept + 1, 8, 0, kept}}};
      EXPECT_TRUE(same_bits(run(in, options), whole)) << spec.str() << ", " << kept << " drafts kept";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RecurrentLaws, testing::ValuesIn(recurrent_targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test

// Laws of every backend of recurrent layers: what must not change a result does not change a bit of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "expect_error.h"
#include "recurrent_targets.h"
#include "state_steps.h"
#include "state_trees.h"

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
  const auto finish = [&](size_t layer, OutputGate gate, OutputNorm norm, int groups) {
    specs[layer].out_gate = gate, specs[layer].out_norm = norm, specs[layer].norm_groups = groups;
  };
  finish(1, OutputGate::sigmoid, OutputNorm::before_gate, 0);
  finish(2, OutputGate::sigmoid, OutputNorm::before_gate, 1);
  finish(3, OutputGate::silu, OutputNorm::after_gate, 0);
  finish(4, OutputGate::silu, OutputNorm::none, 0);
  specs.push_back(specs.front());
  finish(5, OutputGate::silu, OutputNorm::before_gate, 0);
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
    if (GetParam().backend->plan(spec, GetParam().device, {.limits = limits_of(in.requests)})->step_tokens() == 0) continue;
    const RecurrentRunResult whole = run(in);
    for (int kept = 0; kept <= 3; ++kept) {
      // Four tokens of which three are drafts, then the others from behind those that were kept.
      RecurrentRunOptions options;
      options.steps = {{{0, 4, 3, 1}, {0, 4, 3, 0}}, {{kept + 1, 9, 0, kept}, {kept + 1, 8, 0, kept}}};
      EXPECT_TRUE(same_bits(run(in, options), whole)) << spec.str() << ", " << kept << " drafts kept";
    }
  }
}

std::vector<RecurrentSpec> recurrent_tree_specs() {
  std::vector<RecurrentSpec> specs = recurrent_law_specs();
  for (size_t i = 0; i < specs.size(); ++i) {
    specs[i].num_drafts = kTreeDrafts, specs[i].tree_drafts = true;
    if (i % 2 == 1) specs[i].state_dtype = i % 4 == 1 ? DType::bf16 : DType::f16;
  }
  return specs;
}

// What a draft gives follows from its path alone, and so does what begins from its row.
TEST_P(RecurrentLaws, ATreeIsItsPaths) {
  for (const RecurrentSpec& spec : recurrent_tree_specs())
    for (int accepted = 0; accepted <= kTreeDrafts; ++accepted) {
      const TreeAndPaths steps(tree_requests(), accepted);
      const RecurrentCaseInputs tree = law_inputs(spec, steps.tree);
      RecurrentCaseInputs paths = tree;
      paths.requests = steps.paths;
      for (HostTensor* t : {&paths.q, &paths.k, &paths.v, &paths.gate, &paths.beta, &paths.z}) *t = token_rows(*t, steps.tokens);
      RecurrentRunOptions of_tree, of_paths;
      of_tree.steps = steps.tree_steps, of_paths.steps = steps.path_steps, of_paths.other_sources = true;
      const RecurrentRunResult at_once = run(tree, of_tree);
      RecurrentRunResult one_by_one = run(paths, of_paths), picked = at_once;
      picked.out = token_rows(at_once.out, size_t(spec.num_v_heads) * size_t(spec.head_dim_v), steps.tokens);
      EXPECT_TRUE(same_bits(one_by_one, picked)) << spec.str() << ", draft " << accepted << " kept";
    }
}

// And where states are floats, they are those of a layer without trees.
TEST_P(RecurrentLaws, AChainIsATree) {
  for (RecurrentSpec spec : recurrent_tree_specs()) {
    const RecurrentRunResult tree = run(law_inputs(spec, with_chains_as_trees(tree_requests())));
    EXPECT_TRUE(same_bits(run(law_inputs(spec, without_parents(tree_requests()))), tree)) << spec.str();
    spec.tree_drafts = false;
    const bool rounds_steps =  // also to floats
        GetParam().backend->plan(spec, GetParam().device, {.limits = limits_of(tree_requests())})->step_tokens() == 0;
    if (spec.state_dtype != DType::f32 || rounds_steps) continue;
    EXPECT_TRUE(same_bits(run(law_inputs(spec, without_parents(tree_requests()))), tree)) << spec.str() << " and with trees";
  }
}

// The runner sees to it that slots which are read alone do not change, and that those of new states are not read. Two requests have one
// past.
TEST_P(RecurrentLaws, ASourceIsNoOtherState) {
  for (RecurrentSpec spec : recurrent_law_specs()) {
    spec.num_drafts = 3;
    const RecurrentCaseInputs in =
        law_inputs(spec, {{1, 99}, {70, 0}, {6, 271, 2, 3}, {1, 99, 0, 0, 1}, {130, 5}, {4, 99, 3, 0, 1}, {1, 0}, {0, 9}});
    RecurrentRunOptions options;
    options.other_sources = true;
    EXPECT_TRUE(same_bits(run(in, options), run(in))) << spec.str();
    options.chunk = 64;
    RecurrentRunOptions own = options;
    own.other_sources = false;
    EXPECT_TRUE(same_bits(run(in, options), run(in, own))) << spec.str() << " in steps";
  }
}

// A gate that is no number is not cut to the gate's limits: its head's outputs are none from that token on, and all others are what they
// were. Products of chunks may spread it over earlier tokens of the chunk.
TEST_P(RecurrentLaws, AGateThatIsNoNumberIsSeen) {
  constexpr int kToken = 70, kTokens = 90;
  for (RecurrentSpec spec : recurrent_law_specs()) {
    if (spec.gate == RecurrentGate::fixed) continue;
    spec.gate_min = 0.001f, spec.gate_max = 50;
    RecurrentCaseInputs in = law_inputs(spec, {{kTokens, 5}, {40}});
    const RecurrentRunResult clean = run(in);
    const bool products = GetParam().backend->plan(spec, GetParam().device, {.limits = limits_of(in.requests)})->rounded_products();
    const int head = spec.num_v_heads - 1;
    const int64_t of_head = spec.channel_gate ? spec.head_dim_k : 1;
    for (int64_t i = 0; i < of_head; ++i)
      in.gate.set((int64_t(kToken) * spec.num_v_heads + head) * of_head + i, std::numeric_limits<double>::quiet_NaN());
    const RecurrentRunResult result = run(in);
    const size_t dim = size_t(spec.head_dim_v), heads = size_t(spec.num_v_heads);
    for (size_t i = 0; i < result.out.size(); ++i) {
      const int token = int(i / dim / heads);
      const bool its_head = token < kTokens && int(i / dim % heads) == head;
      if (its_head && token >= kToken) {
        ASSERT_TRUE(std::isnan(result.out[i])) << spec.str() << ", token " << token;
      } else if (!its_head || !products || token < kToken / 64 * 64) {
        ASSERT_EQ(result.out[i], clean.out[i]) << spec.str() << ", token " << token;
      }
    }
  }
}

// Lengths, slots and drafts that are on a GPU make the step that those on the host make. A CPU's plan reads the host's.
TEST_P(RecurrentLaws, AStepFromTheDeviceIsTheSame) {
  std::mt19937_64 random(4);
  for (RecurrentSpec spec : recurrent_law_specs()) {
    spec.num_drafts = 3;
    const RecurrentCaseInputs in = law_inputs(spec, {{1, 99}, {0, 0}, {70, 0, 3}, {0, 25}, {6, 271, 2, 3}, {1, 0}, {30, 5, 0, 1}});
    RecurrentRunOptions options;
    options.on_device = true;
    if (!GetParam().on_gpu()) {
      EXPECT_EQ(error_code([&] { run(in, options); }), "update.on_device");
      continue;
    }
    EXPECT_TRUE(same_bits(run(in, options), run(in))) << spec.str();
    options.steps = random_steps(in.requests, 9, random);
    RecurrentRunOptions on_host = options;
    on_host.on_device = false;
    EXPECT_TRUE(same_bits(run(in, options), run(in, on_host))) << spec.str() << ", in steps";
  }
}

// What one step launched is replayed for all others.
TEST_P(RecurrentLaws, AGraphReplaysOtherBatches) {
  if (!GetParam().on_gpu()) {
    for (const RecurrentSpec& spec : recurrent_law_specs())
      EXPECT_FALSE(GetParam().backend->plan(spec, GetParam().device, {})->capturable());
    return;
  }
  const BackendOf<RecurrentFamily>& backend = *find_backend<RecurrentFamily>(GetParam().backend->name());
  std::mt19937_64 random(8);
  for (const RecurrentSpec& spec : recurrent_law_specs()) {
    const RecurrentCaseInputs in = law_inputs(spec, kRecurrentLawRequests);
    RecurrentRunOptions options;
    options.steps = random_steps(in.requests, 60, random);
    ASSERT_GT(options.steps.size(), 3u);
    const RecurrentRunResult expected = run(in, options);
    options.rows = num_tokens(in.requests) + 3;
    for (const bool on_device : {false, true}) {
      int captures = 0;
      const auto mirror = device_mirror(backend, {.in_graph = true, .captures = &captures});
      const auto plan = mirror->plan(spec, GetParam().device, {.limits = limits_of(in.requests), .on_device = on_device});
      ASSERT_TRUE(plan->capturable()) << spec.str();
      options.on_device = on_device;
      const RecurrentRunResult result = run_case(*plan, in, options);
      EXPECT_TRUE(result.violations.empty()) << result.violations.front();
      EXPECT_TRUE(same_bits(result, expected)) << spec.str() << (on_device ? ", lengths on the device" : "");
      EXPECT_EQ(captures, 1) << spec.str();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RecurrentLaws, testing::ValuesIn(recurrent_targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test

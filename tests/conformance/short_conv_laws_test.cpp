// Laws of every backend of the short convolution: what must not change a result does not change a bit of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "expect_error.h"
#include "short_conv_targets.h"
#include "slow_state.h"
#include "state_steps.h"
#include "state_trees.h"

namespace imbrex::test {
namespace {

const std::vector<ShortConvCaseRequest> kLawRequests{{1, 99}, {0, 0}, {150, 0}, {0, 25}, {6, 271}, {1, 0}, {200, 5}, {65, 1}};

std::vector<ShortConvSpec> law_specs() {
  return {{.dim = 64, .width = 3},
          {.dim = 1100, .width = 3, .bias = true},
          {.dim = 100, .width = 4, .dtype = DType::f32},
          {.dim = 7, .width = 2, .bias = true, .dtype = DType::f16},
          {.dim = 257, .width = 8},
          {.dim = 1100, .width = 4, .form = ShortConvForm::plain, .activation = ShortConvActivation::silu},
          {.dim = 33, .width = 4, .bias = true, .dtype = DType::f16, .form = ShortConvForm::plain, .activation = ShortConvActivation::silu},
          {.dim = 100, .width = 2, .dtype = DType::f32, .form = ShortConvForm::plain}};
}

class ShortConvLaws : public testing::TestWithParam<ShortConvTarget> {
 protected:
  ShortConvRunResult run(const ShortConvCaseInputs& in, const ShortConvRunOptions& options = {}) const {
    return checked(run_case(*GetParam().backend, GetParam().device, in, options));
  }
  static ShortConvRunResult checked(ShortConvRunResult result) {
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    return result;
  }
};

TEST_P(ShortConvLaws, StepsOfAPromptDoNotMatter) {
  std::mt19937_64 random(3);
  for (const ShortConvSpec& spec : law_specs()) {
    const ShortConvCaseInputs in = make_inputs(steep_case(spec, kLawRequests));
    const ShortConvRunResult whole = run(in);
    for (const int chunk : {1, 2, 7, 64, 65}) {
      ShortConvRunOptions options;
      options.chunk = chunk;
      EXPECT_TRUE(same_bits(run(in, options), whole)) << spec.str() << " in steps of " << chunk;
    }
    for (const int longest : {1, 5, 100}) {
      ShortConvRunOptions options;
      options.steps = random_steps(in.requests, longest, random);
      EXPECT_TRUE(same_bits(run(in, options), whole)) << spec.str() << " in steps of up to " << longest;
    }
  }
}

TEST_P(ShortConvLaws, ThreadsDoNotMatter) {
  for (const ShortConvSpec& spec : law_specs()) {
    const ShortConvCaseInputs in = make_inputs(steep_case(spec, kLawRequests));
    const ShortConvRunResult expected = run(in);
    EXPECT_TRUE(same_bits(run(in), expected)) << spec.str() << ", a second run";
    for (const int count : {2, 3, 5}) {
      ThreadPool pool(count);
      ShortConvRunOptions options;
      options.threads = pool.parallel_for();
      EXPECT_TRUE(same_bits(run(in, options), expected)) << spec.str() << ", " << count << " threads";
      options.chunk = 70;
      EXPECT_TRUE(same_bits(run(in, options), expected)) << spec.str() << ", " << count << " threads, in steps";
    }
  }
}

// The part of a result that belongs to request r.
ShortConvRunResult part_of(const ShortConvRunResult& all, const ShortConvCaseInputs& in, size_t r) {
  size_t token = 0;
  for (size_t i = 0; i < r; ++i) token += size_t(in.requests[i].q_len);
  const auto dim = long(in.spec.dim), slot = long(in.spec.state_bytes());
  ShortConvRunResult part;
  part.out.assign(all.out.begin() + long(token) * dim, all.out.begin() + (long(token) + in.requests[r].q_len) * dim);
  part.state.bytes.assign(all.state.bytes.begin() + long(r) * slot, all.state.bytes.begin() + (long(r) + 1) * slot);
  return part;
}

TEST_P(ShortConvLaws, NeighboursOrderAndSlotsDoNotMatter) {
  std::mt19937_64 random(5);
  for (const ShortConvSpec& spec : law_specs()) {
    const ShortConvCase c = steep_case(spec, kLawRequests);
    const ShortConvCaseInputs in = make_inputs(c);
    const ShortConvRunResult together = run(in);
    for (size_t r = 0; r < c.requests.size(); ++r) {
      ShortConvCase alone = c;
      alone.requests = {c.requests[r]};
      EXPECT_TRUE(same_bits(run(make_inputs(alone)), part_of(together, in, r))) << spec.str() << ", request " << r << " alone";
    }
    for (uint64_t trial = 2; trial < 6; ++trial) {
      std::vector<size_t> order(c.requests.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
      ShortConvCase permuted = c;
      for (size_t i = 0; i < order.size(); ++i) permuted.requests[i] = c.requests[order[i]];
      ShortConvRunOptions options;
      options.slot_seed = trial;
      const ShortConvCaseInputs other = make_inputs(permuted);
      const ShortConvRunResult result = run(other, options);
      for (size_t i = 0; i < order.size(); ++i)
        EXPECT_TRUE(same_bits(part_of(result, other, i), part_of(together, in, order[i]))) << spec.str() << ", permuted";
    }
  }
}

TEST_P(ShortConvLaws, StridesAndPaddingDoNotMatter) {
  for (const ShortConvSpec& spec : law_specs()) {
    const ShortConvCaseInputs in = make_inputs(steep_case(spec, kLawRequests));
    const ShortConvRunResult expected = run(in);
    for (const Gaps gaps : {Gaps::none, Gaps::aligned, Gaps::odd})
      for (const int padding : {0, 1, 70}) {
        ShortConvRunOptions options;
        options.gaps = gaps;
        options.padding_tokens = padding;
        EXPECT_TRUE(same_bits(run(in, options), expected)) << spec.str() << ", gaps " << to_string(gaps) << ", padding " << padding;
      }
  }
}

// Steps of drafts of which some are kept, again and again, and a last one without any: the tokens that were taken back come again.
std::vector<ShortConvParts> steps_with_drafts(const ShortConvCaseInputs& in, std::mt19937_64& random) {
  struct State {
    int done = 0, accepted = 0;
  };
  std::vector<State> states(in.requests.size());
  std::vector<ShortConvParts> steps;
  for (bool more = true; more;) {
    more = false;
    ShortConvParts parts;
    for (size_t r = 0; r < states.size(); ++r) {
      State& s = states[r];
      const int left = in.requests[r].q_len - s.done, drafts = std::min(int(random() % uint64_t(in.spec.num_drafts + 1)), left - 1);
      if (left == 0) {
        parts.push_back({s.done, s.done});
        continue;
      }
      const int tokens = std::min(left, drafts + int(random() % 3));
      parts.push_back({s.done, s.done + tokens, std::min(std::max(drafts, 0), tokens), s.accepted});
      if (tokens > 0) {
        const int kept = drafts > 0 ? int(random() % uint64_t(parts.back().drafts + 1)) : 0;
        s.done += tokens - parts.back().drafts + kept;
        s.accepted = in.requests[r].context_len + s.done == 0 ? 0 : kept;  // nothing has gone by where no draft of the first was kept
      }
      more = more || s.done < in.requests[r].q_len;
    }
    steps.push_back(std::move(parts));
  }
  return steps;
}

TEST_P(ShortConvLaws, DraftsThatAreTakenBackLeaveNoTrace) {
  std::mt19937_64 random(11);
  for (ShortConvSpec spec : law_specs()) {
    spec.num_drafts = 5;
    const ShortConvCaseInputs in = make_inputs(steep_case(spec, {{90, 0}, {75, 6}, {1, 3}, {0, 9}, {31, 1}}));
    const ShortConvRunResult expected = run(in);
    int with_drafts = 0, taken_back = 0;
    for (int trial = 0; trial < 4; ++trial) {
      ShortConvRunOptions options;
      options.steps = steps_with_drafts(in, random);
      for (size_t i = 0; i < options.steps.size(); ++i)
        for (size_t r = 0; r < in.requests.size(); ++r) {
          with_drafts += options.steps[i][r].drafts > 0;
          taken_back += i > 0 && options.steps[i][r].begin < options.steps[i - 1][r].end;
        }
      const ShortConvRunResult result = run(in, options);
      EXPECT_TRUE(bit_identical(result.out, expected.out)) << spec.str();
      // The last step of a request may have drafts, all of them kept: its past is then further down than that of a run without.
      for (size_t r = 0; r < in.requests.size(); ++r) {
        if (in.requests[r].q_len == 0) continue;
        const auto last = std::find_if(options.steps.rbegin(), options.steps.rend(), [&](const auto& s) { return s[r].end > s[r].begin; });
        const size_t row_bytes = size_t(spec.dim * size_of(spec.dtype)), slot = r * size_t(spec.state_bytes());
        EXPECT_EQ(std::memcmp(&result.state.bytes[slot + size_t((*last)[r].drafts) * row_bytes], &expected.state.bytes[slot],
                              size_t(spec.width - 1) * row_bytes),
                  0)
            << spec.str() << " request " << r;
      }
    }
    EXPECT_GT(with_drafts, 20);
    EXPECT_GT(taken_back, 10);
  }
}

std::vector<ShortConvSpec> conv_tree_specs() {
  std::vector<ShortConvSpec> specs = law_specs();
  for (ShortConvSpec& spec : specs) spec.num_drafts = kTreeDrafts, spec.tree_drafts = true;
  return specs;
}

// What a draft gives follows from its path alone, and so does what begins from its rows.
TEST_P(ShortConvLaws, ATreeIsItsPaths) {
  for (const ShortConvSpec& spec : conv_tree_specs())
    for (int accepted = 0; accepted <= kTreeDrafts; ++accepted) {
      const TreeAndPaths steps(tree_requests(), accepted);
      const ShortConvCaseInputs tree = make_inputs(steep_case(spec, steps.tree));
      ShortConvCaseInputs paths = tree;
      paths.requests = steps.paths, paths.input = token_rows(tree.input, steps.tokens);
      ShortConvRunOptions of_tree, of_paths;
      of_tree.steps = steps.tree_steps, of_paths.steps = steps.path_steps, of_paths.other_sources = true;
      ShortConvRunResult picked = run(tree, of_tree);
      picked.out = token_rows(picked.out, size_t(spec.dim), steps.tokens);
      EXPECT_TRUE(same_bits(run(paths, of_paths), picked)) << spec.str() << ", draft " << accepted << " kept";
    }
}

TEST_P(ShortConvLaws, AChainIsATree) {
  for (ShortConvSpec spec : conv_tree_specs()) {
    const ShortConvRunResult tree = run(make_inputs(steep_case(spec, with_chains_as_trees(tree_requests()))));
    EXPECT_TRUE(same_bits(run(make_inputs(steep_case(spec, without_parents(tree_requests())))), tree)) << spec.str();
    // And without trees, where a state has no rows for them.
    TreeAndPaths steps(without_parents(tree_requests()), 1);
    ShortConvCaseInputs in = make_inputs(steep_case(spec, steps.tree));
    ShortConvRunOptions options;
    options.steps = steps.tree_steps;
    const ShortConvRunResult whole = run(in, options);
    spec.tree_drafts = false;
    EXPECT_EQ(run(make_inputs(steep_case(spec, steps.tree)), options).out, whole.out) << spec.str();
  }
}

// The runner sees to it that slots which are read alone do not change, and that those of new states are not read. Two requests have one
// past.
TEST_P(ShortConvLaws, ASourceIsNoOtherState) {
  for (ShortConvSpec spec : law_specs()) {
    spec.num_drafts = 3;
    std::vector<ShortConvCaseRequest> requests{{1, 99}, {150, 0}, {6, 271, 2, 3}, {1, 99}, {200, 5}, {4, 99, 3}, {1, 0}, {0, 9}};
    ShortConvCase c = steep_case(spec, requests);
    for (const size_t same : {3, 5}) c.requests[same].id = c.requests[0].id;
    const ShortConvCaseInputs in = make_inputs(c);
    ShortConvRunOptions options;
    options.other_sources = true;
    EXPECT_TRUE(same_bits(run(in, options), run(in))) << spec.str();
    options.chunk = 64;
    ShortConvRunOptions own = options;
    own.other_sources = false;
    EXPECT_TRUE(same_bits(run(in, options), run(in, own))) << spec.str() << " in steps";
  }
}

// One item of a request reads the state that another one may write, if a backend lets it. On a CPU who reads a state first is kept waiting
// here, so that others are ahead; a GPU's blocks of many requests are only many.
TEST_P(ShortConvLaws, AStateIsReadBeforeItIsWritten) {
  for (ShortConvSpec spec : law_specs()) {
    spec.num_drafts = 2;
    if (!GetParam().on_gpu()) {
      const ShortConvCaseInputs in = make_inputs(steep_case(spec, {{300, 40, 2, 1}}));
      const ShortConvRunResult expected = run(in);
      int waited = 0;
      const ShortConvRunResult slow =
          checked(run_with_slow_state(*GetParam().backend, GetParam().device, in, std::chrono::milliseconds(40), waited));
      EXPECT_TRUE(same_bits(slow, expected)) << spec.str();
      EXPECT_EQ(waited > 0, SlowReads::works());
    }
    std::vector<ShortConvCaseRequest> many;
    for (int r = 0; r < (GetParam().on_gpu() ? 240 : 60); ++r)
      many.push_back({r % 4 * 64 + 1 + r % 3 + (r % 5 == 0 ? 16 : 0), 5 + r, r % 2, r % 3});
    spec.dim = std::min(spec.dim, 256);
    const ShortConvCase c = steep_case(spec, many);
    const ShortConvCaseInputs in = make_inputs(c);
    const ShortConvExpected expected = expect(in);
    ThreadPool pool(5);
    ShortConvRunOptions options;
    options.threads = pool.parallel_for();
    for (int trial = 0; trial < (GetParam().on_gpu() ? 10 : 2); ++trial) {
      const ShortConvJudgement judgement = judge(expected, in, run(in, options));
      ASSERT_TRUE(judgement.pass()) << spec.str() << ": " << judgement.failure;
    }
  }
}

// A number that is not finite reaches its channel in the tokens whose sums it is in and, where it is among the last, in the state.
TEST_P(ShortConvLaws, ANonFiniteNumberReachesItsSumsAndNothingElse) {
  enum Where { kB, kC, kX, kPast };
  constexpr int kToken = 68, kTokens = 71;
  for (const ShortConvSpec& spec : law_specs())
    for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
      for (const Where where : {kB, kC, kX, kPast}) {
        const bool gated = spec.form == ShortConvForm::gated;
        if (!gated && (where == kB || where == kC)) continue;
        ShortConvCaseInputs in = make_inputs(steep_case(spec, {{kTokens, 20}, {3, 50}}));
        const ShortConvRunResult clean = run(in);
        const int dim = spec.dim, channel = dim / 2, before = spec.width - 1;
        if (where == kPast)
          in.state.set((before - 1) * int64_t(dim) + channel, value);  // the token before the step
        else
          in.input.set(kToken * int64_t(spec.input_channels()) + (gated ? where * int64_t(dim) : 0) + channel, value);
        const ShortConvRunResult result = run(in);
        const int from = where == kPast ? 0 : kToken, to = where == kC ? kToken : where == kPast ? before - 1 : kToken + before;
        for (int t = 0; t < in.num_tokens(); ++t)
          for (int d = 0; d < dim; ++d) {
            const float x = result.out[size_t(t * dim + d)];
            const bool sees = d == channel && t >= from && t <= std::min(to, kTokens - 1);
            ASSERT_TRUE(sees ? !std::isfinite(x) : x == clean.out[size_t(t * dim + d)]) << spec.str() << " token " << t << " channel " << d;
          }
        for (int row = 0; row < before; ++row)
          for (int d = 0; d < dim; ++d) {
            const int64_t at = row * int64_t(dim) + d;
            const bool sees = d == channel && (where == kB || where == kX) && kTokens - before + row == kToken;
            ASSERT_TRUE(sees ? !std::isfinite(result.state.get(at)) : result.state.get(at) == clean.state.get(at))
                << spec.str() << " row " << row;
          }
      }
}

// The sum is the same whatever stands in front of it and behind it.
TEST_P(ShortConvLaws, ThePlainFormIsTheGatedOneWithFactorsOfOne) {
  for (const ShortConvSpec& spec : law_specs()) {
    if (spec.form != ShortConvForm::plain || spec.activation != ShortConvActivation::none) continue;
    const ShortConvCaseInputs in = make_inputs(steep_case(spec, kLawRequests));
    ShortConvCaseInputs gated = in;
    gated.spec.form = ShortConvForm::gated;
    gated.input = HostTensor::make(spec.dtype, {in.num_tokens(), 3 * int64_t(spec.dim)});
    for (int64_t t = 0; t < in.num_tokens(); ++t)
      for (int64_t d = 0; d < spec.dim; ++d) {
        const int64_t row = 3 * t * spec.dim + d;
        gated.input.set(row, 1), gated.input.set(row + spec.dim, 1),
            gated.input.set(row + 2 * int64_t(spec.dim), in.input.get(t * spec.dim + d));
      }
    EXPECT_TRUE(same_bits(run(gated), run(in))) << spec.str();
  }
}

// Lengths, slots and drafts that are on a GPU make the step that those on the host make. A CPU's plan reads the host's.
TEST_P(ShortConvLaws, AStepFromTheDeviceIsTheSame) {
  std::mt19937_64 random(4);
  for (ShortConvSpec spec : law_specs()) {
    spec.num_drafts = 3;
    const ShortConvCaseInputs in =
        make_inputs(steep_case(spec, {{1, 99}, {0, 0}, {150, 0, 3}, {0, 25}, {6, 271, 2, 3}, {1, 0}, {70, 5, 0, 1}}));
    ShortConvRunOptions options;
    options.on_device = true;
    if (!GetParam().on_gpu()) {
      EXPECT_EQ(error_code([&] { run(in, options); }), "update.on_device");
      continue;
    }
    EXPECT_TRUE(same_bits(run(in, options), run(in))) << spec.str();
    options.steps = random_steps(in.requests, 9, random);
    ShortConvRunOptions on_host = options;
    on_host.on_device = false;
    EXPECT_TRUE(same_bits(run(in, options), run(in, on_host))) << spec.str() << ", in steps";
  }
}

// What one step launched is replayed for all others.
TEST_P(ShortConvLaws, AGraphReplaysOtherBatches) {
  if (!GetParam().on_gpu()) {
    for (const ShortConvSpec& spec : law_specs()) EXPECT_FALSE(GetParam().backend->plan(spec, GetParam().device, {})->capturable());
    return;
  }
  const BackendOf<ShortConvFamily>& backend = *find_backend<ShortConvFamily>(GetParam().backend->name());
  std::mt19937_64 random(8);
  for (const ShortConvSpec& spec : law_specs()) {
    const ShortConvCaseInputs in = make_inputs(steep_case(spec, kLawRequests));
    const ShortConvRunResult expected = run(in);
    for (const bool on_device : {false, true}) {
      int captures = 0;
      const auto mirror = device_mirror(backend, {.in_graph = true, .captures = &captures});
      const auto plan = mirror->plan(spec, GetParam().device, {.limits = limits_of(in.requests), .on_device = on_device});
      ASSERT_TRUE(plan->capturable()) << spec.str();
      ShortConvRunOptions options;
      options.on_device = on_device;
      options.rows = in.num_tokens() + 3;
      options.steps = random_steps(in.requests, 60, random);
      ASSERT_GT(options.steps.size(), 3u);
      EXPECT_TRUE(same_bits(checked(run_case(*plan, in, options)), expected)) << spec.str() << (on_device ? ", lengths on the device" : "");
      EXPECT_EQ(captures, 1) << spec.str();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ShortConvLaws, testing::ValuesIn(short_conv_targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test

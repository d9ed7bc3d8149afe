// The table of cases and the laws of the short convolution on the fake driver, through the mirror: the plan for GPUs launches the kernels'
// texts, which are compiled for the host. Cases whose specialisation has no such text are left out.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "conformance/short_conv/device_mirror.h"
#include "conformance/short_conv/judge.h"
#include "conformance/state_trees.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/short_conv_texts.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::short_conv_variants, imbrex::test::ShortConvVariant;

class ShortConvOnFakeDriver : public testing::Test {
 protected:
  void SetUp() override {
    if (!fake::has_short_conv_texts()) GTEST_SKIP() << "there are no texts to run";
  }
  ~ShortConvOnFakeDriver() override {
    fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear();
  }

  const DeviceInfo device = probe_cuda().at(0);
  const BackendOf<ShortConvFamily>& backend = *find_backend<ShortConvFamily>("cuda_sm80");
};

TEST_F(ShortConvOnFakeDriver, CasesMatchTheReference) {
  const auto mirror = device_mirror(backend);
  for (const ShortConvVariant& variant : short_conv_variants()) {
    fake::use_short_conv_text(variant);
    int run = 0;
    for (const ShortConvCase& c : short_conv_cases()) {
      if (!variant.is_of(c.spec)) continue;
      if (int64_t(c.spec.dim) * c.num_tokens() > 60'000) continue;  // lanes are slow
      const ShortConvCaseInputs in = make_inputs(c);
      const ShortConvExpected expected = expect(in);
      ShortConvRunOptions options = default_options(c);
      for (const Poison poison : {Poison::nan, Poison::ones}) {
        options.poison = poison;
        const ShortConvJudgement judgement = judge(expected, in, run_case(*mirror, device, in, options));
        EXPECT_TRUE(judgement.pass()) << c.name << ", " << to_string(poison) << ": " << judgement.failure;
      }
      options.on_device = true;
      const ShortConvJudgement judgement = judge(expected, in, run_case(*mirror, device, in, options));
      EXPECT_TRUE(judgement.pass()) << c.name << ", from the device: " << judgement.failure;
      ++run;
    }
    EXPECT_GE(run, variant.tree ? 1 : 3) << variant.name;
  }
}

TEST_F(ShortConvOnFakeDriver, ATreeIsItsPaths) {
  const auto mirror = device_mirror(backend);
  int trees = 0;
  for (const ShortConvVariant& variant : short_conv_variants()) {
    if (!variant.tree) continue;
    fake::use_short_conv_text(variant);
    for (const int dim : {40, 35})
      for (const int accepted : {0, 2, 5, kTreeDrafts}) {
        const imbrex::test::TreeAndPaths steps(tree_requests(), accepted);
        ShortConvCase c{.name = "tree", .spec = variant.spec(dim, kTreeDrafts), .requests = steps.tree, .values = ShortConvValues::steep};
        for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
        const ShortConvCaseInputs tree = make_inputs(c);
        ShortConvCaseInputs paths = tree;
        paths.requests = steps.paths, paths.input = imbrex::test::token_rows(tree.input, steps.tokens);
        ShortConvRunOptions of_tree, of_paths;
        of_tree.steps = steps.tree_steps, of_paths.steps = steps.path_steps, of_paths.other_sources = true;
        of_tree.on_device = accepted == 5;
        const ShortConvRunResult whole = run_case(*mirror, device, tree, of_tree), parts = run_case(*mirror, device, paths, of_paths);
        EXPECT_TRUE(whole.violations.empty() && parts.violations.empty());
        EXPECT_EQ(parts.out, imbrex::test::token_rows(whole.out, size_t(dim), steps.tokens)) << variant.name << ", " << accepted << " kept";
        EXPECT_EQ(parts.state.bytes, whole.state.bytes) << variant.name << ", draft " << accepted << " kept";
        ++trees;
      }
  }
  EXPECT_GE(trees, 16);
}

TEST_F(ShortConvOnFakeDriver, OneGraphForAllSteps) {
  std::mt19937_64 random(8);
  for (const ShortConvVariant& variant : short_conv_variants()) {
    fake::use_short_conv_text(variant);
    ShortConvCase c{.name = "graph", .spec = variant.spec(40, 3), .requests = {{1, 99}, {0, 0}, {70, 0}, {6, 271}, {1, 0}, {33, 5}}};
    const ShortConvCaseInputs in = make_inputs(c);
    const ShortConvExpected expected = expect(in);
    for (const bool on_device : {false, true}) {
      int captures = 0;
      const auto mirror = device_mirror(backend, {.in_graph = true, .captures = &captures});
      const auto plan = mirror->plan(in.spec, device, {.limits = limits_of(in.requests), .on_device = on_device});
      EXPECT_TRUE(plan->capturable());
      ShortConvRunOptions options;
      options.on_device = on_device;
      options.rows = in.num_tokens() + 3;
      for (ShortConvParts parts(in.requests.size());;) {
        bool more = false;
        for (size_t r = 0; r < parts.size(); ++r) {
          parts[r] = {parts[r].end, std::min(in.requests[r].q_len, parts[r].end + int(random() % 20))};
          more = more || parts[r].end < in.requests[r].q_len;
        }
        options.steps.push_back(parts);
        if (!more) break;
      }
      ASSERT_GT(options.steps.size(), 3u);
      const ShortConvJudgement judgement = judge(expected, in, run_case(*plan, in, options));
      EXPECT_TRUE(judgement.pass()) << in.spec.str() << (on_device ? ", from the device: " : ": ") << judgement.failure;
      EXPECT_EQ(captures, 1);
    }
  }
}

}  // namespace
}  // namespace imbrex::cuda

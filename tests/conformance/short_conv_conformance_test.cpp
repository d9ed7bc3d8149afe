// Every backend of the short convolution, on every instruction set of this machine and on its GPU, over the whole table of cases, among
// every kind of poison.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "shards.h"
#include "short_conv_targets.h"

namespace imbrex::test {
namespace {

struct ShortConvCombination {
  const ShortConvCase* c;
  const ShortConvTarget* target;
};

std::vector<ShortConvCombination> short_conv_combinations() {
  std::vector<ShortConvCombination> all;
  for (const ShortConvCase& c : short_conv_cases())
    for (const ShortConvTarget& target : short_conv_targets())
      if (target.backend->unsupported(c.spec, target.device).empty()) all.push_back({&c, &target});
  return all;
}

class ShortConvConformance : public testing::TestWithParam<ShortConvCombination> {};

TEST_P(ShortConvConformance, MatchesTheReference) {
  const auto& [c, target] = GetParam();
  const ShortConvCaseInputs& inputs = inputs_of(*c);
  ShortConvRunOptions options = default_options(*c);
  const ShortConvRunResult result = run_case(*target->backend, target->device, inputs, options);
  const ShortConvJudgement judgement = judge(expected_of(*c), inputs, result);
  EXPECT_TRUE(judgement.pass()) << c->spec.str() << "\n" << judgement.failure;
  for (const Poison poison : other_poisons(c->seed, target->device.device.type == DeviceType::cuda)) {
    options.poison = poison;
    const ShortConvRunResult other = run_case(*target->backend, target->device, inputs, options);
    EXPECT_TRUE(other.violations.empty()) << to_string(poison) << ": " << other.violations.front();
    EXPECT_TRUE(same_bits(other, result)) << to_string(poison) << " instead of NaN changes a result";
  }
}

INSTANTIATE_TEST_SUITE_P(All, ShortConvConformance, testing::ValuesIn(by_shard(short_conv_combinations())),
                         [](const auto& info) { return info.param.c->name + "__" + info.param.target->name(); });

TEST(ShortConvTable, HasCasesOfEveryKindWithNamesOfTheirOwn) {
  std::set<std::string> names;
  std::set<std::tuple<DType, int, bool, Gaps>> kinds;
  std::set<std::tuple<ShortConvForm, ShortConvActivation, DType, bool, bool>> forms;
  std::set<int> dims;
  for (const ShortConvCase& c : short_conv_cases()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    EXPECT_NO_THROW(c.spec.validate()) << c.name;
    kinds.insert({c.spec.dtype, c.spec.width, c.spec.num_drafts > 0, c.gaps});
    dims.insert(c.spec.dim);
    forms.insert({c.spec.form, c.spec.activation, c.spec.dtype, c.spec.bias, c.spec.num_drafts > 0});
  }
  EXPECT_GE(names.size(), 250u);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int width : {2, 3, 4, 8})
      for (const Gaps gaps : {Gaps::none, Gaps::aligned, Gaps::odd})
        EXPECT_TRUE(kinds.contains({dtype, width, false, gaps})) << to_string(dtype) << " width " << width << " gaps " << to_string(gaps);
  EXPECT_EQ(forms.size(), 3u * 3 * 2 * 2) << "gated, plain and SiLU, of three types, with bias and drafts and without";
  for (const int dim : {1, 7, 64, 100, 2048}) EXPECT_TRUE(dims.contains(dim)) << dim;
}

// Whatever the machine: a backend that runs nothing of the table would be judged by nobody.
TEST(ShortConvTable, EveryBackendOfThisCpuRunsEveryCase) {
  for (const BackendOf<ShortConvFamily>* backend : backends<ShortConvFamily>()) {
    if (!backend->unsupported({.dim = 64}, probe_cpu()).empty()) continue;
    for (const ShortConvCase& c : short_conv_cases()) EXPECT_TRUE(backend->unsupported(c.spec, probe_cpu()).empty()) << c.name;
    EXPECT_TRUE(std::ranges::any_of(short_conv_targets(), [&](const ShortConvTarget& t) { return t.backend == backend; }))
        << backend->name();
  }
}

TEST(ShortConvTable, ValuesAreWhatTheirNamesSay) {
  int cases_with_infinite = 0;
  for (const ShortConvCase& c : short_conv_cases()) {
    if (c.values == ShortConvValues::plain && c.spec.dim > 100) continue;
    const HostTensor state = expect(make_inputs(c)).state;
    int below_normal = 0, infinite = 0;
    const double normal_from = c.spec.dtype == DType::f16 ? 0x1p-14 : 0x1p-126;
    for (int64_t i = 0; i < state.num_elements(); ++i) {
      const double h = std::abs(state.get(i));
      below_normal += h > 0 && h < normal_from;
      infinite += std::isinf(h);
    }
    if (c.values == ShortConvValues::tiny) {
      EXPECT_GT(below_normal, 0) << c.name;
    }
    cases_with_infinite += infinite > 0;
    if (infinite > 0) {
      EXPECT_EQ(c.values, ShortConvValues::large) << c.name;
    }
  }
  EXPECT_GE(cases_with_infinite, 3);
}

}  // namespace
}  // namespace imbrex::test

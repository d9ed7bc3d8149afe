// Every backend of recurrent layers, on every instruction set of this machine, over the whole table of cases, among every kind of poison.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "recurrent_targets.h"
#include "shards.h"
#include "state_trees.h"

namespace imbrex::test {
namespace {

struct RecurrentCombination {
  const RecurrentCase* c;
  const RecurrentTarget* target;
};

std::vector<RecurrentCombination> recurrent_combinations() {
  std::vector<RecurrentCombination> all;
  for (const RecurrentCase& c : recurrent_cases())
    for (const RecurrentTarget& target : recurrent_targets())
      if (target.backend->unsupported(c.spec, target.device).empty()) all.push_back({&c, &target});
  return all;
}

struct PreparedCase {
  RecurrentCaseInputs inputs;
  RecurrentExpected expected, of_products;
};
const PreparedCase& prepared(const RecurrentCase& c) {
  return kept<PreparedCase, 2>(c, [](const RecurrentCase& of) {
    RecurrentCaseInputs in = make_inputs(of);
    RecurrentExpected expected = expect(in, of.chunk);
    RecurrentExpected of_products = expect(in, of.chunk, true);
    return PreparedCase{std::move(in), std::move(expected), std::move(of_products)};
  });
}

class RecurrentConformance : public testing::TestWithParam<RecurrentCombination> {};

TEST_P(RecurrentConformance, IsAsExactAsFloats) {
  const auto& [c, target] = GetParam();
  const PreparedCase& given = prepared(*c);
  RecurrentRunOptions options = default_options(*c);
  const RecurrentRunResult result = run_case(*target->backend, target->device, given.inputs, options);
  const bool products = target->backend->plan(c->spec, target->device, {.limits = limits_of(c->requests)})->rounded_products();
  const RecurrentJudgement judgement = judge(products ? given.of_products : given.expected, given.inputs, result);
  EXPECT_TRUE(judgement.pass()) << c->spec.str() << "\n" << judgement.failure;
  RecordProperty("worst", std::to_string(judgement.worst));
  for (const Poison poison : other_poisons(c->seed, target->device.device.type == DeviceType::cuda)) {
    options.poison = poison;
    const RecurrentRunResult other = run_case(*target->backend, target->device, given.inputs, options);
    EXPECT_TRUE(other.violations.empty()) << to_string(poison) << ": " << other.violations.front();
    EXPECT_TRUE(same_bits(other, result)) << to_string(poison) << " instead of NaN changes a result";
  }
}

INSTANTIATE_TEST_SUITE_P(All, RecurrentConformance, testing::ValuesIn(by_shard(recurrent_combinations())),
                         [](const auto& info) { return info.param.c->name + "__" + info.param.target->name(); });

TEST(RecurrentCases, HaveNamesOfTheirOwnAndEveryLayerInBothLayouts) {
  std::set<std::string> names;
  std::set<std::pair<DType, DType>> types;
  for (const RecurrentCase& c : recurrent_cases()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    EXPECT_NO_THROW(c.spec.validate()) << c.name;
    types.insert({c.spec.dtype, c.spec.state_dtype});
  }
  EXPECT_EQ(types.size(), 9u);
  for (const char* layer : {"gdn", "kda", "kda_bounded", "lightning", "mamba2", "mamba1"})
    for (const char* layout : {"k_first", "v_first"})
      for (const char* steps : {"prefill", "decode", "verify", "tree", "mixed", "chunked", "history"})
        EXPECT_TRUE(names.contains(std::string(layer) + "_" + layout + "_" + steps)) << layer << " " << layout << " " << steps;
}

TEST(RecurrentCases, EveryBackendOfThisCpuRunsEveryCase) {
  for (const BackendOf<RecurrentFamily>* backend : backends<RecurrentFamily>()) {
    if (!backend->unsupported(recurrent_layer("gdn"), probe_cpu()).empty()) continue;
    for (const RecurrentCase& c : recurrent_cases()) EXPECT_TRUE(backend->unsupported(c.spec, probe_cpu()).empty()) << c.name;
    EXPECT_TRUE(std::ranges::any_of(recurrent_targets(), [&](const RecurrentTarget& t) { return t.backend == backend; }))
        << backend->name();
  }
}

// A layer that is computed as another one, with the same tensors, must be found by the cases of its name.
struct RecurrentMistake {
  const char* name;
  const char* cases;  // first part of their names
  void (*change)(RecurrentSpec&);
};
class RecurrentMistakes : public testing::TestWithParam<RecurrentMistake> {};

TEST_P(RecurrentMistakes, AreFound) {
  const RecurrentMistake& mistake = GetParam();
  int cases = 0, found = 0;
  for (const RecurrentCase& c : recurrent_cases()) {
    if (!c.name.starts_with(mistake.cases) || c.name.find("_k_first_") != std::string::npos || c.chunk > 0) continue;
    const RecurrentCaseInputs in = make_inputs(c);
    RecurrentCaseInputs other = in;
    mistake.change(other.spec);
    other.spec.validate();
    const RecurrentRunResult wrong = run_case(*find_backend<RecurrentFamily>("reference"), probe_cpu(), other, default_options(c));
    ++cases, found += !judge(expect(in, 0), in, wrong).pass();
  }
  EXPECT_GE(cases, 5);
  EXPECT_EQ(found, cases) << "cases that found it, of all";
}

TEST(RecurrentCases, FindTreesThatAreComputedAsChains) {
  int cases = 0;
  for (const RecurrentCase& c : recurrent_cases()) {
    if (!c.spec.tree_drafts || c.values != RecurrentValues::plain) continue;
    const RecurrentCaseInputs in = make_inputs(c);
    RecurrentCaseInputs chains = in;
    chains.requests = without_parents(in.requests);
    EXPECT_FALSE(judge(expect(in, 0), in, run_case(*find_backend<RecurrentFamily>("reference"), probe_cpu(), chains, {})).pass()) << c.name;
    ++cases;
  }
  EXPECT_GE(cases, 20);
}

// Channels that forget have the roundings of those that do not, by the delta rule; a mistake is larger than these.
TEST(RecurrentCases, AllowWhatRoundingsBetweenStepsMakeOfUnequalChannels) {
  for (const DType type : {DType::bf16, DType::f16})
    for (const RecurrentValues values : {RecurrentValues::plain, RecurrentValues::forgetful, RecurrentValues::extreme})
      for (const int chunk : {1, 8, 50}) {
        RecurrentCase c{.name = "steps", .spec = recurrent_layer("kda"), .requests = {{.q_len = 150}, {.q_len = 33, .context_len = 20}}};
        c.spec.state_dtype = type, c.chunk = chunk, c.values = values;
        const RecurrentCaseInputs in = make_inputs(c);
        const RecurrentExpected expected = expect(in, chunk);
        const auto result_of = [&](const RecurrentCaseInputs& of) {
          return judge(expected, in, run_case(*find_backend<RecurrentFamily>("reference"), probe_cpu(), of, default_options(c)));
        };
        const std::string what = fmt::format("{} values {} chunk {}", to_string(type), int(values), chunk);
        EXPECT_EQ(result_of(in).failure, "") << what;
        RecurrentCaseInputs other = in;
        other.spec.beta_scale = 1.1f;
        EXPECT_FALSE(result_of(other).pass()) << what;
      }
}

INSTANTIATE_TEST_SUITE_P(
    All, RecurrentMistakes,
    testing::Values(RecurrentMistake{"layout", "gdn_", [](RecurrentSpec& s) { s.layout = StateLayout::k_first; }},
                    RecurrentMistake{"no_norm", "gdn_", [](RecurrentSpec& s) { s.qk_norm = false; }},
                    RecurrentMistake{"beta_as_given", "gdn_", [](RecurrentSpec& s) { s.sigmoid_beta = false; }},
                    RecurrentMistake{"double_beta", "kda_v_", [](RecurrentSpec& s) { s.beta_scale = 2; }},
                    RecurrentMistake{"gate_limit", "mamba2_", [](RecurrentSpec& s) { s.gate_max = 0.1f; }},
                    RecurrentMistake{"unscaled_values", "mamba2_", [](RecurrentSpec& s) { s.scaled_values = false; }},
                    RecurrentMistake{"bound", "kda_bounded_", [](RecurrentSpec& s) { s.gate_min = -4; }},
                    RecurrentMistake{"scale", "lightning_", [](RecurrentSpec& s) { s.scale = 0; }},
                    RecurrentMistake{"gate", "outputs_gdn_", [](RecurrentSpec& s) { s.out_gate = OutputGate::sigmoid; }},
                    RecurrentMistake{"order", "outputs_gdn_", [](RecurrentSpec& s) { s.out_norm = OutputNorm::after_gate; }},
                    RecurrentMistake{"order", "outputs_mamba2_", [](RecurrentSpec& s) { s.out_norm = OutputNorm::before_gate; }},
                    RecurrentMistake{"each_head", "outputs_mamba2_", [](RecurrentSpec& s) { s.norm_groups = 0; }},
                    RecurrentMistake{"epsilon", "outputs_kda_", [](RecurrentSpec& s) { s.norm_eps = 0.1f; }},
                    RecurrentMistake{"gate", "outputs_mamba1_", [](RecurrentSpec& s) { s.out_gate = OutputGate::sigmoid; }},
                    RecurrentMistake{"order", "convolved_gdn_", [](RecurrentSpec& s) { s.conv = RecurrentConv::vkq; }},
                    RecurrentMistake{"no_silu", "convolved_mamba2_", [](RecurrentSpec& s) { s.conv_silu = false; }}),
    [](const auto& info) { return std::string(info.param.name) + "__" + info.param.cases; });

}  // namespace
}  // namespace imbrex::test

// No byte that a request does not own may reach its result: zeros, NaN and 0xff around it give the same bits.
#include <gtest/gtest.h>

#include "matrix.h"

namespace imbrex::test {
namespace {

class PoisonRuns : public testing::TestWithParam<Combination> {};

TEST_P(PoisonRuns, SameBits) {
  const auto& [c, target] = GetParam();
  const CaseInputs& inputs = inputs_of(*c);
  RunOptions options;
  ASSERT_TRUE(options_for(*c, *target, options));
  options.check_cache = false;
  options.poison = Poison::zero;
  const RunResult clean = run_case(*target->backend, target->device, inputs, options);
  EXPECT_TRUE(clean.violations.empty()) << clean.violations.front();
  for (Poison poison : {Poison::nan, Poison::ones}) {
    options.poison = poison;
    const RunResult result = run_case(*target->backend, target->device, inputs, options);
    EXPECT_TRUE(result.violations.empty()) << to_string(poison) << ": " << result.violations.front();
    EXPECT_TRUE(bit_identical(result.out, clean.out)) << to_string(poison) << " changes out";
    EXPECT_TRUE(bit_identical(result.lse, clean.lse)) << to_string(poison) << " changes lse";
  }
}

// A part of the table is enough for the reference, which reads element by element, and of the cases whose logits have a trend: they read
// what the others do.
std::vector<Combination> poison_combinations() {
  std::vector<Combination> all;
  int index = 0;
  for (const Combination& combination : combinations()) {
    if (combination.c->values != ValuePattern::plain && combination.c->seed % 4 != 0) continue;
    if (combination.target->backend->name() != "reference" || index++ % 8 == 0) all.push_back(combination);
  }
  return by_shard(all);
}

INSTANTIATE_TEST_SUITE_P(All, PoisonRuns, testing::ValuesIn(poison_combinations()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test

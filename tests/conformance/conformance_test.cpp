// Every backend, on every instruction set of this machine and in every KV format, over the whole table of cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <set>

#include "matrix.h"

namespace imbrex::test {
namespace {

class Conformance : public testing::TestWithParam<Combination> {};

TEST_P(Conformance, MatchesReference) {
  const auto& [c, target] = GetParam();
  RunOptions options;
  ASSERT_TRUE(options_for(*c, *target, options));
  const RunResult result = run_case(*target->backend, target->device, inputs_of(*c), options);
  const Judgement judgement = judge(expected_of(*c), result);
  EXPECT_TRUE(judgement.pass()) << run_spec(inputs_of(*c), options).str() << "\n" << judgement.failure;
}

INSTANTIATE_TEST_SUITE_P(All, Conformance, testing::ValuesIn(by_shard(combinations())), [](const auto& info) { return info.param.name(); });

TEST(Table, HasAtLeast500CasesWithNamesOfTheirOwn) {
  std::set<std::string> names;
  for (const Case& c : cases()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    EXPECT_NO_THROW(c.spec.validate()) << c.name;
    EXPECT_LE(c.work(), 70'000'000) << c.name << " is too slow for the reference";
  }
  EXPECT_GE(names.size(), 500u);
}

// The generic CPU kernels are to run everything but fp8 queries, which are for GPUs.
TEST(Table, ReferenceAndGenericRunEveryCase) {
  combinations();
  const auto fp8_queries = std::count_if(cases().begin(), cases().end(), [](const Case& c) { return c.spec.q_dtype == DType::fp8_e4m3; });
  for (const auto& [name, count] : totals()) {
    std::printf("[ totals   ] %s: %d cases run", name.c_str(), count.run);
    for (const auto& [code, refused] : count.refused) std::printf(", %d %s", refused, code.c_str());
    std::printf("\n");
    if (name == "reference__generic") {
      EXPECT_EQ(count.run, int(cases().size()));
    }
    if (name == "cpu_generic__generic") {
      EXPECT_EQ(count.run, int(cases().size() - size_t(fp8_queries)));
    }
  }
  EXPECT_EQ(totals().count("reference__generic"), 1u);
}

}  // namespace
}  // namespace imbrex::test

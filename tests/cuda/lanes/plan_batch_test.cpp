// The text of plan_batch.cu, run lane by lane on the host: the lists of schedule(), bit for bit, and rules that requests break.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "cuda/lanes/library.h"
#include "cuda/plan_batch_problem.h"

namespace imbrex::test {
namespace {

using cuda::test::PlanBatchProblem;

void run_and_expect(const PlanBatchProblem& problem, unsigned chance) {
  static const Library library = open_library("plan_batch_decode");
  std::vector<char> image = problem.image();
  const cuda::PlanBatchParams params = problem.params(image.data());
  library.run(&params, nullptr, {.blocks = 1, .chance = chance});
  problem.expect(image);
}

TEST(LanesPlanBatch, MakesTheListsOfTheHost) {
  int most_reqs = 0;
  std::array<int, 3> lists{};  // that have items of each kind: pieces, runs of some pieces, of all
  for (unsigned seed = 0; seed < 250 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const PlanBatchProblem problem(seed, seed % 50 == 0 ? 5000 : seed % 10 == 0 ? 700 : 40, false);
    run_and_expect(problem, seed);
    most_reqs = std::max(most_reqs, problem.num_reqs());
    for (const Schedule& list : problem.expected()) {
      const auto has = [&](bool run, bool merges) {
        return std::ranges::any_of(list.work, [&](const WorkItem& w) { return (w.piece > 0) == run && (w.merge >= 0) == merges; });
      };
      lists[0] += has(false, true), lists[1] += has(true, true), lists[2] += has(true, false);
    }
  }
  EXPECT_GT(most_reqs, 2048);  // more than find room in shared memory
  for (const int count : lists) EXPECT_GT(count, 5) << testing::PrintToString(lists);
}

TEST(LanesPlanBatch, LeavesOutRequestsThatBreakRules) {
  std::vector<int> broken(cuda::kNumBatchRules);
  for (unsigned seed = 0; seed < 150 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const PlanBatchProblem problem(seed, seed % 10 == 0 ? 400 : 20, true);
    run_and_expect(problem, seed);
    for (size_t rule = 0; rule < broken.size(); ++rule) broken[rule] += problem.broken[rule] > 0;
  }
  for (size_t rule = 0; rule < broken.size(); ++rule) EXPECT_GT(broken[rule], 5) << "rule " << rule;
}

}  // namespace
}  // namespace imbrex::test

#pragma once
// An update that fails, at whatever place, leaves the plan at the step before, which run() still computes bit for bit; and the next good
// update is as good as any.
#include <exception>
#include <string>
#include <vector>

#include "imbrex/error.h"
#include "mixed_step.h"
#include "sanitizers.h"

namespace imbrex::test {

// Sanitizers are slow: there every twelfth place, or one in 24, beginning with another one for each pair of steps.
constexpr long kEachPlace = kAddressSanitizer ? 12 : kThreadSanitizer ? 24 : 1;

// Lets the update from `first` to `second` fail at its first place, at its second, and so on until there are no more; how many there are,
// or some fewer than kEachPlace more.
// Fault(number) arms a failure for its lifetime, and has_failed() says whether it came to it. `run` waits for what it has computed. With
// `may_lose`, what has failed goes on failing, and the plan may say that it has no step left.
template <class Fault, class MakePlan, class Run>
long fail_everywhere(const MakePlan& make_plan, MixedStep& first, MixedStep& second, const Run& run, Stream stream = nullptr,
                     bool may_lose = false) {
  std::vector<float> wanted;
  {
    const auto fresh = make_plan();
    fresh->update(second.batch, stream);
    wanted = run(*fresh, second);
  }
  static long pairs = 0;
  for (long number = 1 + pairs++ % kEachPlace;; number += kEachPlace) {
    const auto plan = make_plan();
    plan->update(first.batch, stream);
    const std::vector<float> before = run(*plan, first);
    const std::string text = plan->str();
    bool updated = false;
    {
      const Fault fault(number);
      try {
        plan->update(second.batch, stream);
        updated = true;
      } catch (const std::exception&) {
      }
      if (!fault.has_failed()) return number - 1;
    }
    if (!updated) {
      EXPECT_EQ(plan->str(), text) << "after failure " << number;
      try {
        EXPECT_TRUE(run(*plan, first) == before) << "after failure " << number << " of " << text;
      } catch (const Error& error) {
        EXPECT_TRUE(may_lose && error.code() == "plan.no_step") << error.code() << " after failure " << number << " of " << text;
      }
      plan->update(second.batch, stream);
    }
    EXPECT_TRUE(run(*plan, second) == wanted) << "after the update behind failure " << number << ": " << plan->str();
    if (testing::Test::HasFailure()) return number;
  }
}

}  // namespace imbrex::test

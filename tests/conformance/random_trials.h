#pragma once
// How random cases are run: which seeds, and what each case has to keep on a target.
//
//   IMBREX_RANDOM_SECONDS=600 build/tests/conformance_tests --gtest_filter='*RandomCases*'
//
// is a campaign: it draws new cases for ten minutes, an equal part of the time for each family, and runs each on all targets.
// IMBREX_RANDOM_SEED is the first seed, 1 where it is not set; without IMBREX_RANDOM_SECONDS it is the only one, which is how a failure is
// seen again. Without either, a fixed number of seeds is run, each on some of the targets.
#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "imbrex/error.h"
#include "matrix.h"
#include "random_cases.h"

namespace imbrex::test {

struct Campaign {
  uint64_t first = 1;
  double seconds = 0;  // for each part of each family; 0: a fixed number of seeds
  bool alone = false;  // only the first seed
  // Of the targets of a case those that it is run on: outside of a campaign every `each`-th, other ones for each seed.
  bool runs(uint64_t seed, size_t target, size_t each) const { return alone || seconds > 0 || (target + seed) % each == 0; }
};
const Campaign& campaign();
constexpr int kRandomParts = 8;  // tests of each family, which are dealt out to shards

// Calls failure_of(seed), which says what is wrong or nothing, with the seeds of one of the parts.
void for_each_seed(int part, int usual_count, const char* family, const std::function<std::string(uint64_t)>& failure_of);

// Draws the case of attention of a seed and says what is wrong with it on one of the targets, with the simplest case that is wrong; or
// nothing. `each` is as in Campaign::runs().
std::string random_attention_failure(uint64_t seed, std::span<const Target>, size_t each);

// What a call does wrong, errors that it throws included.
template <class Check>
std::string caught(const Check& check) {
  try {
    return check();
  } catch (const Error& e) {
    return fmt::format("Error {}: {}", e.code(), e.what());
  } catch (const std::exception& e) {
    return fmt::format("exception: {}", e.what());
  }
}

// Reasons have names and say something, and a plan is refused.
template <class Family>
std::string refusal_failure(const BackendOf<Family>& backend, const typename Family::Spec& spec, const DeviceInfo& device,
                            const std::vector<Reason>& reasons) {
  for (const Reason& reason : reasons)
    if (reason.code.empty() || reason.wanted.empty() || reason.actual.empty()) return "a reason says nothing: " + reason.str();
  try {
    backend.plan(spec, device, {.limits = {1, 1, 1}, .threads = {}});
  } catch (const Error& e) {
    return e.code() == "backend.unsupported" ? "" : "refused as " + e.code();
  }
  return "a plan of what is refused: " + reasons.front().str();
}

// What is wrong with a second result that has to have the bits of the first one; `same` says whether it has them.
template <class Result>
std::string difference(const Result& second, bool same, const std::string& what) {
  if (!second.violations.empty()) return what + ": " + second.violations.front();
  return same ? "" : what + " changes bits";
}

}  // namespace imbrex::test

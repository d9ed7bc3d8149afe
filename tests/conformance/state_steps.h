#pragma once
// Steps at random for cases of layers that keep a state of each request in a slot.
#include <algorithm>
#include <random>
#include <vector>

#include "conformance/state_case.h"

namespace imbrex::test {

// Steps that end at random and together compute all tokens, some with no token of a request.
inline std::vector<StateParts> random_steps(const StateCaseRequests& requests, int longest, std::mt19937_64& random) {
  std::vector<StateParts> steps;
  for (bool more = true; more;) {
    more = false;
    StateParts parts;
    for (size_t r = 0; r < requests.size(); ++r) {
      const int begin = steps.empty() ? 0 : steps.back()[r].end, left = requests[r].q_len - begin;
      parts.push_back({begin, begin + std::min(left, int(random() % uint64_t(longest + 1)))});
      more = more || parts.back().end < requests[r].q_len;
    }
    steps.push_back(std::move(parts));
  }
  return steps;
}

}  // namespace imbrex::test

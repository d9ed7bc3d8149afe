// See error_stats.h.
#include "conformance/error_stats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/check.h"

namespace imbrex {

ErrorStats compare(const std::vector<float>& actual, const std::vector<float>& expected) {
  check(actual.size() == expected.size(), "conformance.size", "expected {} values, got {}", expected.size(), actual.size());
  ErrorStats stats;
  double sum = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i], b = expected[i];
    double error = std::abs(a - b);
    if (a == b || (std::isnan(a) && std::isnan(b))) error = 0;
    if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
    stats.max = std::max(stats.max, error);
    sum += error;
  }
  stats.mean = actual.empty() ? 0 : sum / double(actual.size());
  return stats;
}

bool bit_identical(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace imbrex

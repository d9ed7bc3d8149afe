#pragma once
// Nearest-rank percentiles of a list of numbers; used by trace statistics and by the replay's latencies.
#include <cstdint>
#include <vector>

namespace imbrex::serve {

struct Percentiles {
  int64_t count = 0;  // the rest is 0 when count is 0
  double min = 0, mean = 0, p25 = 0, p50 = 0, p75 = 0, p90 = 0, p95 = 0, p99 = 0, max = 0;
  friend bool operator==(const Percentiles&, const Percentiles&) = default;
};

Percentiles percentiles(std::vector<double> values);  // sorts its copy

// The smallest value such that at least `percent` per cent of the values are not larger. `sorted` is not empty.
double nearest_rank(const std::vector<double>& sorted, double percent);

}  // namespace imbrex::serve

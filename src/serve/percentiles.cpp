// Nearest-rank percentiles of a list of numbers; used by trace statistics and by the replay's latencies.
#include "serve/percentiles.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace imbrex::serve {

double nearest_rank(const std::vector<double>& sorted, double percent) {
  const auto rank = int64_t(std::ceil(percent / 100.0 * double(sorted.size())));
  return sorted[size_t(std::clamp<int64_t>(rank, 1, int64_t(sorted.size())) - 1)];
}

Percentiles percentiles(std::vector<double> values) {
  Percentiles p;
  if (values.empty()) return p;
  std::sort(values.begin(), values.end());
  p.count = int64_t(values.size());
  p.min = values.front();
  p.max = values.back();
  p.mean = std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
  p.p25 = nearest_rank(values, 25);
  p.p50 = nearest_rank(values, 50);
  p.p75 = nearest_rank(values, 75);
  p.p90 = nearest_rank(values, 90);
  p.p95 = nearest_rank(values, 95);
  p.p99 = nearest_rank(values, 99);
  return p;
}

}  // namespace imbrex::serve

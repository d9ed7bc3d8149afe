// See bench_common.h.
#include "serve/bench_common.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "serve/timer.h"

namespace imbrex::serve {

// The 95 % interval of a median is about 1.25 * 1.96 standard errors wide; the spread comes from the quartiles, which outliers
// do not move.
Timing summary_of(std::vector<double> times) {
  Timing result;
  std::sort(times.begin(), times.end());
  const size_t n = times.size();
  result.samples = int(n);
  result.best_s = times[0];
  result.median_s = n % 2 ? times[n / 2] : (times[n / 2 - 1] + times[n / 2]) / 2;
  const double spread = (times[n * 3 / 4] - times[n / 4]) / 1.35;
  result.noise = 1.25 * 1.96 * spread / std::sqrt(double(n)) / result.median_s;
  return result;
}

namespace {

// Until the median is known. A sample is long enough that reading the clock does not matter.
Timing time_on_cpu(const std::function<void()>& run, const TimingOptions& options) {
  constexpr double kMinSample = 50e-6;
  int runs = 1;
  const auto sample = [&] {
    const Timer timer;
    for (int i = 0; i < runs; ++i) run();
    return timer.elapsed() / runs;
  };
  const double first = sample();
  if (first < kMinSample) runs = int(kMinSample / std::max(first, 1e-8)) + 1;
  std::vector<double> times;
  const Timer timer;
  for (;;) {
    times.push_back(sample());
    const double elapsed = timer.elapsed();
    if (int(times.size()) < options.min_samples && elapsed < options.max_seconds) continue;
    const Timing result = summary_of(times);
    if ((elapsed >= options.min_seconds && result.noise <= options.target_noise) || elapsed >= options.max_seconds) return result;
  }
}

// Calls of few queries are shorter than the host takes to launch them: a graph of some of them is timed. Others run back to back, each
// between two marks, until the clock has settled under their load.
Timing time_on_gpu(const std::function<void()>& run, DeviceStream& stream, bool captured, int rotation) {
  for (int i = 0; i < 2; ++i) run();
  stream.mark(0);
  run();
  stream.mark(1);
  const double estimate = std::max(stream.seconds(0, 1), 5e-6);
  std::vector<double> times;
  if (captured) {
    const int calls = std::clamp(int(20e-3 / estimate), rotation, std::max(rotation, 50)) / rotation * rotation;
    const DeviceGraph graph = stream.capture([&] {
      for (int i = 0; i < calls; ++i) run();
    });
    stream.replay(graph);
    const int replays = std::clamp(int(80e-3 / (estimate * calls)), 3, 20);
    for (int i = 0; i < replays; ++i) {
      stream.mark(0);
      stream.replay(graph);
      stream.mark(1);
      times.push_back(stream.seconds(0, 1) / calls);
    }
  } else {
    const auto calls = size_t(std::clamp(int(120e-3 / estimate), 5, 200));
    for (size_t i = 0; i < std::max<size_t>(2, calls / 5); ++i) run();
    for (size_t i = 0; i < calls; ++i) {
      stream.mark(2 * i);
      run();
      stream.mark(2 * i + 1);
    }
    for (size_t i = 0; i < calls; ++i) times.push_back(stream.seconds(2 * i, 2 * i + 1));
  }
  return summary_of(times);
}

}  // namespace

Timing time_calls(const std::function<void()>& run, DeviceStream& stream, bool captured, int rotation, const TimingOptions& options) {
  return stream.asynchronous() ? time_on_gpu(run, stream, captured, rotation) : time_on_cpu(run, options);
}

double best_seconds(const std::function<void()>& call) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const Timer timer;
    call();
    best = std::min(best, timer.elapsed());
  }
  return best;
}

bool stays_in_cache(int64_t bytes, const Ceilings& ceilings, const DeviceInfo& device) {
  return ceilings.l3_read > 0 && bytes < device.l3_bytes / 2;
}

}  // namespace imbrex::serve

#pragma once
// What the benchmarks of all families share: batches, the timing of calls, and the ceilings that rates are compared with.
#include <cstdint>
#include <functional>
#include <vector>

#include "imbrex/device_stream.h"
#include "serve/ceilings.h"

namespace imbrex::serve {

struct BenchRequest {
  int q_len = 0, seq_len = 0;
};

// How often calls on a CPU are repeated. Calls on a GPU are repeated for a fixed time, because its clock settles under load.
struct TimingOptions {
  int min_samples = 5;
  double min_seconds = 0.3, max_seconds = 10;
  double target_noise = 0.01;  // stop when the median is known this well
};

struct Timing {
  double median_s = 0, best_s = 0;
  double noise = 0;  // half-width of the median's 95 % interval, as a share of the median
  int samples = 0;
};

Timing summary_of(std::vector<double> times);  // of samples, in any order
// Times calls that take turns at `rotation` sets of tensors. On a GPU they are `captured` into one graph, in whole rotations, or run back
// to back.
Timing time_calls(const std::function<void()>& run, DeviceStream&, bool captured, int rotation, const TimingOptions&);
// The best time of a few calls on the host, in seconds.
double best_seconds(const std::function<void()>&);

// The share of the ceiling that limits a call: that of arithmetic, or that of the memory that the bytes are in.
struct Share {
  double of_ceiling = 0;   // 0: no ceiling is known
  const char* bound = "";  // "flop", "L3" or "DRAM"
};
// Whether so many bytes, which the calls on a CPU take turns at, stay in its last-level cache.
bool stays_in_cache(int64_t bytes, const Ceilings&, const DeviceInfo&);

}  // namespace imbrex::serve

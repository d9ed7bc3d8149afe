#pragma once
// How many threads to use when the caller names no number.
#include <sched.h>

#include <algorithm>
#include <thread>

#include "core/env.h"

namespace imbrex {

// IMBREX_NUM_THREADS, or one for each core this process may use.
inline int default_num_threads() {
  if (const auto count = env::num_threads()) return *count;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, int(std::thread::hardware_concurrency()));  // more than 1024 cores do not fit the set
}

}  // namespace imbrex

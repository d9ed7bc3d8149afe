// See threads.h.
#include "threads.h"

#include <cstdlib>
#include <string>

#include "imbrex/error.h"
#include "openmp.h"

namespace imbrex::python {
namespace {

// A thread for each core, shared by all plans.
ParallelFor every_core() {
  static ThreadPool pool(0);
  return pool.parallel_for();
}

bool is_set(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

}  // namespace

ParallelFor shared_threads(int num_threads) {
  if (num_threads < 0)
    throw Error("python.num_threads", "expected 0 (one for each core) or more threads, got " + std::to_string(num_threads));
  if (num_threads == 1) return {};
  if (num_threads == 0 && !is_set("IMBREX_NUM_THREADS"))
    if (const auto threads = threads_of_pytorch(every_core)) return *threads;
  ParallelFor threads = every_core();
  if (num_threads > 1) threads.num_workers = num_threads;
  return threads;
}

}  // namespace imbrex::python

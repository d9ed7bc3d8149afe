#pragma once
// Calls a lambda through a ParallelFor.
#include <memory>
#include <type_traits>

#include "imbrex/parallel.h"

namespace imbrex {

// body(worker) for every worker in [0, num_workers) of the hook; without a hook one after the other in this thread.
template <class Body>
void run_parallel(const ParallelFor& threads, Body&& body) {
  if (threads.invoke == nullptr || threads.num_workers <= 1) {
    for (int worker = 0; worker < threads.num_workers; ++worker) body(worker);
    return;
  }
  using Plain = std::remove_reference_t<Body>;
  threads.invoke(
      threads.context, threads.num_workers, [](void* argument, int worker) { (*static_cast<Plain*>(argument))(worker); },
      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace imbrex

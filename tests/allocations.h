#pragma once
// Counts calls of operator new, and lets a test make them fail, in programs that have replaced it: see count_allocations.h.
#include <atomic>

namespace imbrex::test {

inline std::atomic<long> allocations{0};

// Calls of operator new, in any thread, while f runs.
template <class F>
long count_allocations(F&& f) {
  const long before = allocations.load();
  f();
  return allocations.load() - before;
}

// Calls of operator new in this thread until one fails; 0: none does.
inline thread_local long allocations_left = 0;

// While it lives, call `number` of operator new in this thread fails, counted from 1.
class FailAllocation {
 public:
  explicit FailAllocation(long number) { allocations_left = number; }
  ~FailAllocation() { allocations_left = 0; }
  FailAllocation(const FailAllocation&) = delete;
  FailAllocation& operator=(const FailAllocation&) = delete;
  bool has_failed() const { return allocations_left == 0; }
};

}  // namespace imbrex::test

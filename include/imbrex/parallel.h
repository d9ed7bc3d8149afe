#pragma once
// How CPU work is spread over threads: the library's own pool, or the host's, through one hook.
#include <memory>

namespace imbrex {

// Runs body(argument, worker) for every worker in [0, num_workers), at the same time or not, and returns when all are done.
// Results never depend on num_workers. The hook must stay valid as long as a plan uses it.
struct ParallelFor {
  using Body = void (*)(void* argument, int worker);
  int num_workers = 1;
  void* context = nullptr;
  void (*invoke)(void* context, int num_workers, Body body, void* argument) = nullptr;  // null: run in the calling thread
};

// A pool of threads that wakes in microseconds: they spin for a short time, then yield, then sleep. The caller is worker 0, and then does
// the work of each worker whose thread has not started on it.
// A forked child has the pool too: its first job starts threads of the child's own. A job must not call fork().
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // 0: one for each core this process may use; Error threads.count when negative
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ParallelFor parallel_for();  // one job at a time: concurrent callers wait for each other
  int num_threads() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace imbrex

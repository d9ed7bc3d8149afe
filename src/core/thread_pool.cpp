// ThreadPool: threads for CPU plans that call it once a layer, so waking them must cost microseconds.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/cores.h"
#include "imbrex/parallel.h"

namespace imbrex {

namespace {

using Clock = std::chrono::steady_clock;

// Between two layers of a step a worker is still awake; between two steps it may sleep. The spin is short because a thread that
// shares its core with the one it waits for only delays it; a yield costs less than a microsecond when nobody else is there.
constexpr auto kSpin = std::chrono::microseconds(4);
constexpr auto kYield = std::chrono::milliseconds(2);

void pause() { __builtin_ia32_pause(); }

// Waits actively until ready() holds; false when the time is up.
template <class Ready>
bool wait_actively(Ready ready, bool may_give_up) {
  const auto begin = Clock::now();
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      pause();
    }
    const auto waited = Clock::now() - begin;
    if (waited < kSpin) continue;
    if (may_give_up && waited > kYield) return false;
    sched_yield();
  }
}

}  // namespace

struct ThreadPool::State {
  std::vector<std::thread> threads;
  std::mutex callers;  // held during a run

  // The job, written before `epoch` rises and read after.
  ParallelFor::Body body = nullptr;
  void* argument = nullptr;
  int num_workers = 0;

  alignas(64) std::atomic<uint64_t> epoch{0};  // counts the jobs
  alignas(64) std::atomic<int> running{0};     // workers that have not finished the job
  alignas(64) std::atomic<int> sleeping{0};
  std::atomic<bool> stop{false};
  std::mutex sleep_mutex;
  std::condition_variable wake;
  std::mutex error_mutex;
  std::exception_ptr error;  // the first one a body threw

  void run_body(int worker) {
    try {
      body(argument, worker);
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  // A job may have more workers than the pool has threads; each thread then takes every num_threads-th of them.
  void run_share(int thread) {
    const int num_threads = int(threads.size()) + 1;
    for (int worker = thread; worker < num_workers; worker += num_threads) run_body(worker);
  }

  void work(int thread) {
    uint64_t seen = 0;
    const auto ready = [&] { return epoch.load(std::memory_order_acquire) != seen; };
    for (;;) {
      if (!wait_actively(ready, true)) {
        std::unique_lock lock(sleep_mutex);
        // Sequentially consistent on both sides: either this thread sees the new epoch, or the caller sees it asleep.
        sleeping.fetch_add(1);
        wake.wait(lock, [&] { return epoch.load() != seen; });
        sleeping.fetch_sub(1);
      }
      seen = epoch.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_relaxed)) return;
      run_share(thread);
      running.fetch_sub(1, std::memory_order_release);
    }
  }

  void start_job() {
    epoch.fetch_add(1);
    if (sleeping.load() == 0) return;
    { const std::lock_guard lock(sleep_mutex); }  // a thread about to sleep has either read the epoch or waits already
    wake.notify_all();
  }

  void shut_down() {
    stop.store(true);
    start_job();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  void run(int workers, ParallelFor::Body job, void* job_argument);
};

namespace {
thread_local const void* inside_pool = nullptr;  // the pool whose job this thread is running
}

void ThreadPool::State::run(int workers, ParallelFor::Body job, void* job_argument) {
  // A nested run would wait for workers that wait for it.
  if (inside_pool == this || workers <= 1 || threads.empty()) {
    for (int worker = 0; worker < workers; ++worker) job(job_argument, worker);
    return;
  }
  const std::lock_guard lock(callers);
  const void* const outer = std::exchange(inside_pool, this);
  body = job;
  argument = job_argument;
  num_workers = workers;
  error = nullptr;
  running.store(int(threads.size()), std::memory_order_relaxed);
  start_job();
  run_share(0);
  wait_actively([&] { return running.load(std::memory_order_acquire) == 0; }, false);
  inside_pool = outer;
  if (error) std::rethrow_exception(std::exchange(error, nullptr));
}

ThreadPool::ThreadPool(int num_threads) : state_(std::make_unique<State>()) {
  check(num_threads >= 0 && num_threads <= 4096, "threads.count", "expected 0 (one for each core) to 4096 threads, got {}", num_threads);
  if (num_threads == 0) num_threads = default_num_threads();
  State* const state = state_.get();
  try {
    // Threads look at the vector only within a job, and the first job comes after this.
    state->threads.reserve(size_t(num_threads - 1));
    for (int thread = 1; thread < num_threads; ++thread)
      state->threads.emplace_back([state, thread] {
        inside_pool = state;
        state->work(thread);
      });
  } catch (const std::system_error& error) {
    const size_t started = state->threads.size();
    state->shut_down();
    fail("threads.create", "the system started {} of {} threads: {}", started + 1, num_threads, error.what());
  }
}

ThreadPool::~ThreadPool() { state_->shut_down(); }

ParallelFor ThreadPool::parallel_for() {
  return {.num_workers = num_threads(),
          .context = state_.get(),
          .invoke = [](void* context, int workers, ParallelFor::Body body, void* argument) {
            static_cast<State*>(context)->run(workers, body, argument);
          }};
}

int ThreadPool::num_threads() const { return int(state_->threads.size()) + 1; }

}  // namespace imbrex

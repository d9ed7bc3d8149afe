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
#include "core/fork.h"
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

thread_local const void* inside_pool = nullptr;  // the pool whose job this thread is running

// The threads of a pool in one process, and the job they share.
struct Crew {
  const void* const pool;
  const uint64_t generation = fork_generation();  // of the process that has these threads
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

  Crew(const void* pool, int num_threads) : pool(pool) {
    try {
      // Threads look at the vector only within a job, and the first job comes after this.
      threads.reserve(size_t(num_threads - 1));
      for (int thread = 1; thread < num_threads; ++thread)
        threads.emplace_back([this, thread] {
          inside_pool = this->pool;
          work(thread);
        });
    } catch (const std::system_error& error) {
      const size_t started = threads.size();
      shut_down();
      fail("threads.create", "the system started {} of {} threads: {}", started + 1, num_threads, error.what());
    }
  }
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  ~Crew() { shut_down(); }

  void shut_down() {
    stop.store(true);
    start_job();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }

  void run(int workers, ParallelFor::Body job, void* job_argument) {
    const std::lock_guard lock(callers);
    const void* const outer = std::exchange(inside_pool, pool);
    body = job;
    argument = job_argument;
    num_workers = workers;
    error = nullptr;
    running.store(int(threads.size()), std::memory_order_relaxed);
    start_job();
    run_share(0);
    const auto forked = [&] { return fork_generation() != generation; };  // by the body itself, in the middle of the job
    wait_actively([&] { return running.load(std::memory_order_acquire) == 0 || forked(); }, false);
    inside_pool = outer;
    check(!forked(), "threads.forked", "expected a job to end in the process that began it, this one was forked off during it");
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }
};

}  // namespace

struct ThreadPool::State {
  int num_threads;
  std::atomic<Crew*> crew;

  explicit State(int num_threads) : num_threads(num_threads), crew(new Crew(this, num_threads)) {}
  ~State() {
    Crew* const last = crew.load();
    if (last->generation == fork_generation()) delete last;
  }

  // A forked child starts threads of its own at the first job. The crew of its parent is left as it is, for its locks may be held and
  // its threads cannot be joined. Without a lock, because the child's own children could find that held.
  Crew& crew_of_this_process() {
    Crew* now = crew.load(std::memory_order_acquire);
    if (now->generation == fork_generation()) return *now;
    auto made = std::make_unique<Crew>(this, num_threads);
    if (crew.compare_exchange_strong(now, made.get())) return *made.release();
    return *now;  // another thread of the child was first
  }

  void run(int workers, ParallelFor::Body job, void* argument) {
    // A nested run would wait for workers that wait for it.
    if (inside_pool == this || workers <= 1 || num_threads == 1) {
      for (int worker = 0; worker < workers; ++worker) job(argument, worker);
      return;
    }
    crew_of_this_process().run(workers, job, argument);
  }
};

ThreadPool::ThreadPool(int num_threads) {
  check(num_threads >= 0 && num_threads <= 4096, "threads.count", "expected 0 (one for each core) to 4096 threads, got {}", num_threads);
  state_ = std::make_unique<State>(num_threads == 0 ? default_num_threads() : num_threads);
}

ThreadPool::~ThreadPool() = default;

ParallelFor ThreadPool::parallel_for() {
  return {.num_workers = num_threads(),
          .context = state_.get(),
          .invoke = [](void* context, int workers, ParallelFor::Body body, void* argument) {
            static_cast<State*>(context)->run(workers, body, argument);
          }};
}

int ThreadPool::num_threads() const { return state_->num_threads; }

}  // namespace imbrex

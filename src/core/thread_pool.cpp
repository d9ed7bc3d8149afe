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

// Pauses this thread for some tens of cycles, which leaves the core to its other hardware thread.
void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("isb" : : : "memory");  // `yield` is nothing on a core with one thread
#endif
}

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

// The last job of which a thread's share was taken, by that thread or by the caller.
struct alignas(64) Share {
  std::atomic<uint64_t> taken{0};

  bool take(uint64_t job) {
    uint64_t last = taken.load(std::memory_order_relaxed);
    return last < job && taken.compare_exchange_strong(last, job, std::memory_order_acq_rel);
  }
};

// The threads of a pool in one process, and the job they share.
//
// The caller takes the shares of threads that have not started on the job: the system may have given their cores to other programs (a
// spinning thread of another library keeps one for milliseconds), and a job must not wait for threads that would come after its end.
struct Crew {
  const void* const pool;
  const uint64_t generation = fork_generation();  // of the process that has these threads
  std::vector<Share> shares;                      // of the caller, who needs none, and of the threads
  std::vector<std::thread> threads;
  std::mutex callers;  // held during a run

  // The job, written before `epoch` rises and read by threads that have taken a share of it: it is over when all shares are.
  ParallelFor::Body body = nullptr;
  void* argument = nullptr;
  int num_workers = 0;

  alignas(64) std::atomic<uint64_t> epoch{0};  // counts the jobs
  alignas(64) std::atomic<int> running{0};     // shares of threads that are not done
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

  // A job may have more workers than the pool has threads; a share is then every num_threads-th of them.
  void run_share(int thread) {
    const int num_threads = int(shares.size());
    for (int worker = thread; worker < num_workers; worker += num_threads) run_body(worker);
  }

  void take_share(int thread, uint64_t job) {
    if (!shares[size_t(thread)].take(job)) return;
    run_share(thread);
    running.fetch_sub(1, std::memory_order_release);
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
      take_share(thread, seen);
    }
  }

  uint64_t start_job() {
    const uint64_t job = epoch.fetch_add(1) + 1;
    if (sleeping.load() == 0) return job;
    { const std::lock_guard lock(sleep_mutex); }  // a thread about to sleep has either read the epoch or waits already
    wake.notify_all();
    return job;
  }

  Crew(const void* pool, int num_threads) : pool(pool), shares(size_t(num_threads)) {
    try {
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
    const uint64_t now = start_job();
    run_share(0);
    const auto forked = [&] { return fork_generation() != generation; };  // by the body itself, in the middle of the job
    for (int thread = int(shares.size()) - 1; thread > 0 && !forked(); --thread) take_share(thread, now);
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

  // A forked child starts threads of its own at the first job. The parent's threads are left as they are, for their locks may be held and
  // they cannot be joined. This takes no lock, because the child's own children could find it held.
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

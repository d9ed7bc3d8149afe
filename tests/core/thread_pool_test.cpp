// ThreadPool: every worker runs once, exceptions arrive, nesting and concurrent callers do not lock up, waking is fast.
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/run_parallel.h"
#include "expect_error.h"
#include "imbrex/parallel.h"
#include "sanitizers.h"

namespace imbrex {
namespace {

using test::error_code;

TEST(ThreadPool, EveryWorkerRunsExactlyOnce) {
  for (int num_threads : {1, 2, 3, 8}) {
    ThreadPool pool(num_threads);
    EXPECT_EQ(pool.num_threads(), num_threads);
    EXPECT_EQ(pool.parallel_for().num_workers, num_threads);
    std::vector<int> counts(size_t(num_threads), 0);  // no atomics: each worker has its own, and run is a full barrier
    for (int round = 0; round < 300; ++round) run_parallel(pool.parallel_for(), [&](int worker) { ++counts[size_t(worker)]; });
    for (int count : counts) EXPECT_EQ(count, 300) << num_threads;
  }
}

TEST(ThreadPool, RunsMoreOrFewerWorkersThanThreads) {
  ThreadPool pool(3);
  for (int workers : {0, 1, 2, 3, 4, 17}) {
    ParallelFor threads = pool.parallel_for();
    threads.num_workers = workers;
    std::vector<int> counts(32, 0);
    run_parallel(threads, [&](int worker) { ++counts[size_t(worker)]; });
    for (int w = 0; w < 32; ++w) EXPECT_EQ(counts[size_t(w)], w < workers ? 1 : 0) << workers;
  }
}

TEST(ThreadPool, WithoutAHookTheCallerRunsEverything) {
  const auto self = std::this_thread::get_id();
  int count = 0;
  run_parallel(ParallelFor{.num_workers = 5}, [&](int worker) {
    EXPECT_EQ(worker, count++);
    EXPECT_EQ(std::this_thread::get_id(), self);
  });
  EXPECT_EQ(count, 5);
}

TEST(ThreadPool, TheCallerIsWorkerZero) {
  ThreadPool pool(2);
  const auto self = std::this_thread::get_id();
  run_parallel(pool.parallel_for(), [&](int worker) { EXPECT_TRUE(worker != 0 || std::this_thread::get_id() == self); });
}

std::atomic<bool> held{false}, let_go{false};

void hold(int) {
  held = true;
  while (!let_go) {
  }
}

// A thread whose core others have keeps nobody waiting: the caller does its share. Here a signal's handler keeps the thread.
TEST(ThreadPool, AThreadThatDoesNotComeIsNotWaitedFor) {
  if (test::kThreadSanitizer) GTEST_SKIP() << "the sanitizer holds signals back while a thread computes";
  held = let_go = false;
  ThreadPool pool(2);
  const pthread_t self = pthread_self();
  std::atomic<bool> found{false};
  pthread_t thread{};
  while (!found)  // the caller stays in its worker until the thread has come
    run_parallel(pool.parallel_for(), [&](int worker) {
      if (worker == 1 && !pthread_equal(pthread_self(), self)) thread = pthread_self(), found = true;
      if (worker == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    });
  struct sigaction before, action{};
  action.sa_handler = hold;
  ASSERT_EQ(sigaction(SIGUSR1, &action, &before), 0);
  ASSERT_EQ(pthread_kill(thread, SIGUSR1), 0);
  while (!held) std::this_thread::yield();
  std::vector<int> counts(5, 0);
  ParallelFor threads = pool.parallel_for();
  threads.num_workers = int(counts.size());
  for (int round = 0; round < 3; ++round)
    run_parallel(threads, [&](int worker) {
      EXPECT_TRUE(pthread_equal(pthread_self(), self));
      ++counts[size_t(worker)];
    });
  for (int count : counts) EXPECT_EQ(count, 3);
  let_go = true;
  // The other thread goes on, and finds that the jobs which it has missed are done.
  std::atomic<int> total{0};
  for (int round = 0; round < 300; ++round) run_parallel(pool.parallel_for(), [&](int) { ++total; });
  EXPECT_EQ(total, 600);
  EXPECT_EQ(counts, std::vector<int>(5, 3));
  ASSERT_EQ(sigaction(SIGUSR1, &before, nullptr), 0);
}

TEST(ThreadPool, SleepingThreadsWakeUp) {
  ThreadPool pool(3);
  std::atomic<int> count{0};
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(15));
    run_parallel(pool.parallel_for(), [&](int) { ++count; });
  }
  EXPECT_EQ(count, 15);
}

TEST(ThreadPool, ExceptionsReachTheCallerAndThePoolGoesOn) {
  ThreadPool pool(4);
  for (int thrower = 0; thrower < 4; ++thrower) {
    std::atomic<int> others{0};
    const auto body = [&](int worker) {
      if (worker == thrower) throw Error("test.thrown", "on purpose");
      ++others;
    };
    EXPECT_EQ(error_code([&] { run_parallel(pool.parallel_for(), body); }), "test.thrown") << thrower;
    EXPECT_EQ(others, 3);
  }
  EXPECT_EQ(error_code([&] { run_parallel(pool.parallel_for(), [](int) { throw Error("test.all", "on purpose"); }); }), "test.all");
  std::atomic<int> count{0};
  run_parallel(pool.parallel_for(), [&](int) { ++count; });
  EXPECT_EQ(count, 4);
}

TEST(ThreadPool, ANestedRunIsSerial) {
  ThreadPool pool(3);
  std::atomic<int> count{0};
  run_parallel(pool.parallel_for(), [&](int) {
    const auto self = std::this_thread::get_id();
    run_parallel(pool.parallel_for(), [&](int) {
      EXPECT_EQ(std::this_thread::get_id(), self);
      ++count;
    });
  });
  EXPECT_EQ(count, 9);
}

TEST(ThreadPool, ARunOfAnotherPoolInsideIsParallel) {
  ThreadPool outer(2), inner(2);
  std::atomic<int> count{0};
  run_parallel(outer.parallel_for(), [&](int) { run_parallel(inner.parallel_for(), [&](int) { ++count; }); });
  EXPECT_EQ(count, 4);
}

TEST(ThreadPool, ConcurrentCallersWaitForEachOther) {
  ThreadPool pool(3);
  std::atomic<int> inside{0}, total{0}, overlaps{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round)
        run_parallel(pool.parallel_for(), [&](int) {
          if (++inside > 3) ++overlaps;
          ++total;
          --inside;
        });
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4 * 50 * 3);
  EXPECT_EQ(overlaps, 0);
}

TEST(ThreadPool, ZeroThreadsMeansThisMachinesCores) { EXPECT_GE(ThreadPool(0).num_threads(), 1); }

TEST(ThreadPool, Refusals) {
  EXPECT_EQ(error_code([] { ThreadPool pool(-1); }), "threads.count");
  EXPECT_EQ(error_code([] { ThreadPool pool(1000000); }), "threads.count");
}

// No bound of the middle holds on a shared machine. One of the fastest does: nothing may wait by the clock.
TEST(ThreadPool, WakingTakesMicroseconds) {
  ThreadPool pool(2);
  auto best = std::chrono::nanoseconds::max();
  for (int round = 0; round < 2000; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    run_parallel(pool.parallel_for(), [](int) {});
    best = std::min(best, std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin));
  }
  EXPECT_LT(best, std::chrono::microseconds(200));
}

}  // namespace
}  // namespace imbrex

// ThreadPool in a forked child: new threads, no lock of the parent, nothing of its threads joined; and the parent goes on as before.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "core/fork.h"
#include "core/run_parallel.h"
#include "expect_error.h"
#include "forked.h"
#include "imbrex/parallel.h"

namespace imbrex {
namespace {

using test::in_child;

// The pool runs a job on all its threads, at the same time: each worker waits for the others.
bool works(ThreadPool& pool) {
  std::atomic<int> there{0};
  run_parallel(pool.parallel_for(), [&](int) {
    ++there;
    while (there < pool.num_threads()) std::this_thread::yield();
  });
  return there == pool.num_threads();
}

class ForkedPool : public testing::Test {
  void SetUp() override {
    if (test::kThreadSanitizer) GTEST_SKIP() << "its run time starts no threads in a child";
  }
};

TEST_F(ForkedPool, RunsInTheChildAndInTheParent) {
  ThreadPool pool(3);
  ASSERT_TRUE(works(pool));
  EXPECT_EQ(in_child([&] { return works(pool) && works(pool); }), 0);
  EXPECT_TRUE(works(pool));
}

TEST_F(ForkedPool, RunsInTheChildWhenThreadsAreAsleep) {
  ThreadPool pool(3);
  ASSERT_TRUE(works(pool));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(in_child([&] { return works(pool); }), 0);
}

TEST_F(ForkedPool, RunsInTheChildOfAChild) {
  ThreadPool pool(2);
  ASSERT_TRUE(works(pool));
  const uint64_t generation = fork_generation();
  EXPECT_EQ(in_child([&] {
              return works(pool) && in_child([&] { return works(pool) && fork_generation() == generation + 2; }) == 0 && works(pool);
            }),
            0);
  // The first child has never used the pool.
  EXPECT_EQ(in_child([&] { return in_child([&] { return works(pool); }) == 0; }), 0);
  EXPECT_EQ(fork_generation(), generation);
}

TEST_F(ForkedPool, NeedsNoLockThatAnotherThreadHeld) {
  ThreadPool pool(3);
  std::atomic<bool> stop{false};
  std::atomic<int> jobs{0};
  std::thread other([&] {
    while (!stop) {
      run_parallel(pool.parallel_for(), [](int) { std::this_thread::sleep_for(std::chrono::microseconds(300)); });
      ++jobs;
    }
  });
  while (jobs < 2) std::this_thread::yield();
  for (int round = 0; round < 8; ++round) EXPECT_EQ(in_child([&] { return works(pool); }), 0) << round;
  stop = true;
  other.join();
  EXPECT_TRUE(works(pool));
}

TEST_F(ForkedPool, StartsOneCrewForSeveralThreadsOfTheChild) {
  ThreadPool pool(3);
  ASSERT_TRUE(works(pool));
  EXPECT_EQ(in_child([&] {
              std::atomic<int> good{0};
              std::vector<std::thread> callers;
              for (int c = 0; c < 4; ++c)
                callers.emplace_back([&] {
                  for (int round = 0; round < 20; ++round) good += works(pool);
                });
              for (std::thread& caller : callers) caller.join();
              return good == 80;
            }),
            0);
}

TEST_F(ForkedPool, IsDestroyedInTheChild) {
  auto used = std::make_unique<ThreadPool>(3), unused = std::make_unique<ThreadPool>(3);
  ASSERT_TRUE(works(*used) && works(*unused));
  EXPECT_EQ(in_child([&] {
              unused.reset();
              const bool ran = works(*used);
              used.reset();
              return ran;
            }),
            0);
}

TEST_F(ForkedPool, AJobThatForksIsAnErrorInTheChild) {
  ThreadPool pool(2);
  pid_t child = -1;
  std::string code;
  const auto body = [&](int worker) {
    if (worker == 0) child = fork();
  };
  try {
    run_parallel(pool.parallel_for(), body);
  } catch (const Error& error) {
    code = error.code();
  }
  if (child == 0) _exit(code == "threads.forked" && works(pool) ? 0 : 1);
  EXPECT_EQ(test::exit_code_of(child), 0);
  EXPECT_EQ(code, "");
}

}  // namespace
}  // namespace imbrex

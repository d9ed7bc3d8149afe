// Signal handlers are what they were after kernels are compiled: in processes of their own, since NVRTC touches handlers once a process.
#include "cuda/driver/kept_signals.h"

#include <gnu/libc-version.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <thread>
#include <vector>

#include "cuda/driver/jit.h"
#include "cuda/needs.h"

namespace imbrex::cuda {
namespace {

constexpr int kChanged[] = {SIGINT, SIGTERM, SIGXFSZ};  // by NVRTC

volatile sig_atomic_t handled = 0;
void count(int) { handled = handled + 1; }
void another(int) {}

// Installs a handler as Python does: without SA_RESTART, so that a wait ends when a signal comes.
void install(int signal, void (*handler)(int), int flags = SA_ONSTACK) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigaddset(&action.sa_mask, SIGUSR1);
  sigaction(signal, &action, nullptr);
}

struct sigaction action_of(int signal) {
  struct sigaction action {};
  sigaction(signal, nullptr, &action);
  return action;
}

constexpr int kVisible = SA_RESTART | SA_ONSTACK | SA_SIGINFO | SA_NODEFER;  // the C library adds one of its own

bool is_as_installed(int signal, void (*handler)(int)) {
  const struct sigaction now = action_of(signal);
  const bool same = now.sa_handler == handler && (now.sa_flags & kVisible) == SA_ONSTACK && sigismember(&now.sa_mask, SIGUSR1) == 1;
  if (!same) std::fprintf(stderr, "signal %d: flags %#x\n", signal, unsigned(now.sa_flags));
  return same;
}

void compile_one(int block_size) {
  compile({"write_kv.cu", "sm_90a", {{"kFrom", 2}, {"kTo", 2}, {"kDimK", 64}, {"kDimV", 64}, {"kBlockSize", block_size}}});
}

void compile_in_threads(int count) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([i] { compile_one(16 + 16 * i); });
  for (std::thread& thread : threads) thread.join();
}

int handlers_after_compiling(int threads) {
  for (const int signal : kChanged) install(signal, count);
  sigset_t before, after;
  sigemptyset(&before), sigemptyset(&after);
  sigaddset(&before, SIGUSR2);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  threads == 0 ? compile_one(16) : compile_in_threads(threads);
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  bool same = true;
  for (const int signal : kChanged) same = is_as_installed(signal, count) && same;
  for (int signal = 1; signal < 32; ++signal) same = sigismember(&after, signal) == (signal == SIGUSR2) && same;
  return same ? 0 : 1;
}

// A main thread that waits without end, as Python's does in queue.get(): SIGTERM has to end the wait.
int a_wait_after_compiling() {
  install(SIGTERM, count);
  compile_one(16);
  alarm(20);
  sem_t never;
  sem_init(&never, 0, 0);
  std::thread([main = pthread_self()] {
    usleep(200'000);
    pthread_kill(main, SIGTERM);
    usleep(3'000'000);
    _exit(2);  // still waiting
  }).detach();
  return sem_wait(&never) == -1 && errno == EINTR && handled == 1 ? 0 : 1;
}

class KeptSignalsDeathTest : public testing::Test {
 protected:
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(KeptSignalsDeathTest, CompilingLeavesHandlersAndMasks) {
  NEEDS_NVRTC();
  EXPECT_EXIT(_exit(handlers_after_compiling(0)), testing::ExitedWithCode(0), "");
}

TEST_F(KeptSignalsDeathTest, CompilingInThreadsLeavesHandlersAndMasks) {
  NEEDS_NVRTC();
  EXPECT_EXIT(_exit(handlers_after_compiling(4)), testing::ExitedWithCode(0), "");
}

TEST_F(KeptSignalsDeathTest, AWaitStillEndsWithASignal) {
  NEEDS_NVRTC();
  EXPECT_EXIT(_exit(a_wait_after_compiling()), testing::ExitedWithCode(0), "");
}

// Restores what the test changes.
class KeptSignalsTest : public testing::Test {
 protected:
  void SetUp() override { sigaction(SIGUSR2, nullptr, &before_); }
  void TearDown() override { sigaction(SIGUSR2, &before_, nullptr); }
  struct sigaction before_ {};
};

const void* const kElsewhere = reinterpret_cast<const void*>(&gnu_get_libc_version);  // of the C library, with sanitizers too

TEST_F(KeptSignalsTest, TheLastOfSeveralPutsFlagsBack) {
  install(SIGUSR2, count);
  {
    const KeptSignals outer(kElsewhere);
    {
      const KeptSignals inner(kElsewhere);
      signal(SIGUSR2, count);  // adds SA_RESTART
    }
    EXPECT_NE(action_of(SIGUSR2).sa_flags & SA_RESTART, 0);
  }
  EXPECT_TRUE(is_as_installed(SIGUSR2, count));
}

TEST_F(KeptSignalsTest, AHandlerOfTheLibraryIsTakenAway) {
  install(SIGUSR2, count);
  {
    const KeptSignals signals(reinterpret_cast<const void*>(&another));  // this program plays the library
    signal(SIGUSR2, another);
  }
  EXPECT_TRUE(is_as_installed(SIGUSR2, count));
}

TEST_F(KeptSignalsTest, AHandlerThatTheProgramSetsMeanwhileStays) {
  install(SIGUSR2, count);
  {
    const KeptSignals signals(kElsewhere);
    install(SIGUSR2, another);
  }
  EXPECT_TRUE(is_as_installed(SIGUSR2, another));
}

}  // namespace
}  // namespace imbrex::cuda

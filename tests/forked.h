#pragma once
// A piece of a test in a forked child.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "sanitizers.h"

namespace imbrex::test {

// Waits 30 s at most. -1 for a child that had to be killed by then; 128 and more for one that died of a signal.
inline int exit_code_of(pid_t child) {
  int status = 0;
  for (int waited_ms = 0; waited_ms < 30'000; waited_ms += 2) {
    if (waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return -1;
}

// 0 when body() is true in a forked child, 1 when it is false, 2 when it throws.
template <class Body>
int in_child(const Body& body) {
  const pid_t child = fork();
  if (child != 0) return exit_code_of(child);
  int code = 2;
  try {
    code = body() ? 0 : 1;
  } catch (...) {
  }
  _exit(code);  // without destructors and output of the parent's
}

}  // namespace imbrex::test

// See cases.h.
#include "fuzz/metadata/cases.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "sanitizers.h"

#ifdef IMBREX_ASAN
#include <sanitizer/asan_interface.h>
#endif

// Limits near 2^31 ask for memory that no machine has. It is refused here, so that no test makes a machine swap.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {  // std::stable_sort() calls it
  return bytes > size_t(512) << 20 ? nullptr : std::malloc(std::max<size_t>(bytes, 1));
}
void* operator new(size_t bytes) {
  void* const memory = operator new(bytes, std::nothrow);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t bytes) { return operator new(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace imbrex::test {
namespace {

constexpr int kSeconds = 60;  // a case takes milliseconds
char current[64] = "";

void say_current() { [[maybe_unused]] const auto ignored = write(2, current, std::strlen(current)); }
void on_signal(int signal) {
  say_current();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void watch() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was said last is needed when a case ends the program
  std::signal(SIGALRM, on_signal);
  std::signal(SIGABRT, on_signal);
#ifdef IMBREX_ASAN  // reports the other signals itself
  __sanitizer_set_death_callback(say_current);
#else
  for (const int signal : {SIGSEGV, SIGFPE, SIGBUS, SIGILL}) std::signal(signal, on_signal);
#endif
}

int number_from(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

}  // namespace

void for_each_case(int count, const std::function<void(int, bool)>& run) {
  const int only = number_from("IMBREX_METADATA_CASE", -1), first = std::max(only, 0);
  count = number_from("IMBREX_METADATA_CASES", only >= 0 ? 1 : kAddressSanitizer ? count : count / 3);
  watch();
  for (int number = first; number < first + count && !testing::Test::HasFatalFailure(); ++number) {
    std::snprintf(current, sizeof current, "\nin IMBREX_METADATA_CASE=%d\n", number);
    alarm(kSeconds);
    SCOPED_TRACE("IMBREX_METADATA_CASE=" + std::to_string(number));
    run(number, only >= 0);
  }
  alarm(0);
}

void expect_explained(imbrex_status status, const char* call) {
  EXPECT_STRNE(imbrex_last_error(), "") << call;
  EXPECT_STRNE(imbrex_last_error_code(), "") << call;
  EXPECT_NE(status, IMBREX_OK) << call;
  EXPECT_NE(status, IMBREX_INTERNAL) << call << ": " << imbrex_last_error();
}

}  // namespace imbrex::test

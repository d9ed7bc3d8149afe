#pragma once
// How far something is: on a terminal one line with a bar, redrawn in place; elsewhere a line now and then.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <string_view>

namespace imbrex::cli {

class ProgressBar {
 public:
  // `lines`: also where stderr is not a terminal, a line each ten seconds.
  explicit ProgressBar(bool wanted = true, bool lines = false) : terminal_(isatty(STDERR_FILENO)), on_(wanted && (terminal_ || lines)) {}
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  bool on() const { return on_; }
  // `done` from 0 to 1, and what is said beside it.
  void show(double done, std::string_view text) {
    if (!on_) return;
    if (!terminal_) {
      if (Clock::now() < next_) return;
      next_ = Clock::now() + kBetweenLines;
      fmt::print(stderr, "{:3.0f} %  {}\n", 100 * done, text);
      return;
    }
    constexpr int kWidth = 28;
    const int full = int(done * kWidth);
    fmt::print(stderr, "\r\033[K[{:█<{}}{:·<{}}] {:3.0f} %  {}", "", full, "", kWidth - full, 100 * done, text);
    fflush(stderr);
    shown_ = true;
  }
  void clear() {
    if (shown_) fmt::print(stderr, "\r\033[K");
    shown_ = false;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kBetweenLines{10};

  bool terminal_, on_, shown_ = false;
  Clock::time_point next_ = Clock::now() + kBetweenLines;
};

}  // namespace imbrex::cli

#pragma once
// A progress bar: one line on a terminal, redrawn in place; nothing at all when stderr is not one.
#include <fmt/format.h>
#include <unistd.h>

#include <string_view>

namespace imbrex::cli {

class ProgressBar {
 public:
  explicit ProgressBar(bool wanted = true) : on_(wanted && isatty(STDERR_FILENO)) {}
  ~ProgressBar() { clear(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  bool on() const { return on_; }
  // `done` from 0 to 1, and what is said beside it.
  void show(double done, std::string_view text) {
    if (!on_) return;
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
  bool on_, shown_ = false;
};

}  // namespace imbrex::cli

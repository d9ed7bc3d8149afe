#pragma once
// A stopwatch for the parts of a replay's step.
#include <chrono>

namespace imbrex::serve {

class Timer {
 public:
  double lap() {  // seconds since the last lap
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - start_).count();
    start_ = now;
    return seconds;
  }
  double elapsed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace imbrex::serve

#pragma once
// Memory that keeps whoever reads it first waiting, while who writes it goes on: a thread that overwrites what another one has yet to read
// is then ahead of it, every time.
#include <chrono>
#include <cstddef>

namespace imbrex::test {

// One at a time in a program. Faults of other memory are as deadly as ever. Only on x86-64 Linux; elsewhere nobody waits.
class SlowReads {
 public:
  explicit SlowReads(size_t bytes, std::chrono::milliseconds wait);
  ~SlowReads();
  SlowReads(const SlowReads&) = delete;
  SlowReads& operator=(const SlowReads&) = delete;

  char* data() const { return data_; }
  // From now on the first thread to read a page waits until another one writes to it, or until the time is over.
  void arm();
  void disarm();
  static int waited();  // how many did since arm()
  static bool works();

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace imbrex::test

#pragma once
// States whose slots lie further apart than a 32-bit number of elements or bytes can say: address space that is reserved, of which tests
// touch a few pages.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "imbrex/batch.h"
#include "imbrex/tensor.h"

namespace imbrex::test {

class WideStates {
 public:
  static constexpr int64_t kSlots = 4, kStride = (int64_t{1} << 30) + 64;  // floats from slot to slot: the last begins beyond 2^31

  WideStates() : data_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~WideStates() { munmap(data_, kBytes); }
  WideStates(const WideStates&) = delete;
  WideStates& operator=(const WideStates&) = delete;
  bool reserved() const { return data_ != MAP_FAILED; }

  float* slot(int64_t number) const { return static_cast<float*>(data_) + number * kStride; }
  // The same tensor of floats with these slots, which get its numbers.
  TensorView copy_of(const TensorView& states, const std::vector<float>& numbers) const {
    const size_t of_slot = numbers.size() / kSlots;
    for (int64_t s = 0; s < kSlots; ++s) std::copy_n(numbers.begin() + s * int64_t(of_slot), of_slot, slot(s));
    TensorView wide = states;
    wide.data = data_;
    wide.strides[0] = kStride;
    return wide;
  }
  std::vector<float> numbers(size_t of_slot) const {
    std::vector<float> all;
    for (int64_t s = 0; s < kSlots; ++s) all.insert(all.end(), slot(s), slot(s) + of_slot);
    return all;
  }

 private:
  static constexpr size_t kBytes = size_t(kSlots * kStride) * sizeof(float);
  void* data_;
};

// A new prompt in the last slot, a decode in the first one, and one that reads slot 2 and writes slot 1.
struct WideStep {
  static constexpr int kTokens = 72;
  std::vector<int32_t> starts{0, 70, 71, 72}, lens{70, 5, 9}, slots{3, 0, 1}, sources{3, 0, 2};
  Batch batch;
  WideStep() {
    batch.query_start_loc = starts, batch.seq_lens = lens;
    batch.state_slots = slots, batch.source_slots = sources;
  }
};

}  // namespace imbrex::test

#pragma once
// A plan's batch in device memory: arrays at addresses that never change, filled from a ring of pinned buffers.
#include <array>
#include <cstddef>
#include <vector>

#include "cuda/memory.h"

namespace imbrex::cuda {

// Where an array lies, and how many elements it has room for.
template <class T>
struct ArrayOf {
  size_t offset = 0, capacity = 0;  // bytes, elements
};

// Arrays one after the other in one allocation; made before PlanArrays.
class ArrayLayout {
 public:
  static constexpr size_t kAlignment = 16;
  template <class T>
  ArrayOf<T> add(int64_t capacity) {
    const ArrayOf<T> array{bytes_, size_t(capacity)};
    bytes_ = (bytes_ + size_t(capacity) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// A step is begin(), put() for each array in the order of the layout, and send(). The host waits for the device only when it is
// kSteps steps ahead of it.
class PlanArrays {
 public:
  PlanArrays(const ContextPtr&, const ArrayLayout&);  // device memory, zeroed

  template <class T>
  T* device(const ArrayOf<T>& array) const {
    return reinterpret_cast<T*>(memory_.as<char>() + array.offset);
  }
  void begin();
  // Room for the first `count` elements, to be filled before the next call.
  template <class T>
  T* put(const ArrayOf<T>& array, size_t count) {
    return reinterpret_cast<T*>(reserve(array.offset, count * sizeof(T)));
  }
  // One copy, or a few where arrays that are used little lie far apart. The context must be current.
  void send(CUstream);

 private:
  static constexpr size_t kSteps = 3;
  static constexpr size_t kGap = 16 << 10;  // bytes that are copied for nothing rather than starting another copy
  struct Piece {
    size_t to, from, bytes;  // offsets in memory_ and in the pinned buffer
  };
  struct Step {
    PinnedBuffer memory;
    Event sent;
    bool busy = false;
  };
  char* reserve(size_t offset, size_t bytes);

  ContextPtr context_;
  DeviceBuffer memory_;
  std::array<Step, kSteps> steps_;
  size_t next_ = 0, used_ = 0;  // the step that is being filled; bytes of its buffer
  std::vector<Piece> pieces_;
};

}  // namespace imbrex::cuda

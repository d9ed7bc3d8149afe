#pragma once
// A plan's batch in device memory: arrays at addresses that never change, filled from a ring of the host's buffers.
#include <array>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "imbrex/device_platform.h"

namespace imbrex::gpu {

// The offset of an array, and the number of elements that it has room for.
template <class T>
struct ArrayOf {
  size_t offset = 0, capacity = 0;  // bytes, elements
};

template <class T>
T* array_in(void* memory, const ArrayOf<T>& array) {
  return reinterpret_cast<T*>(static_cast<char*>(memory) + array.offset);
}

// The layout of arrays, one after the other in one allocation; made before PlanArrays.
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

// A step is begin(), put() for each array in the order of the layout, and send(): until then the device has the step before. The host waits
// for the device only when it is kSteps steps ahead of it.
class PlanArrays {
 public:
  PlanArrays(OpenDevicePtr, const ArrayLayout&);  // device memory, zeroed
  ~PlanArrays();                                  // waits for what is on its way
  PlanArrays(const PlanArrays&) = delete;
  PlanArrays& operator=(const PlanArrays&) = delete;

  template <class T>
  T* device(const ArrayOf<T>& array) const {
    return array_in(memory_.get(), array);
  }
  void begin();
  // Returns room for the first `count` elements of an array, to be filled before the next call.
  template <class T>
  T* put(const ArrayOf<T>& array, size_t count) {
    return reinterpret_cast<T*>(reserve(array.offset, count * sizeof(T)));
  }
  // One copy, or a few where arrays that are used little lie far apart. When one of them fails, the step before is sent once more.
  void send(Stream);
  // Called right after send(): sends the step before it once more.
  void take_back(Stream) noexcept;
  bool has_sent() const { return has_sent_; }  // send() began to change what the device has, whether it then failed or not
  // Whether the device has a whole step: false when one could not be sent, nor the step before it.
  bool is_whole() const { return content_ != Content::broken; }
  void made_on_device() { content_ = Content::made_there; }  // by a kernel, in the place of what was sent

 private:
  static constexpr size_t kSteps = 3;       // the one that is filled, the one that the device has, and the one before
  static constexpr size_t kGap = 16 << 10;  // bytes that are copied for nothing rather than starting another copy
  enum class Content { zeros, sent, made_there, broken };
  struct Piece {
    size_t to, from, bytes;  // offsets in memory_ and in the pinned buffer
  };
  struct Step {
    std::shared_ptr<void> memory;
    size_t room = 0, used = 0;  // bytes of it
    std::vector<Piece> pieces;
    std::shared_ptr<void> sent;  // an event
    bool busy = false;           // `sent` says when the device has read the buffer
    bool kept = false;           // the buffer still has all of the step
  };
  Step& step_at(size_t steps_ahead) { return steps_[(now_ + steps_ahead) % kSteps]; }
  char* reserve(size_t offset, size_t bytes);
  void send_pieces(const Step&, Stream);
  void mark_busy(Step&, Stream) noexcept;
  void send_again(Step&, Content, Stream) noexcept;

  OpenDevicePtr device_;
  size_t bytes_ = 0;
  std::shared_ptr<void> memory_;
  std::array<Step, kSteps> steps_;
  std::vector<std::shared_ptr<void>> lost_;  // buffers that the device may still read, without anybody knowing until when
  size_t now_ = 0;                           // the step that the device has, if it was sent
  Content content_ = Content::zeros, content_before_ = Content::zeros;
  bool has_sent_ = false;
};

}  // namespace imbrex::gpu

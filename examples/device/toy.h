#pragma once
// The toy accelerator: an arena of memory, streams, events and graphs. toy.cpp puts them behind a table of functions.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <imbrex/imbrex.h>

namespace toy {

constexpr int kNumDevices = 2;
constexpr int64_t kArenaBytes = int64_t(512) << 20, kAlignment = 256;

inline thread_local std::string problem;  // of the thread's last failure

inline imbrex_status fail(imbrex_status status, std::string text) {
  problem = std::move(text);
  return status;
}

// Functions of the table and of the backend are called through this: no exception passes.
template <class Body>
imbrex_status guarded(const Body& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(IMBREX_OUT_OF_MEMORY, "the host has no memory left");
  } catch (const std::exception& error) {
    return fail(IMBREX_INTERNAL, error.what());
  }
}

// --- memory

class Arena {
 public:
  Arena() {
    const int file = memfd_create("toy accelerator", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, kArenaBytes) != 0) throw std::bad_alloc();
    addresses_ = static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_NONE, MAP_SHARED, file, 0));
    bytes_ = static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
    if (addresses_ == MAP_FAILED || bytes_ == MAP_FAILED) throw std::bad_alloc();
    holes_[0] = kArenaBytes;
  }
  ~Arena() {
    munmap(addresses_, kArenaBytes);
    munmap(bytes_, kArenaBytes);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(int64_t bytes) {  // null where there is no room
    const std::lock_guard lock(mutex_);
    const int64_t room = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      if (hole->second < room) continue;
      const int64_t at = hole->first, left = hole->second - room;
      holes_.erase(hole);
      if (left > 0) holes_[at + room] = left;
      taken_[at] = room;
      std::memset(bytes_ + at, 0xff, size_t(room));
      return addresses_ + at;
    }
    return nullptr;
  }
  void release(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto taken = taken_.find(static_cast<char*>(memory) - addresses_);
    auto hole = holes_.emplace(taken->first, taken->second).first;
    taken_.erase(taken);
    if (const auto next = std::next(hole); next != holes_.end() && hole->first + hole->second == next->first) {
      hole->second += next->second;
      holes_.erase(next);
    }
    if (hole == holes_.begin()) return;
    if (const auto before = std::prev(hole); before->first + before->second == hole->first) {
      before->second += hole->second;
      holes_.erase(hole);
    }
  }
  int64_t largest_hole() const {
    const std::lock_guard lock(mutex_);
    int64_t largest = 0;
    for (const auto& [at, bytes] : holes_) largest = std::max(largest, bytes);
    return largest;
  }
  // Where the device finds what is at an address of its own.
  char* bytes_at(const void* address) const {
    const int64_t at = static_cast<const char*>(address) - addresses_;
    if (at < 0 || at >= kArenaBytes) throw std::runtime_error("an address that is not the device's");
    return bytes_ + at;
  }

 private:
  char *addresses_ = nullptr, *bytes_ = nullptr;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> holes_, taken_;  // offset: bytes
};

// --- streams, events, graphs

using Work = std::function<imbrex_status()>;
using Graph = std::vector<Work>;

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, done = 0;
  imbrex_status status = IMBREX_OK;  // of the stream's work before it
  std::string why;
  std::chrono::steady_clock::time_point time;

  void wait_for(uint64_t count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= count; });
  }
};

inline std::atomic<uint64_t> num_captures{0};

class Stream {
 public:
  Stream() : thread_([this] { carry_out(); }) {}
  ~Stream() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  imbrex_status give(Work work) {
    if (recording_) return recording_->push_back(std::move(work)), IMBREX_OK;
    add({std::move(work), nullptr, 0});
    return IMBREX_OK;
  }
  imbrex_status record(const std::shared_ptr<Event>& event) {
    if (recording_) return fail(IMBREX_INVALID, "an event is not recorded in a capture");
    const std::lock_guard lock(event->mutex);
    add({{}, event, ++event->recorded});
    return IMBREX_OK;
  }
  imbrex_status wait(const std::shared_ptr<Event>& event) {
    if (recording_) return fail(IMBREX_INVALID, "an event is not waited for in a capture");
    const std::lock_guard lock(event->mutex);
    add({[event, recorded = event->recorded] { return event->wait_for(recorded), IMBREX_OK; }, nullptr, 0});
    return IMBREX_OK;
  }
  // What has failed since somebody last asked.
  imbrex_status synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return todo_.empty() && !busy_; });
    const imbrex_status status = std::exchange(status_, IMBREX_OK);
    return status == IMBREX_OK ? status : fail(status, why_);
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return todo_.empty() && !busy_; });
  }

  imbrex_status begin_capture() {
    if (recording_) return fail(IMBREX_INVALID, "the stream is captured already");
    recording_ = std::make_shared<Graph>();
    capture_ = ++num_captures;
    return IMBREX_OK;
  }
  std::shared_ptr<Graph> end_capture() {
    capture_ = 0;
    return std::exchange(recording_, nullptr);
  }
  uint64_t capture() const { return capture_; }

 private:
  struct Item {
    Work work;
    std::shared_ptr<Event> event;  // or the point that it is recorded at
    uint64_t count = 0;
  };
  void add(Item item) {
    const std::lock_guard lock(mutex_);
    todo_.push_back(std::move(item));
    changed_.notify_all();
  }
  void carry_out() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !todo_.empty() || ending_; });
      if (todo_.empty()) return;
      Item item = std::move(todo_.front());
      todo_.pop_front();
      busy_ = true;
      const imbrex_status before = status_;
      lock.unlock();
      // After a failure nothing is carried out until somebody has asked. Points are passed all the same, or their waiters would stay.
      const imbrex_status status = item.work && before == IMBREX_OK ? guarded(item.work) : before;
      if (item.event != nullptr) {
        const std::lock_guard of_event(item.event->mutex);
        item.event->done = item.count, item.event->time = std::chrono::steady_clock::now();
        item.event->status = status, item.event->why = why_;
        item.event->changed.notify_all();
      }
      const bool worked = bool(item.work);
      item = {};  // what the work held is let go of before anybody hears that it is done
      lock.lock();
      if (status_ == IMBREX_OK && status != IMBREX_OK && worked) status_ = status, why_ = problem;
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> todo_;
  bool busy_ = false, ending_ = false;
  imbrex_status status_ = IMBREX_OK;
  std::string why_;
  std::shared_ptr<Graph> recording_;  // of the one thread that uses the stream
  uint64_t capture_ = 0;
  std::thread thread_;  // the last, since it uses the others
};

struct Device {
  Arena arena;
  std::mutex mutex;
  std::set<Stream*> streams;
};

inline Device& device_of(void* device) { return *static_cast<Device*>(device); }
inline Stream& stream_of(void* stream) {
  if (stream == nullptr) throw std::runtime_error("the device has no default stream");
  return *static_cast<Stream*>(stream);
}
// --- tensors, as work of a stream keeps them

// A view of the device's own bytes, or of a copy of what a host's tensor shows.
class Tensor {
 public:
  Tensor(const Device& device, const imbrex_tensor* given) {
    if (given == nullptr) return;
    is_given_ = true;
    shape_.assign(given->shape, given->shape + given->ndim), strides_.resize(size_t(given->ndim));
    int64_t dense = 1;
    for (int i = given->ndim; i-- > 0; dense *= shape_[size_t(i)])
      strides_[size_t(i)] = given->strides != nullptr ? given->strides[i] : dense;
    view_ = *given;
    view_.shape = shape_.data(), view_.strides = strides_.data();
    char* data = static_cast<char*>(given->data) + given->byte_offset;
    view_.byte_offset = 0;
    view_.device = {1, 0};
    if (dense == 0) return;
    if (given->device.type == kOnDevice) {
      view_.data = device.arena.bytes_at(data);
    } else {
      int64_t last = 0;
      for (size_t i = 0; i < shape_.size(); ++i) last += (shape_[i] - 1) * strides_[i];
      host_.assign(data, data + (last + 1) * (given->dtype.bits / 8));
      view_.data = host_.data();
    }
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  const imbrex_tensor* get() const { return is_given_ ? &view_ : nullptr; }

 private:
  static constexpr int kOnDevice = 12;  // DLPack's kDLExtDev
  bool is_given_ = false;
  std::vector<int64_t> shape_, strides_;
  std::vector<char> host_;
  imbrex_tensor view_{};
};

// A call of the library in a stream: its failure is the device's.
inline imbrex_status of_library(imbrex_status status) { return status == IMBREX_OK ? status : fail(status, imbrex_last_error()); }

Device* open_device_of(int number);  // null: it is not open
const char* why(void* context);

// --- the library's reference, which is the kernel of every backend here: toy_backend.cpp

template <class T, void (*free)(T*)>
struct Free {
  void operator()(T* handle) const { free(handle); }
};
using HostPlan = std::unique_ptr<imbrex_plan, Free<imbrex_plan, imbrex_plan_free>>;

imbrex_plan_options host_options(const imbrex_plan_options& given);  // the limits
// Makes a plan for the layer that `make_layer` makes, unless there is one. The library is asked by the stream's thread: whoever makes a
// plan holds locks of it.
imbrex_status make_plan_once(HostPlan& plan, const std::function<imbrex_status(imbrex_spec**)>& make_layer, const imbrex_plan_options&);

imbrex_status register_backend(const imbrex_host*);             // of attention
imbrex_status register_short_conv_backend(const imbrex_host*);  // toy_short_conv.cpp

}  // namespace toy

// DeviceStream on a CPU, the host's memory and clock; on devices of all platforms, over their OpenDevice; and what both share.
#include "imbrex/device_stream.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "core/gather.h"
#include "core/run_parallel.h"
#include "core/tensor_format.h"
#include "imbrex/device_platform.h"

namespace imbrex {

void check_gather(const Device& device, const TensorView& from, const TensorView& offsets, const TensorView& to) {
  constexpr std::string_view code = "stream.gather";
  for (const TensorView* t : {&from, &offsets, &to}) {
    check(t->device == device, code, "expected tensors on {}, got {}", device, *t);
    int64_t stride = 1;
    for (int d = t->rank; d-- > 0; stride *= t->size(d))
      check(t->stride(d) == stride, code, "expected contiguous tensors, got {} with stride {} of dimension {}", *t, t->stride(d), d);
  }
  check(from.rank == 1 && from.size(0) <= INT32_MAX, code, "expected an array of {} elements at most, got {}", INT32_MAX, from);
  check(offsets.rank == 1 && offsets.dtype == DType::i32, code, "expected i32 offsets, got {}", offsets);
  check(to.rank == 2 && to.size(0) == offsets.size(0) && to.dtype == from.dtype, code, "expected {} rows for the offsets {}, in {}, got {}",
        offsets.size(0), offsets, to_string(from.dtype), to);
}

namespace {

class HostStream final : public DeviceStream {
 public:
  explicit HostStream(const ParallelFor& threads) : threads_(threads) {}
  Device device() const override { return {}; }
  Stream get() const override { return nullptr; }
  bool asynchronous() const override { return false; }
  int64_t free_bytes() const override { return int64_t(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE); }
  void synchronize() const override {}

  std::shared_ptr<void> allocate(int64_t bytes) const override {
    constexpr int64_t kAlignment = 64;
    const int64_t limit = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    void* const data =
        bytes > limit ? nullptr
                      : std::aligned_alloc(kAlignment, size_t((std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment));
    check(data != nullptr, "stream.memory", "expected at most what is left of the system's {} bytes, got {}", limit, bytes);
    return {data, std::free};
  }
  std::shared_ptr<void> allocate_host(int64_t bytes) const override { return allocate(bytes); }
  void upload(void* to, const void* from, int64_t bytes) const override { copy(to, from, bytes); }
  void download(void* to, const void* from, int64_t bytes) const override { copy(to, from, bytes); }
  void fill(void* to, unsigned char value, int64_t bytes) const override {
    if (bytes > 0) std::memset(to, value, size_t(bytes));
  }
  void gather(const TensorView& from, const TensorView& offsets, const TensorView& to) const override {
    check_gather(device(), from, offsets, to);
    const int64_t size = size_of(from.dtype), row = to.size(1) * size, rows = to.size(0);
    run_parallel(threads_, [&](int worker) {
      const int64_t end = rows * (worker + 1) / threads_.num_workers;
      for (int64_t i = rows * worker / threads_.num_workers; i < end; ++i)
        std::memcpy(to.as<char>() + i * row, from.as<const char>() + offsets.as<const int32_t>()[i] * size, size_t(row));
    });
  }

  void mark(size_t number) override {
    if (number >= marks_.size()) marks_.resize(number + 1);
    marks_[number] = Clock::now();
  }
  double seconds(size_t from, size_t to) const override { return std::chrono::duration<double>(marks_.at(to) - marks_.at(from)).count(); }
  DeviceGraph capture(const std::function<void()>&) const override {
    fail("stream.capture", "expected a stream of a GPU to capture, got {}", device());
  }
  void replay(const DeviceGraph&) const override { fail("stream.capture", "expected a stream of a GPU to replay on, got {}", device()); }

 private:
  using Clock = std::chrono::steady_clock;
  static void copy(void* to, const void* from, int64_t bytes) {
    if (bytes > 0) std::memcpy(to, from, size_t(bytes));
  }
  ParallelFor threads_;
  std::vector<Clock::time_point> marks_;
};

class PlatformStream final : public DeviceStream {
 public:
  explicit PlatformStream(OpenDevicePtr device) : device_(std::move(device)), stream_(device_->make_stream()) {}
  Device device() const override { return device_->device(); }
  Stream get() const override { return stream_.get(); }
  bool asynchronous() const override { return true; }
  int64_t free_bytes() const override { return device_->free_bytes(); }
  void synchronize() const override { device_->synchronize(get()); }

  std::shared_ptr<void> allocate(int64_t bytes) const override { return device_->allocate(bytes); }
  std::shared_ptr<void> allocate_host(int64_t bytes) const override { return device_->allocate_host(bytes); }
  void upload(void* to, const void* from, int64_t bytes) const override { device_->upload(to, from, bytes, get()); }
  void download(void* to, const void* from, int64_t bytes) const override { device_->download(to, from, bytes, get()); }
  void fill(void* to, unsigned char value, int64_t bytes) const override { device_->fill(to, value, bytes, get()); }
  void gather(const TensorView& from, const TensorView& offsets, const TensorView& to) const override {
    check_gather(device(), from, offsets, to);
    device_->gather(from, offsets, to, get());
  }

  void mark(size_t number) override {
    while (marks_.size() <= number) marks_.push_back(device_->make_event(true));
    device_->record(marks_[number].get(), get());
  }
  double seconds(size_t from, size_t to) const override {
    device_->synchronize_event(marks_.at(to).get());
    return device_->seconds(marks_.at(from).get(), marks_.at(to).get());
  }
  DeviceGraph capture(const std::function<void()>& launches) const override { return device_->capture(get(), launches); }
  void replay(const DeviceGraph& graph) const override { device_->launch(graph.get(), get()); }

 private:
  OpenDevicePtr device_;
  std::shared_ptr<void> stream_;
  std::vector<std::shared_ptr<void>> marks_;
};

}  // namespace

DeviceTensor DeviceStream::tensor(DType dtype, std::initializer_list<int64_t> sizes) const {
  TensorView view = TensorView::contiguous(nullptr, dtype, sizes, device());
  std::shared_ptr<void> memory = allocate(view.num_elements() * size_of(dtype));
  view.data = memory.get();
  return {view, std::move(memory)};
}

DeviceTensor DeviceStream::copy_of(const TensorView& host) const {
  const int64_t bytes = host.num_elements() * size_of(host.dtype);
  DeviceTensor copy{host, allocate(bytes)};
  copy.view.data = copy.memory.get();
  copy.view.device = device();
  upload(copy.view.data, host.data, bytes);
  synchronize();
  return copy;
}

std::unique_ptr<DeviceStream> open_stream(const DeviceInfo& device, const ParallelFor& threads) {
  check(device.present, "backend.device_absent", "expected a device of this machine, got {}", device.str());
  if (device.device.type == DeviceType::cpu) return std::make_unique<HostStream>(threads);
  return std::make_unique<PlatformStream>(open_device(device));
}

}  // namespace imbrex

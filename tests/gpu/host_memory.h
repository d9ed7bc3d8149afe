#pragma once
// A device for tests of what is the same for every vendor: its memory is that of the host.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "imbrex/device_platform.h"
#include "imbrex/error.h"

namespace imbrex::gpu::test {

// Everything happens at once.
class HostMemory final : public OpenDevice {
 public:
  Device device() const override { return {DeviceType::plugin, 7}; }
  int64_t free_bytes() const override { return 1 << 20; }
  std::shared_ptr<void> allocate(int64_t bytes) const override {
    if (bytes > free_bytes()) throw Error("host.memory", "expected at most " + std::to_string(free_bytes()) + " bytes");
    ++allocations;
    return {std::malloc(size_t(bytes)), std::free};
  }
  std::shared_ptr<void> allocate_host(int64_t bytes) const override { return allocate(bytes); }
  std::shared_ptr<void> make_stream() const override { return allocate(1); }
  void synchronize(Stream) const override { ++waits; }
  void upload(void* to, const void* from, int64_t bytes, Stream) const override { std::memcpy(to, from, size_t(bytes)); }
  void download(void* to, const void* from, int64_t bytes, Stream) const override { std::memcpy(to, from, size_t(bytes)); }
  void copy(void* to, const void* from, int64_t bytes, Stream) const override { std::memcpy(to, from, size_t(bytes)); }
  void fill(void* to, unsigned char value, int64_t bytes, Stream) const override { std::memset(to, value, size_t(bytes)); }
  std::shared_ptr<void> make_event(bool) const override { return allocate(1); }
  void record(void*, Stream) const override {}
  void wait(void*, Stream) const override {}
  void synchronize_event(void*) const override {}
  double seconds(void*, void*) const override { return 0; }
  std::shared_ptr<void> capture(Stream, const std::function<void()>&) const override { return nullptr; }
  void launch(void*, Stream) const override {}
  mutable int waits = 0, allocations = 0;
};

}  // namespace imbrex::gpu::test

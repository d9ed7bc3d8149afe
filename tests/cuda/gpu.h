#pragma once
// A test that runs on a GPU: its device, context and stream, and data that goes there and back. Skipped without one.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/driver/memory.h"
#include "imbrex/tensor.h"

namespace imbrex::cuda::test {

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    const auto devices = probe_cuda(&why);
    if (devices.empty()) GTEST_SKIP() << why;
    device = devices[0];
    context = Context::of_device(0);
    current.emplace(*context);
    stream = OwnedStream(context);
  }

  template <class T>
  DeviceBuffer upload(const std::vector<T>& values) const {
    DeviceBuffer buffer(context, values.size() * sizeof(T));
    copy_to_device(buffer.address(), values.data(), buffer.bytes(), stream.get());
    stream.synchronize();  // the host side is not pinned, and may be gone soon
    return buffer;
  }
  template <class T>
  std::vector<T> download(const DeviceBuffer& buffer) const {
    std::vector<T> values(buffer.bytes() / sizeof(T));
    copy_to_host(values.data(), buffer.address(), values.size() * sizeof(T), stream.get());
    stream.synchronize();
    return values;
  }

  DeviceInfo device;
  std::shared_ptr<const Context> context;
  std::optional<CurrentContext> current;
  OwnedStream stream;
};

// A view of the same type and shape in the device's memory.
inline TensorView on_device(TensorView view, const DeviceBuffer& buffer, int64_t byte_offset = 0) {
  view.data = buffer.as<char>() + byte_offset;
  view.device = {DeviceType::cuda, buffer.context()->device()};
  return view;
}

}  // namespace imbrex::cuda::test

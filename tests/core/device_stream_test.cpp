// DeviceStream on a CPU: the host's own memory and clock.
#include "imbrex/device_stream.h"

#include <gtest/gtest.h>

#include <vector>

#include "expect_error.h"

namespace imbrex {
namespace {

using test::error_code;

TEST(HostStream, DoesEverythingAtOnce) {
  ThreadPool threads(3);
  const auto stream = open_stream(probe_cpu(), threads.parallel_for());
  EXPECT_EQ(stream->get(), nullptr);
  EXPECT_FALSE(stream->asynchronous());
  EXPECT_GT(stream->free_bytes(), 0);
  std::vector<float> values{0, 1, 2, 3, 4, 5};
  std::vector<int32_t> offsets{4, 0, 1, 3};
  const DeviceTensor from = stream->copy_of(TensorView::contiguous(values.data(), DType::f32, {6}));
  const DeviceTensor to = stream->tensor(DType::f32, {4, 2});
  EXPECT_EQ(to.view.str(), "f32[4, 2] on cpu");
  stream->gather(from.view, TensorView::contiguous(offsets.data(), DType::i32, {4}), to.view);
  const auto* row = to.view.as<float>();
  EXPECT_EQ(std::vector<float>(row, row + 8), (std::vector<float>{4, 5, 0, 1, 1, 2, 3, 4}));
  stream->fill(to.view.data, 0, 8);
  EXPECT_EQ(row[1], 0);
  EXPECT_EQ(row[2], 0);
  EXPECT_EQ(row[4], 1);
}

TEST(HostStream, MarksAreTheClock) {
  const auto stream = open_stream(probe_cpu());
  stream->mark(2);
  stream->mark(0);
  EXPECT_GE(stream->seconds(2, 0), 0);
  EXPECT_LT(stream->seconds(2, 0), 1);
}

TEST(HostStream, RefusesWhatOnlyGpusDo) {
  const auto stream = open_stream(probe_cpu());
  EXPECT_EQ(error_code([&] { stream->capture([] {}); }), "stream.capture");
  EXPECT_EQ(error_code([&] { stream->replay({}); }), "stream.capture");
  EXPECT_EQ(error_code([&] { stream->allocate(int64_t(1) << 60); }), "stream.memory");
  EXPECT_EQ(error_code([] { open_stream(describe_device("avx512,8 threads")); }), "backend.device_absent");
}

}  // namespace
}  // namespace imbrex

// DeviceStream on a GPU: copies, gathers, marks, graphs, and what is left of the memory.
#include "imbrex/device_stream.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "cuda/gpu.h"

namespace imbrex::cuda {
namespace {

class DeviceStreams : public test::Gpu {
 protected:
  static constexpr int64_t kRows = 50'000, kLength = 99, kNumbers = 70'000;
  std::vector<int32_t> offsets = [] {
    std::vector<int32_t> all(kRows);
    std::mt19937 random(1);
    for (int32_t& x : all) x = int32_t(random() % (kNumbers - kLength));
    return all;
  }();
};

TEST_F(DeviceStreams, GatherTakesRowsOfEveryElementSize) {
  const auto on = open_stream(device);
  const DeviceTensor where = on->copy_of(TensorView::contiguous(offsets.data(), DType::i32, {kRows}));
  for (const DType dtype : {DType::fp8_e4m3, DType::bf16, DType::f32}) {
    const size_t size = size_t(size_of(dtype)), row = kLength * size;
    std::vector<char> numbers(kNumbers * size), back(kRows * row);
    std::mt19937 random(2);
    for (char& x : numbers) x = char(random());
    const DeviceTensor from = on->copy_of(TensorView::contiguous(numbers.data(), dtype, {kNumbers}));
    const DeviceTensor to = on->tensor(dtype, {kRows, kLength});
    on->gather(from.view, where.view, to.view);
    on->download(back.data(), to.view.data, int64_t(back.size()));
    on->synchronize();
    int wrong = 0;
    for (size_t i = 0; i < kRows; ++i) wrong += std::memcmp(&back[i * row], &numbers[size_t(offsets[i]) * size], row) != 0;
    EXPECT_EQ(wrong, 0) << to_string(dtype);
  }
}

TEST_F(DeviceStreams, GraphsAndMarks) {
  const auto on = open_stream(device);
  std::vector<float> numbers(kNumbers, 1.5f), back(kRows * kLength);
  const DeviceTensor from = on->copy_of(TensorView::contiguous(numbers.data(), DType::f32, {kNumbers}));
  const DeviceTensor where = on->copy_of(TensorView::contiguous(offsets.data(), DType::i32, {kRows}));
  const DeviceTensor to = on->tensor(DType::f32, {kRows, kLength});
  const int64_t bytes = int64_t(back.size() * sizeof(float));
  on->gather(from.view, where.view, to.view);  // loads the kernel
  const DeviceGraph graph = on->capture([&] { on->gather(from.view, where.view, to.view); });
  on->fill(to.view.data, 0, bytes);
  on->mark(0);
  on->replay(graph);
  on->mark(1);
  for (int i = 0; i < 9; ++i) on->replay(graph);
  on->mark(2);
  on->download(back.data(), to.view.data, bytes);
  on->synchronize();
  EXPECT_EQ(back, std::vector<float>(back.size(), 1.5f));
  EXPECT_GT(on->seconds(0, 1), 0);
  EXPECT_GT(on->seconds(1, 2), 0);
  EXPECT_NEAR(on->seconds(0, 2), on->seconds(0, 1) + on->seconds(1, 2), 5e-6);
}

// Another process that frees memory of the same GPU meanwhile hides what this one takes. It does not do so in every attempt.
TEST_F(DeviceStreams, MemoryThatIsTakenIsNotFree) {
  const auto on = open_stream(device);
  const int64_t bytes = int64_t(256) << 20;
  int64_t most_missing = 0;
  for (int attempt = 0; attempt < 20 && most_missing < bytes; ++attempt) {
    const int64_t before = on->free_bytes();
    const auto taken = on->allocate(bytes);
    most_missing = std::max(most_missing, before - on->free_bytes());
    EXPECT_LT(before, device.memory_bytes);
  }
  EXPECT_GE(most_missing, bytes);
}

}  // namespace
}  // namespace imbrex::cuda

// The memory of a plan's steps (gpu/plan_arrays.h) on a device that is not CUDA's: what a backend for another vendor's GPUs would begin
// with.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "api/handles.h"
#include "gpu/plan_arrays.h"

namespace imbrex::test {
namespace {

class DeviceArrays : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(imbrex_load_plugin(IMBREX_TOY_PLUGIN), IMBREX_OK) << imbrex_last_error();
    device_ = open_device(describe_device("toy:0"));
    stream_ = device_->make_stream();
    first_ = layout_.add<int>(100);
    far_ = layout_.add<int>(100000);  // so far behind that a step is two copies
    last_ = layout_.add<long>(50);
    arrays_ = std::make_unique<gpu::PlanArrays>(device_, layout_);
  }
  void TearDown() override {
    arrays_.reset(), stream_.reset(), device_.reset();
    EXPECT_EQ(imbrex_unregister_backend("toy"), IMBREX_OK) << imbrex_last_error();
    EXPECT_EQ(imbrex_unregister_short_conv_backend("toy"), IMBREX_OK) << imbrex_last_error();
    EXPECT_EQ(imbrex_unregister_device("toy"), IMBREX_OK) << imbrex_last_error();
  }
  void send(int step) {
    arrays_->begin();
    int* const counted = arrays_->put(first_, size_t(step));
    std::iota(counted, counted + step, 10 * step);
    *arrays_->put(far_, 1) = step;
    long* const longs = arrays_->put(last_, 2);
    longs[0] = 100 + step, longs[1] = -step;
    arrays_->send(stream_.get());
  }
  template <class T>
  std::vector<T> there(const gpu::ArrayOf<T>& array, size_t count) const {
    std::vector<T> values(count);
    device_->download(values.data(), arrays_->device(array), int64_t(count * sizeof(T)), stream_.get());
    device_->synchronize(stream_.get());
    return values;
  }
  void expect_step(int step) const {
    std::vector<int> counted(static_cast<size_t>(step));
    std::iota(counted.begin(), counted.end(), 10 * step);
    EXPECT_EQ(there(first_, size_t(step)), counted);
    EXPECT_EQ(there(far_, 1), std::vector<int>{step});
    EXPECT_EQ(there(last_, 2), (std::vector<long>{100 + step, -step}));
  }

  OpenDevicePtr device_;
  std::shared_ptr<void> stream_;
  gpu::ArrayLayout layout_;
  gpu::ArrayOf<int> first_, far_;
  gpu::ArrayOf<long> last_;
  std::unique_ptr<gpu::PlanArrays> arrays_;
};

TEST_F(DeviceArrays, HaveTheStepThatWasSentLast) {
  EXPECT_EQ(there(first_, 100), std::vector<int>(100));
  EXPECT_EQ(there(last_, 50), std::vector<long>(50));
  for (int step = 1; step <= 9; ++step) {  // more than there are buffers, whether the device has read them or not
    send(step);
    if (step % 3 == 0) expect_step(step);
  }
  EXPECT_TRUE(arrays_->is_whole());
}

TEST_F(DeviceArrays, AreTakenBackByOneStep) {
  send(1);
  arrays_->take_back(stream_.get());
  EXPECT_EQ(there(first_, 100), std::vector<int>(100)) << "as it was made";
  for (int step = 2; step <= 7; ++step) {
    send(step);
    send(step + 20);
    arrays_->take_back(stream_.get());
    expect_step(step);
    EXPECT_TRUE(arrays_->is_whole());
  }
}

}  // namespace
}  // namespace imbrex::test

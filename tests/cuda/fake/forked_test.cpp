// A child of a process that has used a GPU: every call is an error that says so, destructors leave the parent's things alone, and CPUs
// work. On the fake driver.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "expect_error.h"
#include "forked.h"
#include "imbrex/imbrex.hpp"

namespace imbrex::cuda {
namespace {

using fake::state;
using imbrex::test::error_code;
using imbrex::test::in_child;

class Forked : public testing::Test {
 protected:
  void SetUp() override {
    fake::run_on_host(spec_);  // so that nothing is compiled
    plan_ = select(spec_, gpu_).backend->plan(spec_, gpu_, {.limits = {.max_num_reqs = 4, .max_num_tokens = 64}});
  }
  void TearDown() override { state().on_launch = nullptr, state().param_sizes.clear(), state().launches.clear(); }
  void update(Plan& plan) const {
    const std::vector<int32_t> query_start_loc{0, 20}, seq_lens{20}, blocks{7, 3};
    plan.update({.query_start_loc = query_start_loc,
                 .seq_lens = seq_lens,
                 .block_table = TensorView::contiguous(const_cast<int32_t*>(blocks.data()), DType::i32, {1, 2})},
                stream_->get());
  }
  AttentionSpec spec_{.num_q_heads = 10, .num_kv_heads = 1, .head_dim_qk = 56, .head_dim_v = 56};
  DeviceInfo gpu_ = probe_cuda().at(0);
  std::unique_ptr<DeviceStream> stream_ = open_stream(gpu_);
  std::unique_ptr<Plan> plan_;
};

TEST_F(Forked, CallsAreErrors) {
  update(*plan_);
  const int buffers = state().buffers, calls = state().context_pushes;
  EXPECT_EQ(in_child([&] {
              std::string why;
              return error_code([&] { update(*plan_); }) == "cuda.forked" && error_code([&] { open_stream(gpu_); }) == "cuda.forked" &&
                     error_code([&] { stream_->synchronize(); }) == "cuda.forked" &&
                     error_code([&] { stream_->allocate(1); }) == "cuda.forked" &&
                     error_code([&] { select(spec_, gpu_).backend->plan(spec_, gpu_, {}); }) == "cuda.forked" && probe_cuda(&why).empty() &&
                     why.find("forked") != std::string::npos && error_code([] { describe_device("cuda:0"); }) == "device.absent" &&
                     state().buffers == buffers && state().context_pushes == calls;
            }),
            0);
  EXPECT_NO_THROW(update(*plan_));
}

TEST_F(Forked, WhatTheParentOwnsIsDroppedWithoutACall) {
  std::optional<DeviceTensor> tensor = stream_->tensor(DType::f32, {16});
  const int buffers = state().buffers, streams = state().streams, contexts = state().contexts, libraries = state().libraries;
  EXPECT_EQ(in_child([&] {
              plan_.reset(), tensor.reset(), stream_.reset();
              return state().buffers == buffers && state().streams == streams && state().contexts == contexts &&
                     state().libraries == libraries;
            }),
            0);
}

TEST_F(Forked, AScopeThatTheForkIsInEnds) {
  const auto context = Context::of_device(0);
  EXPECT_EQ(in_child([&] { return error_code([&] { const CurrentContext current(*context); }) == "cuda.forked"; }), 0);
  std::optional<CurrentContext> current(std::in_place, *context);
  EXPECT_EQ(in_child([&] { return current.reset(), true; }), 0);
}

TEST_F(Forked, CpusWork) {
  EXPECT_EQ(in_child([&] {
              const DeviceInfo cpu = probe_cpu();
              update(*select(spec_, cpu).backend->plan(spec_, cpu, {}));
              return true;
            }),
            0);
}

TEST_F(Forked, AChildOfAProcessWithoutADriverHearsWhyThereIsNone) {
  state().init_result = kCudaNotInitialized;  // another library has used CUDA before the fork
  const std::string why = load_driver(IMBREX_FAKE_DRIVER).why;
  state().init_result = 0;
  EXPECT_NE(why.find("forked"), std::string::npos) << why;
}

}  // namespace
}  // namespace imbrex::cuda

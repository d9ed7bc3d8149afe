#pragma once
// What tests of the short convolution's plan for GPUs on the fake driver share: plans beside the reference, and a small step with tensors
// for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/short_conv_texts.h"
#include "cuda/short_conv_problem.h"

namespace imbrex::cuda {

using test::ConvBesideReference, test::ConvStep;

class ShortConvPlans : public testing::Test {
 protected:
  static constexpr const char* kFine = "nothing thrown";
  static constexpr Device kGpu{DeviceType::cuda, 0};
  ~ShortConvPlans() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
  void use(const imbrex::test::ShortConvVariant& variant) { fake::use_short_conv_text(variant); }
  std::unique_ptr<ShortConvPlan> plan(const ShortConvSpec& spec, const PlanOptions& options = {}) const {
    return find_backend<ShortConvFamily>("cuda_sm80")->plan(spec, device, options);
  }
  void run(const test::ConvProblem& problem) const {
    ConvBesideReference(*find_backend<ShortConvFamily>("cuda_sm80"), device, problem).run();
  }
  const DeviceInfo device = probe_cuda().at(0);
};

class ShortConvCalls : public ShortConvPlans {
 protected:
  ShortConvCalls() { use(imbrex::test::short_conv_variants()[0]); }
  // Host memory is as good as any to the fake driver.
  TensorView tensor(DType dtype, std::initializer_list<int64_t> sizes) {
    TensorView t = TensorView::contiguous(nullptr, dtype, sizes, kGpu);
    kept.push_back(std::make_unique<std::vector<float>>(size_t(t.num_elements() + 4)));
    t.data = kept.back()->data();
    return t;
  }
  TensorView list(const std::vector<int32_t>& values) {
    TensorView t = tensor(DType::i32, {int64_t(values.size())});
    std::copy(values.begin(), values.end(), t.as<int32_t>());
    return t;
  }
  const ShortConvSpec spec = imbrex::test::short_conv_variants()[0].spec(64, 2);
  PlanLimits limits{.max_num_reqs = 4, .max_num_tokens = 50, .max_seq_len = 1000};
  std::vector<std::unique_ptr<std::vector<float>>> kept;
  ConvStep step{.starts = {0, 2, 2, 5}, .lens = {2, 7, 9}, .slots = {1, -1, 0}, .drafts = {0, 0, 2}, .accepted = {0, 0, 1}};
  Batch batch = step.batch(spec);
  DeviceBatch on_device{.query_start_loc = list(step.starts),
                        .seq_lens = list(step.lens),
                        .state_slots = list(step.slots),
                        .num_drafts = list(step.drafts),
                        .accepted_drafts = list(step.accepted),
                        .max_num_tokens = 6};
  ShortConvInputs in{
      .input = tensor(DType::bf16, {6, 192}), .weight = tensor(DType::bf16, {64, 3}), .bias = {}, .state = tensor(DType::bf16, {2, 4, 64})};
  ShortConvOutputs out{.out = tensor(DType::bf16, {6, 64})};
};

}  // namespace imbrex::cuda

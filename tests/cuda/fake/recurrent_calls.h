#pragma once
// What tests of the plan of recurrent layers for GPUs on the fake driver share: plans beside the reference, and a small step with tensors
// for it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/fake/recurrent_texts.h"
#include "cuda/recurrent_problem.h"

namespace imbrex::cuda {

using imbrex::test::recurrent_variants, imbrex::test::RecurrentVariant;
using test::RecurrentBesideReference, test::SlotStep;

class RecurrentPlans : public testing::Test {
 protected:
  static constexpr const char* kFine = "nothing thrown";
  static constexpr Device kGpu{DeviceType::cuda, 0};
  ~RecurrentPlans() override { fake::forget_texts(); }
  void use(const RecurrentVariant& variant) { fake::use_recurrent_text(variant); }
  std::unique_ptr<RecurrentPlan> plan(const RecurrentSpec& spec, const PlanOptions& options = {}) const {
    return backend.plan(spec, device, options);
  }
  void run(const test::RecurrentProblem& problem) const { RecurrentBesideReference(backend, device, problem).run(); }
  const DeviceInfo device = probe_cuda().at(0);
  const BackendOf<RecurrentFamily>& backend = *find_backend<RecurrentFamily>("cuda_sm80");
};

class RecurrentCalls : public RecurrentPlans {
 protected:
  static constexpr size_t kSlotBytes = size_t(3) * 4 * 64 * 64 * 4, kRowBytes = size_t(4) * 64 * 2;  // of the state, of outputs
  RecurrentCalls() {
    use(recurrent_variants()[0]);
    std::mt19937 random(3);
    for (const TensorView* t : {&in.q, &in.k, &in.v, &in.gate, &in.beta, &in.rates, &in.state})
      for (int64_t i = 0; i < t->num_elements(); ++i) store_from_float(t->data, t->dtype, i, float(int32_t(random())) * 0x1p-30f);
    first_state.assign(in.state.as<char>(), in.state.as<char>() + 2 * kSlotBytes);
  }
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
  // Before a step whose results are compared: the state is that of the first one, and outputs are 0x22.
  void begin() const {
    std::memcpy(in.state.data, first_state.data(), first_state.size());
    std::memset(out.out.data, 0x22, 6 * kRowBytes);
  }
  std::string states() const { return {in.state.as<char>(), 2 * kSlotBytes}; }
  std::string outputs() const { return {out.out.as<char>(), 6 * kRowBytes}; }
  std::string results(const RecurrentPlan& p, DeviceStream& stream) const {
    begin();
    p.run(in, out, stream.get());
    stream.synchronize();
    return states() + outputs();
  }
  const RecurrentSpec spec = recurrent_variants()[0].with_drafts(2);
  PlanLimits limits{.max_num_reqs = 4, .max_num_tokens = 50, .max_seq_len = 1000};
  std::vector<std::unique_ptr<std::vector<float>>> kept;
  std::string first_state;
  SlotStep step{.starts = {0, 2, 2, 5}, .lens = {2, 7, 9}, .slots = {1, -1, 0}, .drafts = {0, 0, 2}, .accepted = {0, 0, 1}};
  const SlotStep other{.starts = {0, 1, 6}, .lens = {4, 5}, .slots = {0, 1}, .drafts = {1, 0}, .accepted = {2, 0}};
  Batch batch = step.batch(spec);
  DeviceBatch on_device{.query_start_loc = list(step.starts),
                        .seq_lens = list(step.lens),
                        .state_slots = list(step.slots),
                        .num_drafts = list(step.drafts),
                        .accepted_drafts = list(step.accepted),
                        .max_num_tokens = 6};
  RecurrentInputs in{.q = tensor(DType::bf16, {6, 2, 64}),
                     .k = tensor(DType::bf16, {6, 2, 64}),
                     .v = tensor(DType::bf16, {6, 4, 64}),
                     .gate = tensor(DType::f32, {6, 4}),
                     .beta = tensor(DType::f32, {6, 4}),
                     .rates = tensor(DType::f32, {4}),
                     .gate_bias = {},
                     .skip = {},
                     .state = tensor(DType::f32, {2, 3, 4, 64, 64})};
  RecurrentOutputs out{.out = tensor(DType::bf16, {6, 4, 64})};
};

}  // namespace imbrex::cuda

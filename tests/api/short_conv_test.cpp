// The short convolution through the C ABI: the same bits as through C++, and functions that are for another family.
#include <algorithm>
#include <cmath>
#include <random>

#include "api/handles.h"
#include "api/structs.h"
#include "imbrex/imbrex.hpp"

namespace imbrex::test {
namespace {

constexpr int kDim = 24, kTokens = 9, kSlots = 4, kDrafts = 2;

imbrex_short_conv_fields small_short_conv() {
  imbrex_short_conv_fields f = init(imbrex_short_conv_fields_init);
  f.dim = kDim, f.dtype = IMBREX_F32, f.bias = 1, f.num_drafts = kDrafts;
  return f;
}
SpecHandle short_conv_of(const imbrex_short_conv_fields& fields) {
  return make_handle<SpecHandle>([&](auto** out) { return imbrex_spec_create_short_conv(&fields, out); });
}

// A request of six tokens without a past, and one of three behind ten whose last step had a draft that was kept.
struct ConvStep {
  const int query_start_loc[3] = {0, 6, kTokens}, seq_lens[2] = {6, 13}, state_slots[2] = {3, 1}, num_drafts[2] = {0, 2},
            accepted_drafts[2] = {0, 1};
  HostTensor<float> bcx{{kTokens, 3 * kDim}, kFloat}, weight{{kDim, 3}, kFloat}, bias{{kDim}, kFloat},
      state{{kSlots, 2 + kDrafts, kDim}, kFloat}, out{{kTokens, kDim}, kFloat};
  imbrex_batch batch = init(imbrex_batch_init);
  imbrex_short_conv_inputs inputs = init(imbrex_short_conv_inputs_init);
  imbrex_short_conv_outputs outputs = init(imbrex_short_conv_outputs_init);

  ConvStep() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (auto* t : {&bcx, &weight, &bias, &state}) std::ranges::generate(t->data, [&] { return normal(random); });
    batch.num_reqs = 2, batch.query_start_loc = query_start_loc, batch.seq_lens = seq_lens;
    batch.state_slots = state_slots, batch.num_drafts = num_drafts, batch.accepted_drafts = accepted_drafts;
    inputs.bcx = &bcx.view, inputs.weight = &weight.view, inputs.bias = &bias.view, inputs.state = &state.view;
    outputs.out = &out.view;
  }
};

struct CApiShortConv : testing::Test {
  DeviceHandle device = cpu();
  SpecHandle spec = short_conv_of(small_short_conv());
  PlanHandle plan_for(const imbrex_spec* of) {
    const SelectionHandle selection = select_for(of, device.get());
    return make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), nullptr, out); });
  }
};

TEST_F(CApiShortConv, GivesTheBitsOfTheCppInterface) {
  ASSERT_NE(spec, nullptr) << imbrex_last_error();
  EXPECT_STREQ(imbrex_spec_str(spec.get()), "short_conv d24 w3 f32 bias drafts2");
  ConvStep c;
  const PlanHandle plan = plan_for(spec.get());
  ASSERT_NE(plan, nullptr) << imbrex_last_error();
  ASSERT_EQ(imbrex_plan_update(plan.get(), &c.batch, nullptr), IMBREX_OK) << imbrex_last_error();
  ASSERT_EQ(imbrex_plan_run_short_conv(plan.get(), &c.inputs, &c.outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  EXPECT_NE(std::string(imbrex_plan_str(plan.get())), "");

  ConvStep cpp;
  const ShortConvSpec same{.dim = kDim, .bias = true, .dtype = DType::f32, .num_drafts = kDrafts};
  const DeviceInfo info = describe_device("cpu");
  const auto other = select<ShortConvFamily>(same, info).backend->plan(same, info, {});
  Batch batch;
  batch.query_start_loc = cpp.query_start_loc, batch.seq_lens = cpp.seq_lens;
  batch.state_slots = cpp.state_slots, batch.num_drafts = cpp.num_drafts, batch.accepted_drafts = cpp.accepted_drafts;
  other->update(batch);
  const auto view = [](HostTensor<float>& t) {
    TensorView v{.data = t.data.data(), .dtype = DType::f32, .rank = int(t.shape.size())};
    int64_t stride = 1;
    for (int d = v.rank - 1; d >= 0; --d)
      v.sizes[size_t(d)] = t.shape[size_t(d)], v.strides[size_t(d)] = stride, stride *= t.shape[size_t(d)];
    return v;
  };
  other->run({.input = view(cpp.bcx), .weight = view(cpp.weight), .bias = view(cpp.bias), .state = view(cpp.state)},
             {.out = view(cpp.out)});
  EXPECT_EQ(c.out.data, cpp.out.data);
  EXPECT_EQ(c.state.data, cpp.state.data);
  EXPECT_TRUE(std::ranges::any_of(c.out.data, [](float x) { return x != 0; }));
}

// The form in front of a recurrence: x alone, in the tensor that has B, C and x elsewhere.
TEST_F(CApiShortConv, ThePlainFormHasRowsOfItsOwn) {
  imbrex_short_conv_fields fields = small_short_conv();
  fields.form = IMBREX_CONV_PLAIN, fields.activation = IMBREX_CONV_SILU;
  const SpecHandle plain = short_conv_of(fields);
  ASSERT_NE(plain, nullptr) << imbrex_last_error();
  EXPECT_STREQ(imbrex_spec_str(plain.get()), "short_conv d24 w3 f32 bias drafts2 plain silu");
  const PlanHandle plan = plan_for(plain.get());
  ConvStep c;
  ASSERT_EQ(imbrex_plan_update(plan.get(), &c.batch, nullptr), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(imbrex_plan_run_short_conv(plan.get(), &c.inputs, &c.outputs, nullptr), IMBREX_INVALID) << "three rows of a token";
  EXPECT_EQ(last_code(), "short_conv.run.tensor");
  HostTensor<float> x({kTokens, kDim}, kFloat);
  std::copy_n(c.bcx.data.begin(), x.data.size(), x.data.begin());
  c.inputs.bcx = &x.view;
  c.outputs.out = &x.view;
  EXPECT_EQ(imbrex_plan_run_short_conv(plan.get(), &c.inputs, &c.outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "short_conv.run.overlap");
  c.outputs.out = &c.out.view;
  ASSERT_EQ(imbrex_plan_run_short_conv(plan.get(), &c.inputs, &c.outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  for (size_t d = 0; d < kDim; ++d) {  // the first token of a request without a past
    const double sum = double(c.bias.data[d]) + double(c.weight.data[3 * d + 2]) * double(x.data[d]);
    EXPECT_NEAR(c.out.data[d], sum / (1 + std::exp(-sum)), 1e-5) << d;
  }
}

// A caller that was built with the first version's header has a struct without the form, whose last four bytes may be anything.
TEST_F(CApiShortConv, FieldsOfTheFirstVersionAreOfTheGatedForm) {
  imbrex_short_conv_fields fields = small_short_conv();
  fields.struct_size = api::kFirstSize<imbrex_short_conv_fields>;
  fields.reserved = -1, fields.form = 77, fields.activation = 77;
  const SpecHandle first = short_conv_of(fields);
  ASSERT_NE(first, nullptr) << imbrex_last_error();
  EXPECT_STREQ(imbrex_spec_str(first.get()), imbrex_spec_str(spec.get()));
}

TEST_F(CApiShortConv, SelectionsTellOfTheFamily) {
  const SelectionHandle selection = select_for(spec.get(), device.get(), "cpu_generic");
  ASSERT_NE(selection, nullptr) << imbrex_last_error();
  EXPECT_STREQ(imbrex_selection_backend(selection.get()), "cpu_generic");
  EXPECT_GE(imbrex_selection_num_candidates(selection.get()), 2);
  EXPECT_NE(std::string(imbrex_selection_explain(selection.get())).find("reference"), std::string::npos);
  EXPECT_EQ(select_for(spec.get(), device.get(), "nobody"), nullptr);
  EXPECT_EQ(last_code(), "select.forced");
}

TEST_F(CApiShortConv, WhatIsForOneFamilyRefusesTheOther) {
  const SpecHandle attention = spec_of(small_fields());
  const PlanHandle conv = plan_for(spec.get()), attend = plan_for(attention.get());
  ConvStep step;
  EXPECT_EQ(imbrex_plan_run_short_conv(attend.get(), &step.inputs, &step.outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
  imbrex_inputs inputs = init(imbrex_inputs_init);
  imbrex_outputs outputs = init(imbrex_outputs_init);
  inputs.q = &step.bcx.view, outputs.out = &step.out.view;
  EXPECT_EQ(imbrex_plan_run(conv.get(), &inputs, &outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
  imbrex_spec_fields fields = init(imbrex_spec_fields_init);
  EXPECT_EQ(imbrex_spec_get_fields(spec.get(), &fields), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
  imbrex_kv_allocation* memory = nullptr;
  EXPECT_EQ(imbrex_kv_allocation_create(spec.get(), device.get(), 1, 8, nullptr, &memory), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
  const SelectionHandle one = select_for(spec.get(), device.get()), two = select_for(attention.get(), device.get());
  imbrex_plan* none = nullptr;
  EXPECT_EQ(imbrex_plan_create_by_phase(one.get(), two.get(), nullptr, 1, &none), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
}

TEST_F(CApiShortConv, WrongFieldsAndTensorsHaveTheirCodes) {
  imbrex_short_conv_fields fields = small_short_conv();
  fields.dtype = 99;
  EXPECT_EQ(short_conv_of(fields), nullptr);
  EXPECT_EQ(last_code(), "api.enum");
  fields = small_short_conv(), fields.form = 2;
  EXPECT_EQ(short_conv_of(fields), nullptr);
  EXPECT_EQ(last_code(), "api.enum");
  fields = small_short_conv(), fields.activation = IMBREX_CONV_SILU;
  EXPECT_EQ(short_conv_of(fields), nullptr);
  EXPECT_EQ(last_code(), "short_conv.activation");
  fields = small_short_conv(), fields.width = 1;
  EXPECT_EQ(short_conv_of(fields), nullptr);
  EXPECT_EQ(last_code(), "short_conv.width");
  const PlanHandle plan = plan_for(spec.get());
  ConvStep step;
  step.batch.state_slots = nullptr;
  EXPECT_EQ(imbrex_plan_update(plan.get(), &step.batch, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.state.size");
  step.batch.state_slots = step.state_slots;
  ASSERT_EQ(imbrex_plan_update(plan.get(), &step.batch, nullptr), IMBREX_OK);
  step.inputs.state = nullptr;
  EXPECT_EQ(imbrex_plan_run_short_conv(plan.get(), &step.inputs, &step.outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
}

}  // namespace
}  // namespace imbrex::test

// Recurrent layers through the C ABI: the same bits as through C++, and functions that are for another family.
#include <algorithm>
#include <random>

#include "api/handles.h"
#include "imbrex/imbrex.hpp"

namespace imbrex::test {
namespace {

constexpr int kKeyHeads = 2, kValueHeads = 4, kDimK = 16, kDimV = 24, kRecurrentTokens = 9, kRecurrentSlots = 4, kRecurrentDrafts = 2;
constexpr int kConvChannels = 2 * kKeyHeads * kDimK + kValueHeads * kDimV, kConvWidth = 3;

// A gated delta net with gates of each channel.
imbrex_recurrent_fields small_recurrent() {
  imbrex_recurrent_fields f = init(imbrex_recurrent_fields_init);
  f.num_k_heads = kKeyHeads, f.num_v_heads = kValueHeads, f.head_dim_k = kDimK, f.head_dim_v = kDimV;
  f.channel_gate = f.delta = f.sigmoid_beta = f.qk_norm = f.skip = 1;
  f.dtype = IMBREX_F32, f.layout = IMBREX_STATE_K_FIRST, f.num_drafts = kRecurrentDrafts;
  f.out_gate = IMBREX_OUT_GATE_SIGMOID, f.out_norm = IMBREX_OUT_NORM_BEFORE_GATE, f.norm_groups = 2, f.norm_eps = 1e-3f;
  return f;
}
SpecHandle recurrent_of(const imbrex_recurrent_fields& fields) {
  return make_handle<SpecHandle>([&](auto** out) { return imbrex_spec_create_recurrent(&fields, out); });
}

// A request of six tokens without a past, and one of three behind ten whose last step had a draft that was kept.
struct RecurrentStep {
  const int query_start_loc[3] = {0, 6, kRecurrentTokens}, seq_lens[2] = {6, 13}, state_slots[2] = {3, 1}, num_drafts[2] = {0, 2},
            accepted_drafts[2] = {0, 1};
  HostTensor<float> q{{kRecurrentTokens, kKeyHeads, kDimK}, kFloat}, k{{kRecurrentTokens, kKeyHeads, kDimK}, kFloat},
      v{{kRecurrentTokens, kValueHeads, kDimV}, kFloat}, gate{{kRecurrentTokens, kValueHeads, kDimK}, kFloat},
      beta{{kRecurrentTokens, kValueHeads}, kFloat}, rates{{kValueHeads}, kFloat}, gate_bias{{kValueHeads, kDimK}, kFloat},
      skip{{kValueHeads}, kFloat}, state{{kRecurrentSlots, 1 + kRecurrentDrafts, kValueHeads, kDimK, kDimV}, kFloat},
      z{{kRecurrentTokens, kValueHeads, kDimV}, kFloat}, norm_weight{{kValueHeads, kDimV}, kFloat},
      out{{kRecurrentTokens, kValueHeads, kDimV}, kFloat}, input{{kRecurrentTokens, kConvChannels}, kFloat},
      conv_weight{{kConvChannels, kConvWidth}, kFloat}, conv_bias{{kConvChannels}, kFloat},
      conv_state{{kRecurrentSlots, kConvWidth - 1 + kRecurrentDrafts, kConvChannels}, kFloat};
  imbrex_batch batch = init(imbrex_batch_init);
  imbrex_recurrent_inputs inputs = init(imbrex_recurrent_inputs_init);
  imbrex_recurrent_outputs outputs = init(imbrex_recurrent_outputs_init);

  RecurrentStep() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (auto* t :
         {&q, &k, &v, &gate, &beta, &rates, &gate_bias, &skip, &state, &z, &norm_weight, &input, &conv_weight, &conv_bias, &conv_state})
      std::ranges::generate(t->data, [&] { return normal(random); });
    batch.num_reqs = 2, batch.query_start_loc = query_start_loc, batch.seq_lens = seq_lens;
    batch.state_slots = state_slots, batch.num_drafts = num_drafts, batch.accepted_drafts = accepted_drafts;
    inputs.q = &q.view, inputs.k = &k.view, inputs.v = &v.view, inputs.gate = &gate.view, inputs.beta = &beta.view;
    inputs.rates = &rates.view, inputs.gate_bias = &gate_bias.view, inputs.skip = &skip.view, inputs.state = &state.view;
    inputs.z = &z.view, inputs.norm_weight = &norm_weight.view;
    outputs.out = &out.view;
  }
  // With the convolution in front.
  void convolve() {
    inputs.q = inputs.k = inputs.v = nullptr;
    inputs.input = &input.view, inputs.conv_weight = &conv_weight.view, inputs.conv_bias = &conv_bias.view;
    inputs.conv_state = &conv_state.view;
  }
};

TensorView cpp_view(HostTensor<float>& t) {
  TensorView v{.data = t.data.data(), .dtype = DType::f32, .rank = int(t.shape.size())};
  int64_t stride = 1;
  for (int d = v.rank - 1; d >= 0; --d)
    v.sizes[size_t(d)] = t.shape[size_t(d)], v.strides[size_t(d)] = stride, stride *= t.shape[size_t(d)];
  return v;
}

struct CApiRecurrent : testing::Test {
  DeviceHandle device = cpu();
  SpecHandle spec = recurrent_of(small_recurrent());
  PlanHandle plan_for(const imbrex_spec* of) {
    const SelectionHandle selection = select_for(of, device.get());
    return make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), nullptr, out); });
  }
};

RecurrentSpec same_in_cpp() {
  RecurrentSpec same{.num_k_heads = kKeyHeads, .num_v_heads = kValueHeads, .head_dim_k = kDimK, .head_dim_v = kDimV};
  same.channel_gate = same.delta = same.sigmoid_beta = same.qk_norm = same.skip = true;
  same.dtype = DType::f32, same.layout = StateLayout::k_first, same.num_drafts = kRecurrentDrafts;
  same.out_gate = OutputGate::sigmoid, same.out_norm = OutputNorm::before_gate, same.norm_groups = 2, same.norm_eps = 1e-3f;
  return same;
}
RecurrentInputs cpp_inputs(RecurrentStep& cpp) {
  return {.q = cpp_view(cpp.q),
          .k = cpp_view(cpp.k),
          .v = cpp_view(cpp.v),
          .gate = cpp_view(cpp.gate),
          .beta = cpp_view(cpp.beta),
          .rates = cpp_view(cpp.rates),
          .gate_bias = cpp_view(cpp.gate_bias),
          .skip = cpp_view(cpp.skip),
          .state = cpp_view(cpp.state),
          .z = cpp_view(cpp.z),
          .norm_weight = cpp_view(cpp.norm_weight)};
}
// Runs a step with a plan of the C++ interface.
void run_in_cpp(RecurrentStep& cpp, const RecurrentSpec& same, const RecurrentInputs& in) {
  const DeviceInfo info = describe_device("cpu");
  const auto plan = select<RecurrentFamily>(same, info).backend->plan(same, info, {});
  Batch batch;
  batch.query_start_loc = cpp.query_start_loc, batch.seq_lens = cpp.seq_lens;
  batch.state_slots = cpp.state_slots, batch.num_drafts = cpp.num_drafts, batch.accepted_drafts = cpp.accepted_drafts;
  plan->update(batch);
  plan->run(in, {.out = cpp_view(cpp.out)});
}

TEST_F(CApiRecurrent, GivesTheBitsOfTheCppInterface) {
  ASSERT_NE(spec, nullptr) << imbrex_last_error();
  const RecurrentSpec same = same_in_cpp();
  EXPECT_EQ(imbrex_spec_str(spec.get()), same.str());
  RecurrentStep c;
  const PlanHandle plan = plan_for(spec.get());
  ASSERT_NE(plan, nullptr) << imbrex_last_error();
  ASSERT_EQ(imbrex_plan_update(plan.get(), &c.batch, nullptr), IMBREX_OK) << imbrex_last_error();
  ASSERT_EQ(imbrex_plan_run_recurrent(plan.get(), &c.inputs, &c.outputs, nullptr), IMBREX_OK) << imbrex_last_error();

  RecurrentStep cpp;
  run_in_cpp(cpp, same, cpp_inputs(cpp));
  EXPECT_EQ(c.out.data, cpp.out.data);
  EXPECT_EQ(c.state.data, cpp.state.data);
  EXPECT_TRUE(std::ranges::any_of(c.out.data, [](float x) { return x != 0; }));
}

TEST_F(CApiRecurrent, AConvolutionInFrontHasTheBitsOfTheCppInterface) {
  imbrex_recurrent_fields fields = small_recurrent();
  fields.conv = IMBREX_CONV_VKQ, fields.conv_width = kConvWidth, fields.conv_bias = 1, fields.conv_silu = 0;
  const SpecHandle convolved = recurrent_of(fields);
  ASSERT_NE(convolved, nullptr) << imbrex_last_error();
  RecurrentSpec same = same_in_cpp();
  same.conv = RecurrentConv::vkq, same.conv_width = kConvWidth, same.conv_bias = true, same.conv_silu = false;
  EXPECT_EQ(imbrex_spec_str(convolved.get()), same.str());
  RecurrentStep c, cpp;
  c.convolve();
  const PlanHandle plan = plan_for(convolved.get());
  ASSERT_EQ(imbrex_plan_update(plan.get(), &c.batch, nullptr), IMBREX_OK) << imbrex_last_error();
  ASSERT_EQ(imbrex_plan_run_recurrent(plan.get(), &c.inputs, &c.outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  RecurrentInputs in = cpp_inputs(cpp);
  in.q = in.k = in.v = {};
  in.input = cpp_view(cpp.input), in.conv_weight = cpp_view(cpp.conv_weight), in.conv_bias = cpp_view(cpp.conv_bias);
  in.conv_state = cpp_view(cpp.conv_state);
  run_in_cpp(cpp, same, in);
  EXPECT_EQ(c.out.data, cpp.out.data);
  EXPECT_EQ(c.state.data, cpp.state.data);
  EXPECT_EQ(c.conv_state.data, cpp.conv_state.data);
  EXPECT_NE(c.conv_state.data, RecurrentStep().conv_state.data);
  c.inputs.input = nullptr;
  EXPECT_EQ(imbrex_plan_run_recurrent(plan.get(), &c.inputs, &c.outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
}

// Nine tokens of two requests, of which the second one's drafts are siblings and its state is read from slot 2.
TEST_F(CApiRecurrent, TreesAndSourcesArrive) {
  imbrex_recurrent_fields fields = small_recurrent();
  fields.tree_drafts = 1;
  spec = recurrent_of(fields);
  ASSERT_NE(spec, nullptr) << imbrex_last_error();
  const PlanHandle plan = plan_for(spec.get());
  const auto run = [&](RecurrentStep& c, const int32_t* sources, const int32_t* parents) {
    c.batch.source_slots = sources, c.batch.draft_parents = parents;
    EXPECT_EQ(imbrex_plan_update(plan.get(), &c.batch, nullptr), IMBREX_OK) << imbrex_last_error();
    EXPECT_EQ(imbrex_plan_run_recurrent(plan.get(), &c.inputs, &c.outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  };
  constexpr size_t kToken = size_t(kValueHeads) * kDimV, kSlot = size_t(1 + kRecurrentDrafts) * kValueHeads * kDimK * kDimV;
  RecurrentStep chain, tree, moved;
  const int32_t sources[2] = {77, 2}, siblings[kRecurrentTokens] = {9, 9, 9, 9, 9, 9, 9, 0, 0};  // the first request is new
  run(chain, nullptr, nullptr), run(tree, nullptr, siblings);
  std::swap_ranges(moved.state.data.begin() + kSlot, moved.state.data.begin() + 2 * kSlot, moved.state.data.begin() + 2 * kSlot);
  const std::vector<float> source(moved.state.data.begin() + 2 * kSlot, moved.state.data.begin() + 3 * kSlot);
  run(moved, sources, siblings);
  const auto last = [](const RecurrentStep& c) { return std::vector<float>(c.out.data.end() - kToken, c.out.data.end()); };
  EXPECT_TRUE(std::equal(chain.out.data.begin(), chain.out.data.end() - kToken, tree.out.data.begin()));
  EXPECT_NE(last(chain), last(tree));
  EXPECT_EQ(moved.out.data, tree.out.data);
  EXPECT_TRUE(std::equal(source.begin(), source.end(), moved.state.data.begin() + 2 * kSlot)) << "a source was written";
  EXPECT_TRUE(std::equal(tree.state.data.begin() + kSlot, tree.state.data.begin() + 2 * kSlot, moved.state.data.begin() + kSlot));
  const int32_t wrong[kRecurrentTokens] = {0, 0, 0, 0, 0, 0, 0, 0, 2};
  tree.batch.draft_parents = wrong;
  EXPECT_EQ(imbrex_plan_update(plan.get(), &tree.batch, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.draft_parents.range");
}

TEST_F(CApiRecurrent, DefaultsAreThoseOfCpp) {
  imbrex_recurrent_fields fields = init(imbrex_recurrent_fields_init);
  fields.num_k_heads = fields.num_v_heads = fields.head_dim_k = fields.head_dim_v = 8;
  const SpecHandle usual = recurrent_of(fields);
  ASSERT_NE(usual, nullptr) << imbrex_last_error();
  EXPECT_EQ(imbrex_spec_str(usual.get()), RecurrentSpec({.num_k_heads = 8, .num_v_heads = 8, .head_dim_k = 8, .head_dim_v = 8}).str());
  EXPECT_EQ(fields.beta_scale, 1.f);
  EXPECT_EQ(fields.norm_eps, 1e-6f);
  EXPECT_EQ(fields.conv_width, 4);
  EXPECT_EQ(fields.conv_silu, 1);
  EXPECT_EQ(fields.gate, IMBREX_GATE_SOFTPLUS);
  EXPECT_EQ(fields.layout, IMBREX_STATE_V_FIRST);
  EXPECT_EQ(fields.state_dtype, IMBREX_F32);
}

TEST_F(CApiRecurrent, SelectionsTellOfTheFamily) {
  const SelectionHandle selection = select_for(spec.get(), device.get(), "cpu_generic");
  ASSERT_NE(selection, nullptr) << imbrex_last_error();
  EXPECT_STREQ(imbrex_selection_backend(selection.get()), "cpu_generic");
  EXPECT_GE(imbrex_selection_num_candidates(selection.get()), 2);
  EXPECT_NE(std::string(imbrex_selection_explain(selection.get())).find("reference"), std::string::npos);
  EXPECT_EQ(select_for(spec.get(), device.get(), "nobody"), nullptr);
  EXPECT_EQ(last_code(), "select.forced");
}

TEST_F(CApiRecurrent, WhatIsForOneFamilyRefusesTheOther) {
  const SpecHandle attention = spec_of(small_fields());
  const PlanHandle recurrent = plan_for(spec.get()), attend = plan_for(attention.get());
  RecurrentStep step;
  EXPECT_EQ(imbrex_plan_run_recurrent(attend.get(), &step.inputs, &step.outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
  imbrex_inputs inputs = init(imbrex_inputs_init);
  imbrex_outputs outputs = init(imbrex_outputs_init);
  inputs.q = &step.q.view, outputs.out = &step.out.view;
  EXPECT_EQ(imbrex_plan_run(recurrent.get(), &inputs, &outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
  imbrex_spec_fields fields = init(imbrex_spec_fields_init);
  EXPECT_EQ(imbrex_spec_get_fields(spec.get(), &fields), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
  imbrex_kv_allocation* memory = nullptr;
  EXPECT_EQ(imbrex_kv_allocation_create(spec.get(), device.get(), 1, 8, nullptr, &memory), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
}

TEST_F(CApiRecurrent, WrongFieldsAndTensorsHaveTheirCodes) {
  const auto code = [](const auto& change) {
    imbrex_recurrent_fields fields = small_recurrent();
    change(fields);
    EXPECT_EQ(recurrent_of(fields), nullptr);
    return last_code();
  };
  EXPECT_EQ(code([](auto& f) { f.gate = 4; }), "api.enum");
  EXPECT_EQ(code([](auto& f) { f.layout = -1; }), "api.enum");
  EXPECT_EQ(code([](auto& f) { f.delta = 2; }), "api.enum");
  EXPECT_EQ(code([](auto& f) { f.state_dtype = 99; }), "api.enum");
  EXPECT_EQ(code([](auto& f) { f.num_v_heads = 3; }), "recurrent.num_v_heads");
  EXPECT_EQ(code([](auto& f) { f.struct_size = 80; }), "api.struct_size");
  const PlanHandle plan = plan_for(spec.get());
  RecurrentStep step;
  step.batch.state_slots = nullptr;
  EXPECT_EQ(imbrex_plan_update(plan.get(), &step.batch, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.state.size");
  step.batch.state_slots = step.state_slots;
  ASSERT_EQ(imbrex_plan_update(plan.get(), &step.batch, nullptr), IMBREX_OK);
  step.inputs.state = nullptr;
  EXPECT_EQ(imbrex_plan_run_recurrent(plan.get(), &step.inputs, &step.outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
  step.inputs.state = &step.state.view, step.inputs.beta = nullptr;
  EXPECT_EQ(imbrex_plan_run_recurrent(plan.get(), &step.inputs, &step.outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "recurrent.run.missing");
}

}  // namespace
}  // namespace imbrex::test

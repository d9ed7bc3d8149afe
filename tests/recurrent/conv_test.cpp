// Recurrent layers with the convolution in front, in one call: the bits of both parts one after the other, what is refused, and that an
// update takes effect in both parts or in none.
#include "recurrent/conv_plan.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "conformance/case_random.h"
#include "conformance/recurrent/inputs.h"
#include "expect_error.h"
#include "imbrex/short_conv.h"

namespace imbrex {
namespace {

RecurrentSpec convolved_layer(std::string_view name, RecurrentConv conv, DType dtype) {
  RecurrentSpec spec = recurrent_layer(name);
  spec.conv = conv, spec.conv_bias = conv == RecurrentConv::vkq, spec.conv_silu = name != "kda", spec.dtype = dtype, spec.num_drafts = 2;
  spec.out_gate = OutputGate::silu, spec.out_norm = conv == RecurrentConv::vkq ? OutputNorm::after_gate : OutputNorm::before_gate;
  return spec;
}

// A step: tokens that each request has in it, those in front of it, and drafts of this step and of the one before.
struct ConvStep {
  std::vector<int32_t> starts{0}, lens, slots, drafts, accepted;
  void add(int tokens, int before, int slot, int of_drafts = 0, int kept = 0) {
    starts.push_back(starts.back() + tokens), lens.push_back(before + tokens), slots.push_back(slot);
    drafts.push_back(of_drafts), accepted.push_back(kept);
  }
  Batch batch() const {
    Batch b;
    b.query_start_loc = starts, b.seq_lens = lens, b.state_slots = slots, b.num_drafts = drafts, b.accepted_drafts = accepted;
    return b;
  }
};
std::vector<ConvStep> conv_steps() {
  std::vector<ConvStep> steps(3);
  steps[0].add(70, 0, 3), steps[0].add(4, 0, 0, 2), steps[0].add(2, 5, 2);
  steps[1].add(1, 70, 3), steps[1].add(3, 3, 0, 1, 1), steps[1].add(0, 7, 2);
  steps[2].add(20, 5, 0, 0, 1), steps[2].add(1, 71, 3, 0, 0);
  return steps;
}

// The tensors of a layer. Rows of the projection have z and the gates' room behind what is convolved.
struct ConvTensors {
  static constexpr int kTokens = 80, kSlots = 4;
  RecurrentSpec spec;
  HostTensor projection, weight, bias, conv_state, state, gate, beta, rates, skip, norm_weight, out;

  explicit ConvTensors(const RecurrentSpec& of) : spec(of) {
    const int64_t heads = spec.num_v_heads, channels = spec.conv_channels(), values = heads * spec.head_dim_v;
    uint64_t seed = 1;
    const auto make = [&](DType dtype, std::vector<int64_t> sizes, double factor = 1) {
      HostTensor t = HostTensor::make(dtype, std::move(sizes));
      for (int64_t i = 0; i < t.num_elements(); ++i) t.set(i, factor * normal(splitmix(seed * 0x10001 + uint64_t(i))));
      ++seed;
      return t;
    };
    projection = make(spec.dtype, {kTokens, channels + values + 8});
    weight = make(spec.dtype, {channels, spec.conv_width}, 0.5);
    if (spec.conv_bias) bias = make(spec.dtype, {channels}, 0.5);
    conv_state = make(spec.dtype, {kSlots, spec.conv_state_rows(), channels});
    state = make(spec.state_dtype, {kSlots, spec.state_rows(), heads, spec.head_dim_k, spec.head_dim_v}, 0.3);
    gate = spec.channel_gate ? make(DType::f32, {kTokens, heads, spec.head_dim_k}) : make(DType::f32, {kTokens, heads});
    if (spec.delta) beta = make(DType::f32, {kTokens, heads});
    rates = make(DType::f32, {heads}, 0.3);
    if (spec.skip) skip = make(DType::f32, {heads});
    norm_weight = make(DType::f32, {spec.head_dim_v});
    out = HostTensor::make(spec.dtype, {kTokens, heads, spec.head_dim_v});
  }
  // Some numbers of each row of the projection.
  TensorView columns(int64_t first, std::initializer_list<int64_t> sizes) {
    TensorView t = TensorView::contiguous(projection.bytes.data() + first * size_of(spec.dtype), spec.dtype, sizes);
    return t.strides[0] = projection.sizes[1], t;
  }
  RecurrentInputs inputs() {
    RecurrentInputs in{.gate = gate.view(), .beta = beta.view(), .rates = rates.view(), .skip = skip.view(), .state = state.view()};
    in.z = columns(spec.conv_channels(), {kTokens, spec.num_v_heads, spec.head_dim_v}), in.norm_weight = norm_weight.view();
    return in;
  }
  RecurrentInputs with_conv() {
    RecurrentInputs in = inputs();
    in.input = columns(0, {kTokens, spec.conv_channels()});
    in.conv_weight = weight.view(), in.conv_bias = bias.view(), in.conv_state = conv_state.view();
    return in;
  }
};

// The parts one after the other, with what is convolved in the caller's memory.
void run_parts(ConvTensors& t, ShortConvPlan& conv, RecurrentPlan& recurrence) {
  const RecurrentSpec& s = t.spec;
  HostTensor rows = HostTensor::make(s.dtype, {ConvTensors::kTokens, s.conv_channels()});
  conv.run({.input = t.columns(0, {ConvTensors::kTokens, s.conv_channels()}),
            .weight = t.weight.view(),
            .bias = t.bias.view(),
            .state = t.conv_state.view()},
           {.out = rows.view()});
  const auto part = [&](int64_t first, int64_t heads, int64_t dim) {
    TensorView v = TensorView::contiguous(rows.bytes.data() + first * size_of(s.dtype), s.dtype, {ConvTensors::kTokens, heads, dim});
    return v.strides[0] = s.conv_channels(), v;
  };
  const int64_t keys = int64_t(s.num_k_heads) * s.head_dim_k, values = int64_t(s.num_v_heads) * s.head_dim_v;
  const bool values_first = s.conv == RecurrentConv::vkq;
  RecurrentInputs in = t.inputs();
  in.q = part(values_first ? values + keys : 0, s.num_k_heads, s.head_dim_k);
  in.k = part(values_first ? values : keys, s.num_k_heads, s.head_dim_k);
  in.v = part(values_first ? 0 : 2 * keys, s.num_v_heads, s.head_dim_v);
  recurrence.run(in, {.out = t.out.view()});
}

TEST(RecurrentConv, OneCallHasTheBitsOfItsParts) {
  int run = 0;
  for (const auto& [layer, conv] : {std::pair{"gdn", RecurrentConv::qkv}, {"kda", RecurrentConv::qkv}, {"mamba2", RecurrentConv::vkq}})
    for (const DType dtype : {DType::bf16, DType::f32})
      for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16})
        for (const BackendOf<RecurrentFamily>* backend : backends<RecurrentFamily>()) {
          DeviceInfo device = probe_cpu();
          if (isa > device.isa || (isa != CpuIsa::generic && backend->name() == "reference")) continue;
          device.isa = isa;
          const RecurrentSpec spec = convolved_layer(layer, conv, dtype);
          if (!backend->unsupported(spec, device).empty()) continue;
          const PlanOptions options{.limits = {.max_num_reqs = 4, .max_num_tokens = ConvTensors::kTokens}};
          const auto whole = backend->plan(spec, device, options), recurrence = backend->plan(without_conv(spec), device, options);
          const auto in_front = find_backend<ShortConvFamily>(backend->name())->plan(conv_of(spec), device, options);
          EXPECT_EQ(whole->step_tokens(), recurrence->step_tokens());
          EXPECT_EQ(whole->rounded_products(), recurrence->rounded_products());
          ConvTensors together(spec), apart(spec);
          for (const ConvStep& step : conv_steps()) {
            whole->update(step.batch()), recurrence->update(step.batch()), in_front->update(step.batch());
            whole->run(together.with_conv(), {.out = together.out.view()});
            run_parts(apart, *in_front, *recurrence);
            EXPECT_EQ(together.out.bytes, apart.out.bytes) << whole->str();
            EXPECT_EQ(together.state.bytes, apart.state.bytes) << whole->str();
            EXPECT_EQ(together.conv_state.bytes, apart.conv_state.bytes) << whole->str();
          }
          EXPECT_NE(together.conv_state.bytes, ConvTensors(spec).conv_state.bytes);
          EXPECT_NE(together.out.bytes, ConvTensors(spec).out.bytes);
          ++run;
        }
  EXPECT_GE(run, 12);
}

TEST(RecurrentConv, WrongTensorsAreRefusedBeforeAnythingIsWritten) {
  const RecurrentSpec spec = convolved_layer("gdn", RecurrentConv::qkv, DType::bf16);
  EXPECT_EQ(spec.conv_channels(), 2 * 2 * 64 + 4 * 64);
  EXPECT_EQ(spec.conv_state_rows(), 3 + 2);
  for (const char* name : {"cpu_generic", "reference"}) {
    const auto plan = find_backend<RecurrentFamily>(name)->plan(spec, probe_cpu(), {});
    plan->update(conv_steps()[0].batch());
    ConvTensors t(spec);
    const std::vector<char> before = t.conv_state.bytes;
    const auto code = [&](const auto& change) {
      RecurrentInputs in = t.with_conv();
      change(in);
      return test::error_code([&] { plan->run(in, {.out = t.out.view()}); });
    };
    EXPECT_EQ(code([](auto& in) { in.q = in.z; }), "recurrent.run.missing");
    EXPECT_EQ(code([](auto& in) { in.input = {}; }), "recurrent.run.missing");
    EXPECT_EQ(code([](auto& in) { in.conv_bias = in.rates; }), "recurrent.run.missing");
    EXPECT_EQ(code([](auto& in) { in.input.sizes[1] -= 1; }), "recurrent.run.tensor");
    EXPECT_EQ(code([](auto& in) { in.conv_weight.sizes[1] = 3; }), "recurrent.run.tensor");
    EXPECT_EQ(code([](auto& in) { in.conv_state.sizes[1] = 3; }), "recurrent.run.tensor");
    EXPECT_EQ(code([](auto& in) { in.conv_state.sizes[0] = 3; }), "recurrent.run.tensor");
    EXPECT_EQ(code([](auto& in) { in.conv_state.strides[0] = 1; }), "tensor.overlap");
    EXPECT_EQ(code([](auto& in) { in.norm_weight = {}; }), "recurrent.run.missing");
    EXPECT_EQ(t.conv_state.bytes, before);
    EXPECT_EQ(code([](auto&) {}), "nothing thrown");
    EXPECT_NE(t.conv_state.bytes, before);
    RecurrentInputs unasked = t.with_conv();
    const auto alone = find_backend<RecurrentFamily>(name)->plan(without_conv(spec), probe_cpu(), {});
    alone->update(conv_steps()[0].batch());
    EXPECT_EQ(test::error_code([&] { alone->run(unasked, {.out = t.out.view()}); }), "recurrent.run.missing");
    EXPECT_EQ(test::error_code([&] { plan->update_on_device({}); }), "update.on_device");
    const std::vector<ConvStep> steps = conv_steps();
    Batch wrong = steps[0].batch();
    wrong.state_slots = {};
    EXPECT_EQ(test::error_code([&] { plan->update(wrong); }), "batch.state.size");
  }
}

TEST(RecurrentConv, WrongSpecsAreRefused) {
  const auto code = [](const auto& change) {
    RecurrentSpec spec = recurrent_layer("gdn");
    spec.conv = RecurrentConv::qkv;
    change(spec);
    return test::error_code([&] { spec.validate(); });
  };
  EXPECT_EQ(code([](auto&) {}), "nothing thrown");
  EXPECT_EQ(code([](auto& s) { s.conv = RecurrentConv(3); }), "recurrent.conv");
  EXPECT_EQ(code([](auto& s) { s.conv = RecurrentConv::none, s.conv_bias = true; }), "recurrent.conv");
  EXPECT_EQ(code([](auto& s) { s.conv = RecurrentConv::none, s.conv_silu = false; }), "recurrent.conv");
  EXPECT_EQ(code([](auto& s) { s.conv_width = 1; }), "recurrent.conv_width");
  EXPECT_EQ(code([](auto& s) { s.conv_width = 9; }), "recurrent.conv_width");
  EXPECT_EQ(code([](auto& s) { s.num_v_heads = s.num_k_heads = 1 << 16, s.head_dim_v = s.head_dim_k = 256; }), "recurrent.conv");
  RecurrentSpec spec = recurrent_layer("gdn");
  spec.conv = RecurrentConv::qkv, spec.conv_bias = true;
  EXPECT_EQ(spec.str(), "recurrent q2 v4 k64 v64 softplus delta sigmoid_beta qk_norm conv_qkv conv_bias bf16 state f32 v_first");
}

// A recurrence whose updates can be made to fail, under the name of a backend of convolutions.
struct FailingRecurrences final : BackendOf<RecurrentFamily> {
  mutable bool fails = false;
  struct Failing final : RecurrentPlan {
    std::unique_ptr<RecurrentPlan> inner;
    const bool& fails;
    Failing(std::unique_ptr<RecurrentPlan> of, const bool& when) : inner(std::move(of)), fails(when) {}
    void update(const Batch& batch, Stream stream) override {
      if (fails) throw Error("test.fails", "made to");
      inner->update(batch, stream);
    }
    void run(const RecurrentInputs& in, const RecurrentOutputs& out, Stream stream) const override { inner->run(in, out, stream); }
    std::string str() const override { return "failing"; }
  };
  std::string_view name() const override { return "cpu_generic"; }
  std::string_view description() const override { return "fails"; }
  std::vector<Reason> unsupported(const RecurrentSpec&, const DeviceInfo&) const override { return {}; }
  std::unique_ptr<RecurrentPlan> plan(const RecurrentSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    return std::make_unique<Failing>(find_backend<RecurrentFamily>("cpu_generic")->plan(spec, device, options), fails);
  }
};

TEST(RecurrentConv, AFailedUpdateLeavesTheStepBefore) {
  const RecurrentSpec spec = convolved_layer("gdn", RecurrentConv::qkv, DType::f32);
  const PlanOptions options{.limits = {.max_num_reqs = 4, .max_num_tokens = ConvTensors::kTokens}};
  const FailingRecurrences backend;
  const auto plan = make_conv_plan(backend, spec, probe_cpu(), options, conv_rows_of_host(spec, options.limits));
  const auto results = [&](RecurrentPlan& of) {
    ConvTensors t(spec);
    of.run(t.with_conv(), {.out = t.out.view()});
    return std::pair(t.out.bytes, t.conv_state.bytes);
  };
  const std::vector<ConvStep> steps = conv_steps();
  plan->update(steps[0].batch());
  const auto before = results(*plan);
  backend.fails = true;
  EXPECT_EQ(test::error_code([&] { plan->update(steps[1].batch()); }), "test.fails");
  EXPECT_TRUE(results(*plan) == before);
  backend.fails = false;
  plan->update(steps[1].batch());
  EXPECT_FALSE(results(*plan) == before);
}

}  // namespace
}  // namespace imbrex

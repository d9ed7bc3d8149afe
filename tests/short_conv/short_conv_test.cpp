// The short convolution: a part of its cases, what is refused, and selection. What holds for every backend is in tests/conformance.
#include "imbrex/short_conv.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "conformance/short_conv/judge.h"
#include "expect_error.h"
#include "sanitizers.h"
#include "short_conv/spec_fields.h"
#include "spec_table.h"

namespace imbrex {
namespace {

// A tensor of numbers that are all one.
struct Tensor {
  HostTensor host;
  TensorView view;

  Tensor(DType dtype, std::vector<int64_t> sizes) : host(HostTensor::make(dtype, std::move(sizes))), view(host.view()) {
    for (int64_t i = 0; i < host.num_elements(); ++i) host.set(i, 1);
  }
};

// A part of the table of cases, which tests/conformance runs whole: here for the sanitizers that run all of this program, and fewer
// for the emulator, which takes ten times as long.
TEST(ShortConv, CasesMatchTheReference) {
  int run = 0;
  for (size_t i = 0; i < short_conv_cases().size(); i += 11 * (test::kEmulated ? 3 : 1)) {
    const ShortConvCase& c = short_conv_cases()[i];
    const ShortConvCaseInputs inputs = make_inputs(c);
    const ShortConvExpected expected = expect(inputs);
    for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512})
      for (const BackendOf<ShortConvFamily>* backend : backends<ShortConvFamily>()) {
        DeviceInfo device = probe_cpu();
        if (isa > device.isa) continue;
        device.isa = isa;
        if (!backend->unsupported(c.spec, device).empty()) continue;
        const ShortConvJudgement judgement = judge(expected, inputs, run_case(*backend, device, inputs, default_options(c)));
        EXPECT_TRUE(judgement.pass()) << c.name << " " << backend->name() << " on " << to_string(isa) << ": " << judgement.failure;
        ++run;
      }
  }
  EXPECT_GE(run, test::kEmulated ? 16 : 50);
}

// Outputs of many tokens are stored past the caches where their rows begin with a line, with the bits that they have elsewhere, and nothing
// beside them.
TEST(ShortConv, OutputsPastTheCachesAreTheSame) {
  if (test::kEmulated) GTEST_SKIP() << "only x86 stores past its caches";
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const ShortConvForm form : {ShortConvForm::gated, ShortConvForm::plain}) {
      const ShortConvSpec spec{.dim = 2056, .width = 4, .dtype = dtype, .form = form};  // whose last vector is not full
      const int size = size_of(dtype), parts = form == ShortConvForm::gated ? 3 : 1, row = 2112;
      const int tokens = (16 << 20) / (spec.dim * size) + 3;
      HostTensor input = HostTensor::make(dtype, {tokens, parts * spec.dim}), weight = HostTensor::make(dtype, {spec.dim, spec.width});
      for (int64_t i = 0; i < input.num_elements(); ++i) input.set(i, float(i * 37 % 101) / 50 - 1);
      for (int64_t i = 0; i < weight.num_elements(); ++i) weight.set(i, float(i * 29 % 67) / 33 - 1);
      const std::vector<int32_t> starts{0, tokens}, lens{tokens}, slots{0};
      Batch batch;
      batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots;
      for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512}) {
        DeviceInfo device = probe_cpu();
        if (isa > device.isa) continue;
        device.isa = isa;
        const auto plan = find_backend<ShortConvFamily>(isa == CpuIsa::avx512 ? "cpu_avx512" : "cpu_generic")
                              ->plan(spec, device, {.limits = {.max_num_reqs = 1, .max_num_tokens = tokens, .max_seq_len = tokens}});
        plan->update(batch);
        const auto outputs_at = [&](size_t offset) {
          constexpr char kUntouched = 0x5a;
          constexpr size_t kLine = 64;
          const size_t bytes = size_t(tokens) * row * size_t(size);
          std::vector<char> memory(bytes + 3 * kLine, kUntouched), out;
          char* const begin = memory.data() + (kLine - reinterpret_cast<uintptr_t>(memory.data()) % kLine) % kLine + offset;
          HostTensor state = HostTensor::make(dtype, {1, spec.width - 1, spec.dim});
          TensorView view = TensorView::contiguous(begin, dtype, {tokens, row}).slice(1, 0, spec.dim);
          plan->run({.input = input.view(), .weight = weight.view(), .bias = {}, .state = state.view()}, {.out = view});
          int64_t changed = 0;
          for (int token = 0; token < tokens; ++token) {
            const char* const from = begin + size_t(token) * row * size_t(size);
            out.insert(out.end(), from, from + spec.dim * size);
            changed += (row - spec.dim) * size - std::count(from + spec.dim * size, from + row * size, kUntouched);
          }
          EXPECT_EQ(changed, 0);
          return out;
        };
        EXPECT_TRUE(outputs_at(0) == outputs_at(size_t(size))) << spec.str() << " on " << to_string(isa);
      }
    }
}

TEST(ShortConv, WhatIsWrongIsRefusedAndTheStepBeforeStays) {
  const ShortConvSpec spec{.dim = 32, .num_drafts = 2};
  for (const std::string name : {"cpu_generic", "reference"}) {
    const auto plan = find_backend<ShortConvFamily>(name)->plan(spec, probe_cpu(), {});
    std::vector<int32_t> starts{0, 2, 5}, lens{2, 9}, slots{1, 0}, none{0, 0};
    Batch good;
    good.query_start_loc = starts, good.seq_lens = lens, good.state_slots = slots, good.num_drafts = none, good.accepted_drafts = none;
    plan->update(good, nullptr);
    const auto refused = [&](auto change) {
      Batch batch = good;
      std::vector<int32_t> list;
      change(batch, list);
      return test::error_code([&] { plan->update(batch, nullptr); });
    };
    EXPECT_EQ(refused([](Batch& b, auto&) { b.state_slots = {}; }), "batch.state.size");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {1, 1}, b.state_slots = l; }), "batch.state.shared");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {-1, 1}, b.state_slots = l; }), "batch.state.slot");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 3}, b.num_drafts = l; }), "batch.state.num_drafts");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {1, 0}, b.accepted_drafts = l; }), "batch.state.accepted_drafts");  // nothing has gone by
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 3}, b.accepted_drafts = l; }), "batch.state.accepted_drafts");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 2, 1}, b.query_start_loc = l; }), "batch.query_start_loc.monotone");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0}, b.source_slots = l; }), "batch.state.size");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {-1, -1}, b.source_slots = l; }), "batch.state.source");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {-1, 1}, b.source_slots = l; }), "batch.state.source");  // request 0 writes it
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 0, 0, 1, 2}, b.draft_parents = l; }), "batch.draft_parents.unexpected");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {-1, 0}, b.source_slots = l; }), "nothing thrown");  // request 0 is new
    plan->update(good, nullptr);

    Tensor input(spec.dtype, {5, 96}), weight(spec.dtype, {32, 3}), state(spec.dtype, {2, 4, 32}), out(spec.dtype, {5, 32});
    const auto run = [&](auto change) {
      ShortConvInputs in{.input = input.view, .weight = weight.view, .bias = {}, .state = state.view};
      ShortConvOutputs to{.out = out.view};
      change(in, to);
      return test::error_code([&] { plan->run(in, to, nullptr); });
    };
    EXPECT_EQ(run([](auto& in, auto&) { in.input.sizes[0] = 4; }), "short_conv.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.weight.sizes[1] = 4; }), "short_conv.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.state.sizes[0] = 1; }), "short_conv.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.state.strides[0] = 32; }), "tensor.overlap");
    EXPECT_EQ(run([](auto& in, auto&) { in.bias = in.weight; }), "short_conv.run.bias");
    EXPECT_EQ(run([](auto& in, auto& to) { to.out.data = in.input.data, to.out.strides[0] = in.input.strides[0]; }),
              "short_conv.run.overlap");
    EXPECT_EQ(run([](auto&, auto& to) { to.out.dtype = DType::f16; }), "short_conv.run.tensor");
    EXPECT_EQ(run([](auto&, auto&) {}), "nothing thrown");
    slots = {1, std::numeric_limits<int32_t>::max()};  // no number of slots fits an int then
    plan->update(good, nullptr);
    EXPECT_EQ(run([](auto&, auto&) {}), "short_conv.run.tensor");
  }
  EXPECT_EQ(test::error_code([&] { find_backend<ShortConvFamily>("cpu_generic")->plan(spec, probe_cpu(), {.out_dtype = DType::f32}); }),
            "backend.out_dtype");
  EXPECT_EQ(test::error_code([&] { find_backend<ShortConvFamily>("reference")->plan(spec, describe_device("h200"), {}); }),
            "backend.unsupported");
  const auto invalid = [](const ShortConvSpec& bad) { return test::error_code([&] { bad.validate(); }); };
  EXPECT_EQ(invalid({.dim = 0}), "short_conv.dim");
  EXPECT_EQ(invalid({.dim = 8, .width = 9}), "short_conv.width");
  EXPECT_EQ(invalid({.dim = 8, .dtype = DType::fp8_e4m3}), "short_conv.dtype");
  EXPECT_EQ(invalid({.dim = 8, .num_drafts = -1}), "short_conv.num_drafts");
  EXPECT_EQ(invalid({.dim = 8, .tree_drafts = true}), "short_conv.tree_drafts");
  EXPECT_EQ(invalid({.dim = 8, .form = ShortConvForm(2)}), "short_conv.form");
  EXPECT_EQ(invalid({.dim = 8, .form = ShortConvForm::plain, .activation = ShortConvActivation(2)}), "short_conv.activation");
  EXPECT_EQ(invalid({.dim = 8, .activation = ShortConvActivation::silu}), "short_conv.activation");
}

// A draft follows one in front of it, or the last token that is no draft.
TEST(ShortConv, WrongTreesAreRefused) {
  const ShortConvSpec spec{.dim = 32, .num_drafts = 3, .tree_drafts = true};
  for (const std::string name : {"cpu_generic", "reference"}) {
    const auto plan = find_backend<ShortConvFamily>(name)->plan(spec, probe_cpu(), {});
    const std::vector<int32_t> starts{0, 4, 7}, lens{9, 3}, slots{1, 0}, drafts{2, 3};
    Batch batch;
    batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots, batch.num_drafts = drafts;
    const auto update = [&](std::vector<int32_t> parents) {
      batch.draft_parents = parents;
      return test::error_code([&] { plan->update(batch, nullptr); });
    };
    EXPECT_EQ(update({-9, 77, 1, 1, -1, -1, -1}), "nothing thrown") << "of tokens that are no drafts none is read";
    EXPECT_EQ(update({0, 0, 1, 2, -1, 0, 1}), "nothing thrown");
    EXPECT_EQ(update({}), "nothing thrown");
    EXPECT_EQ(update({0, 0, 1, 2, -1, 0}), "batch.draft_parents.size");
    EXPECT_EQ(update({0, 0, 0, 2, -1, 0, 1}), "batch.draft_parents.range") << "not the last token that is no draft";
    EXPECT_EQ(update({0, 0, 1, 3, -1, 0, 1}), "batch.draft_parents.range") << "itself";
    EXPECT_EQ(update({0, 0, 3, 1, -1, 0, 1}), "batch.draft_parents.range") << "a later one";
    EXPECT_EQ(update({0, 0, 1, 2, -2, 0, 1}), "batch.draft_parents.range") << "in front of the step";
  }
}

// x is the second of three parts of a wider projection, and the outputs go to the third: they share rows, and no memory. Where they are the
// second part themselves, tokens that are read by others would be overwritten.
TEST(ShortConv, ThePlainFormReadsAPartOfAProjection) {
  const ShortConvSpec spec{
      .dim = 24, .width = 4, .dtype = DType::f32, .form = ShortConvForm::plain, .activation = ShortConvActivation::silu};
  for (const std::string name : {"cpu_generic", "reference"}) {
    const auto plan = find_backend<ShortConvFamily>(name)->plan(spec, probe_cpu(), {});
    const std::vector<int32_t> starts{0, 5}, lens{5}, slots{0};
    Batch batch;
    batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots;
    plan->update(batch, nullptr);
    Tensor projection(spec.dtype, {5, 72}), weight(spec.dtype, {24, 4}), state(spec.dtype, {1, 3, 24});
    const TensorView x = projection.view.slice(1, 24, 48), out = projection.view.slice(1, 48, 72);
    const auto run = [&](const TensorView& to) {
      return test::error_code(
          [&] { plan->run({.input = x, .weight = weight.view, .bias = {}, .state = state.view}, {.out = to}, nullptr); });
    };
    EXPECT_EQ(run(x), "short_conv.run.overlap");
    EXPECT_EQ(run(projection.view.slice(1, 47, 71)), "short_conv.run.overlap");
    EXPECT_EQ(run(out), "nothing thrown");
    for (int t = 0; t < 5; ++t) {
      const double sum = std::min(t + 1, 4);  // so many ones
      for (int d = 0; d < 24; ++d) {
        EXPECT_NEAR(projection.host.get(t * 72 + 48 + d), sum / (1 + std::exp(-sum)), 1e-6) << "token " << t;
        EXPECT_EQ(projection.host.get(t * 72 + 24 + d), 1);
      }
    }
  }
}

// Scratch is asked for before caches are sized, also of devices that are only described, and one workspace goes to the plans of all layers.
TEST(ShortConv, PlansNeedNoScratchAndTakeAWorkspace) {
  const ShortConvSpec spec{.dim = 32};
  const DeviceInfo cpu = probe_cpu();
  std::vector<char> memory(256);
  for (const BackendOf<ShortConvFamily>* backend : backends<ShortConvFamily>())
    for (const DeviceInfo& device : {cpu, describe_device("h200")}) {
      if (!backend->unsupported(spec, device).empty()) continue;
      EXPECT_EQ(backend->workspace_bytes(spec, device, {}), 0) << backend->name();
    }
  for (const auto& workspace : {make_workspace(cpu), make_workspace(cpu, memory.data(), int64_t(memory.size()))})
    for (const std::string name : {"cpu_generic", "reference"}) {
      const BackendOf<ShortConvFamily>& backend = *find_backend<ShortConvFamily>(name);
      EXPECT_NE(backend.plan(spec, cpu, {.workspace = workspace}), nullptr);
      EXPECT_EQ(workspace->bytes(), 0);
    }
  struct Elsewhere final : Workspace {
    Device device() const override { return {DeviceType::cuda, 0}; }
    int64_t bytes() const override { return 0; }
  };
  EXPECT_EQ(test::error_code(
                [&] { find_backend<ShortConvFamily>("cpu_generic")->plan(spec, cpu, {.workspace = std::make_shared<Elsewhere>()}); }),
            "backend.workspace");
}

TEST(ShortConv, IsSelectedWithReasons) {
  const ShortConvSpec spec{.dim = 2048, .width = 3, .bias = true, .num_drafts = 4};
  EXPECT_EQ(spec.str(), "short_conv d2048 w3 bf16 bias drafts4");
  EXPECT_EQ(spec.state_bytes(), 6 * 2048 * 2);
  const ShortConvSpec gdn{.dim = 8192, .width = 4, .form = ShortConvForm::plain, .activation = ShortConvActivation::silu};
  EXPECT_EQ(gdn.str(), "short_conv d8192 w4 bf16 plain silu");
  EXPECT_EQ(gdn.input_channels(), 8192);
  EXPECT_EQ(select<ShortConvFamily>(gdn, describe_device("h200")).backend->name(), "cuda_sm80");
  const auto selection = select<ShortConvFamily>(spec, describe_device("avx2,4 threads"));
  EXPECT_EQ(selection.backend->name(), "cpu_generic");
  EXPECT_EQ(select<ShortConvFamily>(spec, describe_device("avx512,4 threads")).backend->name(), "cpu_avx512");
  ASSERT_EQ(selection.candidates[1].reasons.size(), 1u);
  EXPECT_EQ(selection.candidates[1].reasons[0].code, "device.isa");
  EXPECT_EQ(select<ShortConvFamily>(spec, describe_device("h200")).backend->name(), "cuda_sm80");
  DeviceInfo old_gpu = describe_device("h200");
  old_gpu.sm = 75;
  const auto on_old_gpu = select<ShortConvFamily>(spec, old_gpu);
  EXPECT_EQ(on_old_gpu.backend, nullptr);
  ASSERT_EQ(on_old_gpu.candidates[0].reasons.size(), 1u);
  EXPECT_EQ(on_old_gpu.candidates[0].reasons[0].code, "device.sm");
  ASSERT_EQ(on_old_gpu.proposals.size(), 1u);
  EXPECT_TRUE(on_old_gpu.proposals[0].starts_with("device cpu: "));
}

// A field that the table of fields does not have would be lost on the way through the C ABI, Python and case files.
TEST(ShortConv, TheTableHasEveryFieldOnce) {
  EXPECT_EQ(test::rows_of_parts<ShortConvSpec>(), (std::map<std::string_view, int>{{"spec", test::num_fields<ShortConvSpec>()}}));
}

// Refuses layers with a bias, on any device.
class WithoutBias final : public BackendOf<ShortConvFamily> {
 public:
  std::string_view name() const override { return "without_bias"; }
  std::string_view description() const override { return "refuses a bias"; }
  std::vector<Reason> unsupported(const ShortConvSpec& spec, const DeviceInfo&) const override {
    return spec.bias ? std::vector<Reason>{{"spec.bias", "none", "one"}} : std::vector<Reason>{};
  }
  std::unique_ptr<ShortConvPlan> plan(const ShortConvSpec&, const DeviceInfo&, const PlanOptions&) const override { return nullptr; }
};

TEST(ShortConv, AFeatureThatABackendRefusesIsProposedToBeLeftOut) {
  DeviceInfo old_gpu = describe_device("h200");
  old_gpu.sm = 75;
  register_backend<ShortConvFamily>(std::make_shared<WithoutBias>());
  const auto selection = select<ShortConvFamily>({.dim = 64, .bias = true, .num_drafts = 2}, old_gpu);
  unregister_backend<ShortConvFamily>("without_bias");
  ASSERT_FALSE(selection.proposals.empty());
  EXPECT_EQ(selection.proposals[0], "without bias (changes the result): without_bias");
}

}  // namespace
}  // namespace imbrex

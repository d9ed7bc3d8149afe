// Recurrent layers: a part of their cases, what is refused, and selection. What holds for every backend is in tests/conformance.
#include "imbrex/recurrent.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "conformance/recurrent/judge.h"
#include "core/cpu_features.h"
#include "expect_error.h"
#include "recurrent/spec_fields.h"
#include "sanitizers.h"
#include "spec_table.h"

namespace imbrex {
namespace {

// A part of the table of cases, which tests/conformance runs whole: here for the sanitizers that run all of this program, and fewer
// for the emulator, which takes ten times as long.
TEST(Recurrent, CasesAreAsExactAsFloats) {
  int run = 0;
  for (size_t i = 0; i < recurrent_cases().size(); i += 17 * (test::kEmulated ? 3 : 1)) {
    const RecurrentCase& c = recurrent_cases()[i];
    const RecurrentCaseInputs inputs = make_inputs(c);
    const RecurrentExpected expected = expect(inputs, c.chunk), of_products = expect(inputs, c.chunk, true);
    for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx_emulated, CpuIsa::amx})
      for (const BackendOf<RecurrentFamily>* backend : backends<RecurrentFamily>()) {
        DeviceInfo device = probe_cpu();
        if (!cpu_features().missing(isa).empty()) continue;
        device.isa = isa;
        if (!backend->unsupported(c.spec, device).empty()) continue;
        const bool products = backend->plan(c.spec, device, {.limits = limits_of(c.requests)})->rounded_products();
        const RecurrentJudgement judgement =
            judge(products ? of_products : expected, inputs, run_case(*backend, device, inputs, default_options(c)));
        EXPECT_TRUE(judgement.pass()) << c.name << " " << backend->name() << " on " << to_string(isa) << ": " << judgement.failure;
        ++run;
      }
  }
  EXPECT_GE(run, test::kEmulated ? 10 : 30);
}

// Of tensors of bf16 prompts are products of bf16 where the CPU has these: in AMX tiles also with decays of channels.
TEST(Recurrent, PromptsTakeTheBestProducts) {
#if !defined(__x86_64__)
  GTEST_SKIP() << "these instructions are x86's";
#endif
  const BackendOf<RecurrentFamily>& backend = *find_backend<RecurrentFamily>("cpu_avx512");
  RecurrentSpec gdn = recurrent_layer("gdn"), kda = recurrent_layer("kda"), floats = gdn, mamba1 = recurrent_layer("mamba1");
  floats.dtype = DType::f32;
  DeviceInfo device = probe_cpu();
  const auto kernels = [&](CpuIsa isa) {
    device.isa = isa;
    std::string text;
    for (const RecurrentSpec& spec : {gdn, kda, floats, mamba1}) {
      const KernelChoice choice = backend.kernel_choices(spec, device).front();
      text += choice.requests + " " + choice.kernel + ", ";
    }
    return text;
  };
  EXPECT_EQ(kernels(CpuIsa::avx512), "prompts avx512, prompts avx512, prompts avx512, all avx512, ");
  EXPECT_EQ(kernels(CpuIsa::avx512_bf16), "prompts avx512_bf16, prompts avx512, prompts avx512, all avx512, ");
  EXPECT_EQ(kernels(CpuIsa::amx_emulated), "prompts amx_emulated, prompts amx_emulated, prompts avx512, all avx512, ");
  EXPECT_EQ(kernels(CpuIsa::amx), "prompts amx, prompts amx, prompts avx512, all avx512, ");
}

// Root of mean squares of what results lack, as a share of what is expected.
struct RecurrentErrors {
  double out = 0, state = 0;
};
RecurrentErrors errors_of(const RecurrentSpec& spec, CpuIsa isa) {
  const RecurrentCaseInputs in = make_inputs({.name = "errors", .spec = spec, .requests = {{300, 5}}});
  DeviceInfo device = probe_cpu();
  device.isa = isa;
  const RecurrentRunResult result = run_case(*find_backend<RecurrentFamily>("cpu_avx512"), device, in, {});
  const RecurrentExpected expected = expect(in, 0);
  const auto share = [](const std::vector<double>& of, const auto& got) {
    double errors = 0, all = 0;
    for (size_t i = 0; i < of.size(); ++i) {
      if (std::isnan(of[i])) continue;
      const double error = got(i) - of[i];
      errors += error * error, all += of[i] * of[i];
    }
    return std::sqrt(errors / all);
  };
  return {share(expected.out, [&](size_t i) { return double(result.out[i]); }),
          share(expected.state, [&](size_t i) { return result.state.get(int64_t(i)); })};
}

// Tiles round what vdpbf16ps rounds and nothing else: factors that are no numbers of bf16 are sums of several. With decays of channels that
// is a state and what is written to it; without the delta rule no number of a state is rounded.
TEST(Recurrent, TilesAreAsExactAsVectors) {
  for (const CpuIsa isa : {CpuIsa::amx_emulated, CpuIsa::amx}) {
    if (!cpu_features().missing(isa).empty()) continue;
    for (const char* layer : {"gdn", "lightning", "mamba2", "kda", "kda_bounded"}) {
      RecurrentSpec spec = recurrent_layer(layer);
      spec.state_dtype = DType::f32;
      for (const bool delta : {spec.delta, false}) {
        spec.delta = delta, spec.sigmoid_beta = delta && spec.sigmoid_beta, spec.beta_scale = delta ? spec.beta_scale : 1;
        const RecurrentErrors tiles = errors_of(spec, isa), vectors = errors_of(spec, CpuIsa::avx512_bf16);
        constexpr double kRounded = 2e-3, kParts = 5e-6;
        const bool channels = spec.channel_gate;  // whose products are of floats in vectors
        EXPECT_LT(tiles.out, channels ? kRounded : 1.03 * vectors.out) << spec.str();
        EXPECT_LT(tiles.state, channels ? (delta ? kRounded : kParts) : 1.2 * vectors.state) << spec.str();
      }
    }
  }
}

// A value that is no number, or infinite, is seen in its own column from its token on and nowhere else: matrices of chunks, which have
// zeros for tokens to come, are not multiplied by it.
TEST(Recurrent, AnInfiniteValueDoesNotReachEarlierTokens) {
  constexpr int kToken = 20, kTokens = 70, kColumn = 3;
  for (const CpuIsa isa : {CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx_emulated, CpuIsa::amx}) {
    if (!cpu_features().missing(isa).empty()) continue;
    DeviceInfo device = probe_cpu();
    device.isa = isa;
    for (const char* layer : {"gdn", "mamba2", "kda"})
      for (const double value : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        const RecurrentSpec spec = recurrent_layer(layer);
        RecurrentCaseInputs in = make_inputs({.name = "infinite", .spec = spec, .requests = {{kTokens, 5}}});
        const auto run = [&] { return run_case(*find_backend<RecurrentFamily>("cpu_avx512"), device, in, {}).out; };
        const std::vector<float> clean = run();
        const int64_t values = spec.head_dim_v, row = spec.num_v_heads * values;
        in.v.set(kToken * row + kColumn, value);
        const std::vector<float> result = run();
        for (size_t i = 0; i < clean.size(); ++i) {
          const int64_t token = int64_t(i) / row, column = int64_t(i) % row;
          if (column == kColumn && token >= kToken) {
            ASSERT_FALSE(std::isfinite(result[i])) << layer << " on " << to_string(isa) << ", token " << token;
          } else if (column >= values) {
            ASSERT_EQ(result[i], clean[i]) << layer << " on " << to_string(isa) << ", token " << token << ", " << column;
          } else {
            ASSERT_NEAR(result[i], clean[i], 0.01 * (1 + std::abs(clean[i]))) << layer << " on " << to_string(isa) << ", token " << token;
          }
        }
      }
  }
}

TEST(Recurrent, WrongTensorsAreRefused) {
  RecurrentSpec spec = recurrent_layer("gdn");
  spec.num_drafts = 1;
  StateCaseRequests requests{{2, 3}, {3, 0}};
  RecurrentCaseInputs given = make_inputs({.name = "refused", .spec = spec, .requests = requests});
  HostTensor out = HostTensor::make(spec.dtype, {5, 4, 64}), state = HostTensor::make(spec.state_dtype, {2, 2, 4, 64, 64});
  const auto flat = [](const HostTensor& t) {
    TensorView view = t.view();
    return view.rank = 2, view.sizes[1] = view.sizes[2], view.strides[1] = 1, view;
  };
  for (const std::string name : {"cpu_generic", "reference"}) {
    const auto plan = find_backend<RecurrentFamily>(name)->plan(spec, probe_cpu(), {});
    std::vector<int32_t> starts{0, 2, 5}, lens{5, 3}, slots{1, 0};
    Batch batch;
    batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots;
    plan->update(batch, nullptr);
    const auto run = [&](auto change) {
      RecurrentInputs in{.q = given.q.view(),
                         .k = given.k.view(),
                         .v = given.v.view(),
                         .gate = flat(given.gate),
                         .beta = flat(given.beta),
                         .rates = given.rates.view(),
                         .gate_bias = given.gate_bias.view(),
                         .skip = {},
                         .state = state.view()};
      RecurrentOutputs to{.out = out.view()};
      change(in, to);
      return test::error_code([&] { plan->run(in, to, nullptr); });
    };
    EXPECT_EQ(run([](auto&, auto&) {}), "nothing thrown") << name;
    EXPECT_EQ(run([](auto& in, auto&) { in.q.sizes[0] = 4; }), "recurrent.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.v.sizes[1] = 2; }), "recurrent.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.gate.dtype = DType::f16; }), "recurrent.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.rates.dtype = DType::bf16; }), "recurrent.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.beta = {}; }), "recurrent.run.missing");
    EXPECT_EQ(run([](auto& in, auto&) { in.skip = in.rates; }), "recurrent.run.missing");
    EXPECT_EQ(run([](auto& in, auto&) { in.state.sizes[1] = 1; }), "recurrent.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.state.strides[3] = 128; }), "recurrent.run.state");
    EXPECT_EQ(run([](auto& in, auto&) { in.state.strides[0] = 64; }), "tensor.overlap");
    EXPECT_EQ(run([](auto&, auto& to) { to.out.dtype = DType::f32; }), "recurrent.run.tensor");
    std::vector<int32_t> twice{1, 1};
    Batch wrong = batch;
    wrong.state_slots = twice;
    EXPECT_EQ(test::error_code([&] { plan->update(wrong, nullptr); }), "batch.state.shared");
    EXPECT_EQ(run([](auto&, auto&) {}), "nothing thrown") << "the step before stays";
    std::vector<int32_t> sources{2, 0}, parents{0, 0, 0, 0, 0};
    wrong.state_slots = slots, wrong.draft_parents = parents;
    EXPECT_EQ(test::error_code([&] { plan->update(wrong, nullptr); }), "batch.draft_parents.unexpected");
    batch.source_slots = sources;  // a slot that the state lacks
    plan->update(batch, nullptr);
    EXPECT_EQ(run([](auto&, auto&) {}), "recurrent.run.tensor");
    batch.source_slots = {};
    slots = {1, std::numeric_limits<int32_t>::max()};  // no number of slots fits an int then
    plan->update(batch, nullptr);
    EXPECT_EQ(run([](auto&, auto&) {}), "recurrent.run.tensor");
  }
  const BackendOf<RecurrentFamily>& generic = *find_backend<RecurrentFamily>("cpu_generic");
  EXPECT_EQ(test::error_code([&] { generic.plan(spec, probe_cpu(), {.out_dtype = DType::f32}); }), "backend.out_dtype");
  EXPECT_EQ(test::error_code([&] { generic.plan(spec, describe_device("h200"), {}); }), "backend.unsupported");
}

TEST(Recurrent, WrongTensorsOfTheOutputStageAreRefused) {
  RecurrentSpec spec = recurrent_layer("gdn");
  spec.out_gate = OutputGate::silu, spec.out_norm = OutputNorm::before_gate;
  EXPECT_EQ(spec.str(), "recurrent q2 v4 k64 v64 softplus delta sigmoid_beta qk_norm out_silu norm_before_gate bf16 state f32 v_first");
  const RecurrentCaseInputs in = make_inputs({.name = "outputs", .spec = spec, .requests = {{3}}});
  const auto code = [&](const auto& change) {
    RecurrentCaseInputs given = in;
    change(given);
    return test::error_code([&] { run_case(*find_backend<RecurrentFamily>("cpu_generic"), probe_cpu(), given, {}); });
  };
  EXPECT_EQ(code([](auto&) {}), "nothing thrown");
  EXPECT_EQ(code([](auto& c) { c.z = {}; }), "recurrent.run.missing");
  EXPECT_EQ(code([](auto& c) { c.norm_weight = {}; }), "recurrent.run.missing");
  EXPECT_EQ(code([](auto& c) { c.spec.out_norm = OutputNorm::none; }), "recurrent.run.missing");
  EXPECT_EQ(code([](auto& c) { c.z = HostTensor::make(DType::f32, c.z.sizes); }), "recurrent.run.tensor");
  EXPECT_EQ(code([](auto& c) { c.norm_weight = HostTensor::make(DType::f16, {64}); }), "recurrent.run.tensor");
  EXPECT_EQ(code([](auto& c) { c.norm_weight = HostTensor::make(DType::f32, {65}); }), "recurrent.run.tensor");
  EXPECT_EQ(code([](auto& c) { c.norm_weight = HostTensor::make(DType::bf16, {64}); }), "nothing thrown");
}

TEST(Recurrent, WrongSpecsAreRefused) {
  const auto invalid = [](std::string_view layer, const auto& change) {
    RecurrentSpec spec = recurrent_layer(layer);
    change(spec);
    return test::error_code([&] { spec.validate(); });
  };
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.num_k_heads = 0; }), "recurrent.num_k_heads");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.num_v_heads = 3; }), "recurrent.num_v_heads");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.head_dim_k = 257; }), "recurrent.head_dim_k");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.head_dim_v = 0; }), "recurrent.head_dim_v");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.gate = RecurrentGate(9); }), "recurrent.gate");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.layout = StateLayout(2); }), "recurrent.layout");
  EXPECT_EQ(invalid("lightning", [](RecurrentSpec& s) { s.channel_gate = true; }), "recurrent.channel_gate");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.gate = RecurrentGate::log, s.channel_rates = true; }), "recurrent.channel_rates");
  EXPECT_EQ(invalid("mamba2", [](RecurrentSpec& s) { s.gate_min = 1, s.gate_max = 0.5f; }), "recurrent.gate_limits");
  EXPECT_EQ(invalid("kda_bounded", [](RecurrentSpec& s) { s.gate_min = 0; }), "recurrent.gate_limits");
  EXPECT_EQ(invalid("lightning", [](RecurrentSpec& s) { s.gate_min = -1; }), "recurrent.gate_limits");
  EXPECT_EQ(invalid("mamba2", [](RecurrentSpec& s) { s.beta_scale = 2; }), "recurrent.beta");
  EXPECT_EQ(invalid("kda_bounded", [](RecurrentSpec& s) { s.scaled_values = true; }), "recurrent.scaled_values");
  EXPECT_EQ(invalid("kda", [](RecurrentSpec& s) { s.scaled_values = true; }), "recurrent.scaled_values");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.scale = std::numeric_limits<float>::infinity(); }), "recurrent.scale");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.out_gate = OutputGate(3); }), "recurrent.out_gate");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.out_norm = OutputNorm(3); }), "recurrent.out_norm");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.out_norm = OutputNorm::after_gate; }), "recurrent.out_norm");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.out_norm = OutputNorm::before_gate, s.norm_groups = 3; }), "recurrent.norm_groups");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.out_norm = OutputNorm::before_gate, s.norm_groups = -1; }), "recurrent.norm_groups");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.norm_groups = 2; }), "recurrent.norm_groups");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.norm_eps = 0; }), "recurrent.norm_eps");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.dtype = DType::fp8_e4m3; }), "recurrent.dtype");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.state_dtype = DType::i32; }), "recurrent.state_dtype");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.num_drafts = 65; }), "recurrent.num_drafts");
  EXPECT_EQ(invalid("gdn", [](RecurrentSpec& s) { s.tree_drafts = true; }), "recurrent.tree_drafts");
  for (const char* layer : {"gdn", "kda", "kda_bounded", "lightning", "mamba2", "mamba1"})
    EXPECT_NO_THROW(recurrent_layer(layer).validate());
}

TEST(Recurrent, SelectionSaysWhatRunsAndWhy) {
  const RecurrentSpec spec = recurrent_layer("kda");
  EXPECT_EQ(spec.str(), "recurrent q2 v2 k64 v64 softplus channel_gate delta sigmoid_beta qk_norm bf16 state f32 v_first");
  EXPECT_EQ(spec.state_bytes(), 2 * 64 * 64 * 4);
  DeviceInfo device = probe_cpu();
  device.isa = CpuIsa::generic;
  const SelectionOf<RecurrentFamily> selection = select<RecurrentFamily>(spec, device);
  EXPECT_EQ(selection.backend->name(), "cpu_generic");
  EXPECT_NE(selection.str().find("device.isa"), std::string::npos) << selection.str();
  EXPECT_EQ(select<RecurrentFamily>(spec, device, {.forced = "reference"}).backend->name(), "reference");
}

// A field that the table of fields does not have would be lost on the way through the C ABI, Python and case files.
TEST(Recurrent, TheTableHasEveryFieldOnce) {
  EXPECT_EQ(test::rows_of_parts<RecurrentSpec>(), (std::map<std::string_view, int>{{"spec", test::num_fields<RecurrentSpec>()}}));
}

}  // namespace
}  // namespace imbrex

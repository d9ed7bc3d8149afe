// Backends of recurrent layers beside the modules of the transformers library: goldens/ holds what these handed to their recurrences and
// got back (make_goldens.py).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "conformance/safetensors.h"
#include "imbrex/recurrent.h"

namespace imbrex {
namespace {

struct Golden {
  const char* name;
  RecurrentSpec spec;
  OutputGate gate;  // of what the module does with outputs
  OutputNorm norm = OutputNorm::none;
  int groups = 0;
  float eps = 1e-6f;
  RecurrentSpec with_outputs() const {
    RecurrentSpec all = spec;
    return all.out_gate = gate, all.out_norm = norm, all.norm_groups = groups, all.norm_eps = eps, all;
  }
};

std::vector<Golden> goldens() {
  const RecurrentSpec gdn{.num_k_heads = 2,
                          .num_v_heads = 4,
                          .head_dim_k = 16,
                          .head_dim_v = 24,
                          .delta = true,
                          .sigmoid_beta = true,
                          .qk_norm = true,
                          .layout = StateLayout::k_first};
  RecurrentSpec kda = gdn;
  kda.num_k_heads = kda.num_v_heads = 3, kda.head_dim_v = 16, kda.channel_gate = true;
  RecurrentSpec mamba2{
      .num_k_heads = 2, .num_v_heads = 4, .head_dim_k = 16, .head_dim_v = 32, .scaled_values = true, .skip = true, .scale = 1};
  RecurrentSpec limited = mamba2;
  limited.gate_min = 0.3f, limited.gate_max = 1.5f;
  mamba2.gate_min = 0.001f;  // of NemotronHConfig, which has no upper limit
  RecurrentSpec mamba1 = mamba2;
  mamba1.num_k_heads = 1, mamba1.num_v_heads = 40, mamba1.head_dim_v = 1, mamba1.channel_rates = true, mamba1.gate_min = 0;
  const RecurrentSpec lightning{.num_k_heads = 4,
                                .num_v_heads = 4,
                                .head_dim_k = 16,
                                .head_dim_v = 16,
                                .gate = RecurrentGate::fixed,
                                .scale = 1,
                                .layout = StateLayout::k_first};
  RecurrentSpec jamba = mamba1;
  jamba.num_v_heads = 64, jamba.head_dim_k = 8;
  RecurrentSpec falcon_h1 = mamba2;
  falcon_h1.gate_min = 0;
  constexpr OutputNorm before = OutputNorm::before_gate, after = OutputNorm::after_gate;
  std::vector<Golden> all{{"qwen3_next", gdn, OutputGate::silu, before},
                          {"kimi_linear", kda, OutputGate::sigmoid, before, 0, 1e-5f},
                          {"mamba2", limited, OutputGate::silu, after, 2, 1e-5f},
                          {"nemotron_h", mamba2, OutputGate::silu, after, 2, 1e-5f},
                          {"falcon_mamba", mamba1, OutputGate::silu},
                          {"minimax", lightning, OutputGate::sigmoid, before, 1},
                          {"jamba", jamba, OutputGate::silu},
                          {"falcon_h1", falcon_h1, OutputGate::silu},
                          {"falcon_h1_norm", falcon_h1, OutputGate::silu, before, 2, 1e-5f}};
  for (Golden& golden : all) golden.spec.dtype = DType::f32;
  return all;
}

// The largest difference, as a share of the largest number.
double difference(const HostTensor& actual, const HostTensor& wanted) {
  double off = 0, largest = 0;
  for (int64_t i = 0; i < wanted.num_elements(); ++i) {
    off = std::max(off, std::abs(actual.get(i) - wanted.get(i)));
    largest = std::max(largest, std::abs(wanted.get(i)));
  }
  return off / largest;
}

class RecurrentGoldens : public testing::TestWithParam<Golden> {};

Safetensors load_golden(const char* name) { return load_safetensors(std::string(IMBREX_GOLDENS) + "/" + name + ".safetensors"); }

void expect_golden(const char* name, const RecurrentSpec& spec) {
  Safetensors file = load_golden(name);
  const bool finished = spec.has_output_stage(), convolved = spec.conv != RecurrentConv::none;
  const int tokens = int(file.tensors.at("q").sizes[0]), heads = spec.num_v_heads;
  const auto view = [&](const char* tensor) { return file.tensors.contains(tensor) ? file.tensors.at(tensor).view() : TensorView{}; };
  for (const BackendOf<RecurrentFamily>* backend : backends<RecurrentFamily>()) {
    if (!backend->unsupported(spec, probe_cpu()).empty()) continue;
    for (const int first : {tokens, 20, 1}) {
      const auto plan = backend->plan(spec, probe_cpu(), {});
      const bool k_first = spec.layout == StateLayout::k_first;
      HostTensor out = HostTensor::make(DType::f32, {tokens, heads, spec.head_dim_v}),
                 state = HostTensor::make(
                     DType::f32, {1, 1, heads, k_first ? spec.head_dim_k : spec.head_dim_v, k_first ? spec.head_dim_v : spec.head_dim_k}),
                 conv_state = HostTensor::make(DType::f32, {1, spec.conv_state_rows(), spec.conv_channels()});
      for (int begin = 0; begin < tokens; begin = std::min(begin + first, tokens)) {
        const int end = begin == 0 ? first : std::min(begin + first, tokens);
        std::vector<int32_t> starts{0, end - begin}, lens{end}, slots{0};
        Batch batch;
        batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots;
        plan->update(batch);
        const auto rest = [&](TensorView t) {
          if (!t.empty()) t.data = static_cast<char*>(t.data) + begin * t.stride(0) * size_of(t.dtype), t.sizes[0] -= begin;
          return t;
        };
        const auto unless_convolved = [&](const char* tensor) { return convolved ? TensorView{} : rest(view(tensor)); };
        const auto if_convolved = [&](const TensorView& t) { return convolved ? t : TensorView{}; };
        plan->run({.q = unless_convolved("q"),
                   .k = unless_convolved("k"),
                   .v = unless_convolved("v"),
                   .gate = rest(view("gate")),
                   .beta = rest(view("beta")),
                   .rates = view("rates"),
                   .gate_bias = view("gate_bias"),
                   .skip = view("skip"),
                   .state = state.view(),
                   .z = finished ? rest(view("z")) : TensorView{},
                   .norm_weight = spec.out_norm != OutputNorm::none ? view("norm_weight") : TensorView{},
                   .input = if_convolved(rest(view("input"))),
                   .conv_weight = if_convolved(view("conv_weight")),
                   .conv_bias = if_convolved(view("conv_bias")),
                   .conv_state = if_convolved(conv_state.view())},
                  {.out = rest(out.view())});
      }
      // The modules compute in chunks, in floats.
      EXPECT_LE(difference(out, file.tensors.at(finished ? "finished" : "out")), 1e-5) << backend->name() << ", first step of " << first;
      EXPECT_LE(difference(state, file.tensors.at("state")), 1e-5) << backend->name() << ", first step of " << first;
    }
  }
}

TEST_P(RecurrentGoldens, AreReproducedInOneStepAndInTwo) { expect_golden(GetParam().name, GetParam().spec); }

// With the module's norm and gate in the same call.
TEST_P(RecurrentGoldens, SoAreNormsAndGatesOfOutputs) { expect_golden(GetParam().name, GetParam().with_outputs()); }

// And from what the module convolves, where the file has that.
TEST(RecurrentGoldensOfAll, SoAreConvolutionsInFront) {
  int files = 0;
  for (const Golden& golden : goldens()) {
    if (!load_golden(golden.name).tensors.contains("input")) continue;
    RecurrentSpec spec = golden.with_outputs();
    spec.conv = RecurrentConv::vkq, spec.conv_bias = true;
    expect_golden(golden.name, spec);
    ++files;
  }
  EXPECT_EQ(files, 2);
}

INSTANTIATE_TEST_SUITE_P(All, RecurrentGoldens, testing::ValuesIn(goldens()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace imbrex

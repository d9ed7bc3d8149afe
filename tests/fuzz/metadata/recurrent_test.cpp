// Wrong metadata through the plans of recurrent layers, as plans_test.cpp has it for attention: on every CPU backend.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "api/structs.h"
#include "fuzz/metadata/state_problem.h"

namespace imbrex::test {
namespace {

constexpr int kRecurrentCases = 1200;

struct RecurrentProblem : StateProblem {
  Struct<imbrex_recurrent_fields> spec;
  Struct<imbrex_recurrent_inputs> inputs;
  Argument q, k, v, gate, beta, rates, gate_bias, skip, state, z, norm_weight, input, conv_weight, conv_bias, conv_state, out;
  Struct<imbrex_recurrent_outputs> outputs;

  static constexpr Argument RecurrentProblem::*kArguments[] = {
      &RecurrentProblem::q,           &RecurrentProblem::k,         &RecurrentProblem::v,           &RecurrentProblem::gate,
      &RecurrentProblem::beta,        &RecurrentProblem::rates,     &RecurrentProblem::gate_bias,   &RecurrentProblem::skip,
      &RecurrentProblem::state,       &RecurrentProblem::z,         &RecurrentProblem::norm_weight, &RecurrentProblem::input,
      &RecurrentProblem::conv_weight, &RecurrentProblem::conv_bias, &RecurrentProblem::conv_state,  &RecurrentProblem::out};
  static constexpr const char* kNames[] = {"q",     "k", "v",           "gate",  "beta",        "rates",     "gate_bias",  "skip",
                                           "state", "z", "norm_weight", "input", "conv_weight", "conv_bias", "conv_state", "out"};

  void make_memory() {
    for (const auto argument : kArguments)
      if ((this->*argument).given) (this->*argument).make();
  }
  imbrex_status run(imbrex_plan* plan) {
    imbrex_recurrent_inputs& in = inputs.value;
    in.q = q.tensor(), in.k = k.tensor(), in.v = v.tensor(), in.gate = gate.tensor(), in.beta = beta.tensor();
    in.rates = rates.tensor(), in.gate_bias = gate_bias.tensor(), in.skip = skip.tensor(), in.state = state.tensor();
    in.z = z.tensor(), in.norm_weight = norm_weight.tensor();
    in.input = input.tensor(), in.conv_weight = conv_weight.tensor(), in.conv_bias = conv_bias.tensor();
    in.conv_state = conv_state.tensor();
    outputs.value.out = out.tensor();
    return imbrex_plan_run_recurrent(plan, inputs.make(), outputs.make(), nullptr);
  }
  std::vector<unsigned char> written() const {
    std::vector<unsigned char> all;
    append_written(out, all), append_written(state, all);
    if (conv_state.given) append_written(conv_state, all);
    return all;
  }
};

PlanHandle recurrent_plan_of(RecurrentProblem& p, const StateTarget& target) {
  return state_plan_of(p, target, [&](auto** to) { return imbrex_spec_create_recurrent(p.spec.make(), to); });
}

RecurrentProblem right_recurrent(const StateTarget& target, Random& random) {
  RecurrentProblem p;
  p.spec.value = init(imbrex_recurrent_fields_init);
  p.inputs.value = init(imbrex_recurrent_inputs_init);
  p.outputs.value = init(imbrex_recurrent_outputs_init);
  imbrex_recurrent_fields& f = p.spec.value;
  const auto flag = [&] { return int32_t(random.one_in(2)); };
  f.num_k_heads = int32_t(random.between(1, 2)), f.num_v_heads = f.num_k_heads * int32_t(random.between(1, 3));
  f.head_dim_k = int32_t(random.between(1, 20)), f.head_dim_v = random.one_in(4) ? 1 : int32_t(random.between(1, 40));
  f.gate = int32_t(random.between(0, 3));
  if (f.gate == IMBREX_GATE_SIGMOID) f.gate_min = -5;
  f.channel_gate = f.gate != IMBREX_GATE_FIXED && flag(), f.channel_rates = f.gate != IMBREX_GATE_LOG && flag();
  f.delta = flag(), f.sigmoid_beta = f.delta && flag(), f.skip = flag(), f.qk_norm = flag();
  f.scaled_values = f.gate == IMBREX_GATE_SOFTPLUS && !f.channel_gate && flag();
  f.dtype = IMBREX_F32, f.layout = flag(), f.num_drafts = int32_t(random.between(0, 3));
  f.out_gate = int32_t(random.between(0, 2)), f.out_norm = int32_t(random.between(0, f.out_gate == IMBREX_OUT_GATE_NONE ? 1 : 2));
  if (f.out_norm != IMBREX_OUT_NORM_NONE) f.norm_groups = random.one_in(2) ? 0 : random.one_in(2) ? 1 : f.num_v_heads;
  if (random.one_in(3)) {
    f.conv = int32_t(random.between(IMBREX_CONV_QKV, IMBREX_CONV_VKQ)), f.conv_width = int32_t(random.between(2, 5));
    f.conv_bias = flag(), f.conv_silu = flag();
  }
  f.tree_drafts = f.num_drafts > 0 && random.one_in(2);
  p.make_step(f.num_drafts, f.tree_drafts != 0, random);
  const auto set = [&](Argument& a, std::vector<int64_t> shape) { set_random(a, kFloat, std::move(shape), target, random); };
  const int64_t tokens = std::max<int64_t>(p.num_tokens() + random.between(0, 2), 1), heads = f.num_v_heads, dim_k = f.head_dim_k,
                dim_v = f.head_dim_v;
  const auto of_heads = [&](bool of_channels, std::vector<int64_t> shape) {
    shape.push_back(heads);
    if (of_channels) shape.push_back(dim_k);
    return shape;
  };
  if (f.conv == IMBREX_CONV_NONE) {
    set(p.q, {tokens, f.num_k_heads, dim_k}), set(p.k, {tokens, f.num_k_heads, dim_k}), set(p.v, {tokens, heads, dim_v});
  } else {
    const int64_t channels = 2 * f.num_k_heads * dim_k + heads * dim_v;
    set(p.input, {tokens, channels}), set(p.conv_weight, {channels, f.conv_width});
    if (f.conv_bias != 0) set(p.conv_bias, {channels});
    const int64_t rows = f.tree_drafts ? (f.conv_width - 1) * (1 + f.num_drafts) : f.conv_width - 1 + f.num_drafts;
    set(p.conv_state, {StateProblem::kStateSlots, rows, channels});
  }
  if (f.gate != IMBREX_GATE_FIXED) set(p.gate, of_heads(f.channel_gate != 0, {tokens}));
  if (f.delta) set(p.beta, {tokens, heads});
  if (f.gate != IMBREX_GATE_LOG) set(p.rates, of_heads(f.channel_rates != 0, {}));
  if (f.gate >= IMBREX_GATE_SOFTPLUS && random.one_in(2)) set(p.gate_bias, of_heads(f.channel_gate != 0, {}));
  if (f.skip) set(p.skip, {heads});
  const bool k_first = f.layout == IMBREX_STATE_K_FIRST;
  set(p.state, {StateProblem::kStateSlots, 1 + f.num_drafts, heads, k_first ? dim_k : dim_v, k_first ? dim_v : dim_k});
  if (f.out_gate != IMBREX_OUT_GATE_NONE) set(p.z, {tokens, heads, dim_v});
  if (f.out_norm != IMBREX_OUT_NORM_NONE)
    set(p.norm_weight, random.one_in(2) ? std::vector<int64_t>{dim_v} : std::vector<int64_t>{heads, dim_v});
  set(p.out, {tokens, heads, dim_v});
  return p;
}

std::string break_recurrent(BrokenState<RecurrentProblem>& b, const StateTarget&, Random& random) {
  RecurrentProblem& p = b.problem;
  switch (random.between(0, 9)) {
    case 0: {
      b.new_plan = true;
      imbrex_recurrent_fields& f = p.spec.value;
      if (random.one_in(4)) {
        float* const numbers[] = {&f.gate_min, &f.gate_max, &f.beta_scale, &f.scale, &f.norm_eps};
        constexpr float kWrong[] = {-1.f, 0.f, 1e-30f, 3e38f, INFINITY, -INFINITY, NAN};
        float& number = *random.pick(numbers);
        number = random.pick(kWrong);
        return fmt::format("a number of the spec = {}", number);
      }
      int32_t* const fields[] = {&f.num_k_heads,   &f.num_v_heads, &f.head_dim_k,   &f.head_dim_v,    &f.gate,      &f.channel_gate,
                                 &f.channel_rates, &f.delta,       &f.sigmoid_beta, &f.scaled_values, &f.qk_norm,   &f.skip,
                                 &f.dtype,         &f.state_dtype, &f.layout,       &f.num_drafts,    &f.out_gate,  &f.out_norm,
                                 &f.norm_groups,   &f.conv,        &f.conv_width,   &f.conv_bias,     &f.conv_silu, &f.tree_drafts};
      int32_t& field = *random.pick(fields);
      field = wrong_int(random, field);
      return fmt::format("a field of the spec = {}", field);
    }
    case 1: b.new_plan = true; return break_limits(p.options.value, random);
    case 2:
      switch (random.between(0, 2)) {
        case 0: return break_size("batch", p.batch, random);
        case 1: return break_size("inputs", p.inputs, random);
        default: return break_size("outputs", p.outputs, random);
      }
    case 3: return break_requests(p, random);
    case 4:
    case 5: return break_list(p, random);
    case 6: return break_calls(p, random);
    default: {
      const size_t which = size_t(random.between(0, int64_t(std::size(RecurrentProblem::kArguments)) - 1));
      Argument& a = p.*RecurrentProblem::kArguments[which];
      std::string change;
      if (!a.given) return a = p.out, fmt::format("{} is given", RecurrentProblem::kNames[which]);
      if (!break_argument(a, random, change)) return "";
      return fmt::format("{}: {}", RecurrentProblem::kNames[which], change);
    }
  }
}

TEST(Metadata, WrongRecurrentLayersGetAnErrorOrAResult) {
  static const imbrex_device cpu{probe_cpu(), "cpu"};
  std::vector<StateTarget> targets{{"reference", &cpu, false}, {"cpu_generic", &cpu, false}};
  const RecurrentSpec small{.num_k_heads = 1, .num_v_heads = 1, .head_dim_k = 8, .head_dim_v = 8};
  if (find_backend<RecurrentFamily>("cpu_avx512")->unsupported(small, cpu.info).empty()) targets.push_back({"cpu_avx512", &cpu, false});
  for_each_case(kRecurrentCases, [&](int number, bool verbose) {
    const StateTarget& target = targets[size_t(number) % targets.size()];
    SCOPED_TRACE(target.backend);
    Random random{uint64_t(number) + 99000};
    run_state_case(right_recurrent(target, random), target, random, verbose, recurrent_plan_of, break_recurrent);
  });
}

}  // namespace
}  // namespace imbrex::test

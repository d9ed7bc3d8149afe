// Wrong metadata through the plans of the short convolution, as plans_test.cpp has it for attention: on every CPU backend, and on the fake
// driver, where kernels do nothing.
#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "cuda/fake/short_conv_texts.h"
#include "fuzz/metadata/state_problem.h"

namespace imbrex::test {
namespace {

constexpr int kConvCases = 1200;

struct ConvProblem : StateProblem {
  Struct<imbrex_short_conv_fields> spec;
  Struct<imbrex_short_conv_inputs> inputs;
  Argument bcx, weight, bias, state, out;
  Struct<imbrex_short_conv_outputs> outputs;

  static constexpr Argument ConvProblem::*kArguments[] = {&ConvProblem::bcx, &ConvProblem::weight, &ConvProblem::bias, &ConvProblem::state,
                                                          &ConvProblem::out};
  static constexpr const char* kNames[] = {"bcx", "weight", "bias", "state", "out"};

  void make_memory() {
    for (const auto argument : kArguments)
      if ((this->*argument).given) (this->*argument).make();
  }
  imbrex_status run(imbrex_plan* plan) {
    imbrex_short_conv_inputs& in = inputs.value;
    in.bcx = bcx.tensor(), in.weight = weight.tensor(), in.bias = bias.tensor(), in.state = state.tensor();
    outputs.value.out = out.tensor();
    return imbrex_plan_run_short_conv(plan, inputs.make(), outputs.make(), nullptr);
  }
  std::vector<unsigned char> written() const {
    std::vector<unsigned char> all;
    append_written(out, all), append_written(state, all);
    return all;
  }
};

PlanHandle conv_plan_of(ConvProblem& p, const StateTarget& target) {
  return state_plan_of(p, target, [&](auto** to) { return imbrex_spec_create_short_conv(p.spec.make(), to); });
}

ConvProblem right_conv(const StateTarget& target, Random& random) {
  ConvProblem p;
  p.spec.value = init(imbrex_short_conv_fields_init);
  p.inputs.value = init(imbrex_short_conv_inputs_init);
  p.outputs.value = init(imbrex_short_conv_outputs_init);
  imbrex_short_conv_fields& f = p.spec.value;
  f.dim = int32_t(random.between(1, 70)), f.width = target.cuda ? 3 : int32_t(random.between(2, 8));
  f.bias = !target.cuda && random.one_in(2), f.dtype = target.cuda ? IMBREX_BF16 : IMBREX_F32, f.num_drafts = int32_t(random.between(0, 3));
  if (!target.cuda && random.one_in(2))
    f.form = IMBREX_CONV_PLAIN, f.activation = random.one_in(2) ? IMBREX_CONV_SILU : IMBREX_CONV_NO_ACTIVATION;
  f.tree_drafts = !target.cuda && f.num_drafts > 0 && random.one_in(2);
  p.make_step(f.num_drafts, f.tree_drafts != 0, random);
  const imbrex_dl_type type = target.cuda ? imbrex_dl_type{4, 16, 1} : kFloat;
  const auto set = [&](Argument& a, std::vector<int64_t> shape) { set_random(a, type, std::move(shape), target, random); };
  const int64_t tokens = std::max<int64_t>(p.num_tokens() + random.between(0, 2), 1), dim = f.dim;
  set(p.bcx, {tokens, (f.form == IMBREX_CONV_GATED ? 3 : 1) * dim}), set(p.weight, {dim, f.width});
  set(p.state, {StateProblem::kStateSlots, f.tree_drafts != 0 ? (f.width - 1) * (1 + f.num_drafts) : f.width - 1 + f.num_drafts, dim});
  if (f.bias) set(p.bias, {dim});
  set(p.out, {tokens, dim});
  return p;
}

std::string break_conv(BrokenState<ConvProblem>& b, const StateTarget& target, Random& random) {
  ConvProblem& p = b.problem;
  switch (random.between(0, 9)) {
    case 0: {
      if (target.cuda) return "";  // other kernels than those that are there
      b.new_plan = true;
      imbrex_short_conv_fields& f = p.spec.value;
      int32_t* const fields[] = {&f.dim, &f.width, &f.bias, &f.dtype, &f.num_drafts, &f.form, &f.activation, &f.tree_drafts};
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
    case 5:
    case 6: return break_list(p, random);
    case 7: return break_calls(p, random);
    default: {
      const size_t which = size_t(random.between(0, 4));
      Argument& a = p.*ConvProblem::kArguments[which];
      std::string change;
      if (!a.given) return a = p.weight, fmt::format("{} is given", ConvProblem::kNames[which]);
      if (!break_argument(a, random, change)) return "";
      return fmt::format("{}: {}", ConvProblem::kNames[which], change);
    }
  }
}

TEST(Metadata, WrongShortConvolutionsGetAnErrorOrAResult) {
  static const imbrex_device cpu{probe_cpu(), "cpu"}, gpu{probe_cuda().at(0), "cuda:0"};
  const auto kernels = std::pair(cuda::fake::state().on_launch, cuda::fake::state().param_sizes);  // of other tests
  cuda::fake::state().on_launch = nullptr;
  cuda::fake::use_short_conv_text(short_conv_variants()[0]);
  std::vector<StateTarget> targets{{"reference", &cpu, false}, {"cpu_generic", &cpu, false}, {"cuda_sm80", &gpu, true}};
  if (find_backend<ShortConvFamily>("cpu_avx512")->unsupported({.dim = 8}, cpu.info).empty())
    targets.push_back({"cpu_avx512", &cpu, false});
  for_each_case(kConvCases, [&](int number, bool verbose) {
    const StateTarget& target = targets[size_t(number) % targets.size()];
    SCOPED_TRACE(target.backend);
    Random random{uint64_t(number) + 77000};
    run_state_case(right_conv(target, random), target, random, verbose, conv_plan_of, break_conv);
  });
  std::tie(cuda::fake::state().on_launch, cuda::fake::state().param_sizes) = kernels;
}

}  // namespace
}  // namespace imbrex::test

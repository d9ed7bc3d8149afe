// Wrong metadata through the plans of the short convolution, as plans_test.cpp has it for attention: on every CPU backend, and on the fake
// driver, where kernels do nothing.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "cuda/fake/short_conv_texts.h"
#include "fuzz/metadata/breakage.h"
#include "fuzz/metadata/cases.h"

namespace imbrex::test {
namespace {

constexpr int kConvCases = 1200;

struct ConvProblem {
  Struct<imbrex_short_conv_fields> spec;
  Struct<imbrex_plan_options> options;
  Struct<imbrex_batch> batch;
  Numbers starts, lens, slots, drafts, accepted;
  Struct<imbrex_short_conv_inputs> inputs;
  Argument bcx, weight, bias, state, out;
  Struct<imbrex_short_conv_outputs> outputs;
  bool update_first = true;
  int runs = 1;

  static constexpr Argument ConvProblem::*kArguments[] = {&ConvProblem::bcx, &ConvProblem::weight, &ConvProblem::bias, &ConvProblem::state,
                                                          &ConvProblem::out};
  static constexpr const char* kNames[] = {"bcx", "weight", "bias", "state", "out"};
  static constexpr Numbers ConvProblem::*kLists[] = {&ConvProblem::starts, &ConvProblem::lens, &ConvProblem::slots, &ConvProblem::drafts,
                                                     &ConvProblem::accepted};

  void make_memory() {
    for (const auto argument : kArguments)
      if ((this->*argument).given) (this->*argument).make();
  }
  imbrex_status update(imbrex_plan* plan) {
    imbrex_batch& b = batch.value;
    b.query_start_loc = starts.make(), b.seq_lens = lens.make(), b.state_slots = slots.make();
    b.num_drafts = drafts.make(), b.accepted_drafts = accepted.make();
    return imbrex_plan_update(plan, batch.make(), nullptr);
  }
  imbrex_status run(imbrex_plan* plan) {
    imbrex_short_conv_inputs& in = inputs.value;
    in.bcx = bcx.tensor(), in.weight = weight.tensor(), in.bias = bias.tensor(), in.state = state.tensor();
    outputs.value.out = out.tensor();
    return imbrex_plan_run_short_conv(plan, inputs.make(), outputs.make(), nullptr);
  }
  std::vector<unsigned char> written() const {
    std::vector<unsigned char> all = out.given ? out.elements() : std::vector<unsigned char>(), of_state;
    if (state.given) of_state = state.elements();
    all.insert(all.end(), of_state.begin(), of_state.end());
    return all;
  }
};

struct ConvTarget {
  const char* backend;
  const imbrex_device* device;
  bool cuda;
};

PlanHandle plan_of(ConvProblem& p, const ConvTarget& target) {
  const SpecHandle spec = make_handle<SpecHandle>([&](auto** to) { return imbrex_spec_create_short_conv(p.spec.make(), to); });
  const SelectionHandle selection = spec == nullptr ? nullptr : select_for(spec.get(), target.device, target.backend);
  if (selection == nullptr) return nullptr;
  return make_handle<PlanHandle>([&](auto** to) { return imbrex_plan_create(selection.get(), p.options.make(), to); });
}

ConvProblem right_problem(const ConvTarget& target, Random& random) {
  ConvProblem p;
  p.spec.value = init(imbrex_short_conv_fields_init);
  p.options.value = init(imbrex_plan_options_init);
  p.batch.value = init(imbrex_batch_init);
  p.inputs.value = init(imbrex_short_conv_inputs_init);
  p.outputs.value = init(imbrex_short_conv_outputs_init);
  imbrex_short_conv_fields& f = p.spec.value;
  f.dim = int32_t(random.between(1, 70)), f.width = target.cuda ? 3 : int32_t(random.between(2, 8));
  f.bias = !target.cuda && random.one_in(2), f.dtype = target.cuda ? IMBREX_BF16 : IMBREX_F32, f.num_drafts = int32_t(random.between(0, 3));
  if (!target.cuda && random.one_in(2))
    f.form = IMBREX_CONV_PLAIN, f.activation = random.one_in(2) ? IMBREX_CONV_SILU : IMBREX_CONV_NO_ACTIVATION;
  p.options.value.max_num_reqs = 6, p.options.value.max_num_tokens = 64, p.options.value.max_seq_len = 1000;
  const int reqs = int(random.between(1, 5));
  std::vector<int32_t> order(8);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[size_t(random.between(0, int64_t(i) - 1))]);
  p.starts.values = {0};
  for (int r = 0; r < reqs; ++r) {
    const int q_len = int(random.between(0, 6)), past = random.one_in(2) ? 0 : int(random.between(1, 90));
    p.starts.values.push_back(p.starts.values.back() + q_len), p.lens.values.push_back(past + q_len);
    p.slots.values.push_back(order[size_t(r)]);
    p.drafts.values.push_back(int32_t(random.between(0, std::min(q_len, f.num_drafts))));
    p.accepted.values.push_back(past > 0 ? int32_t(random.between(0, f.num_drafts)) : 0);
  }
  p.drafts.given = p.accepted.given = f.num_drafts > 0;
  p.batch.value.num_reqs = reqs;
  const imbrex_dl_type type = target.cuda ? imbrex_dl_type{4, 16, 1} : kFloat;
  const auto set = [&](Argument& a, std::vector<int64_t> shape) {
    int64_t bytes = type.bits / 8;
    for (const int64_t n : shape) bytes *= n;
    std::vector<unsigned char> content(static_cast<size_t>(bytes), 0x3f);
    for (size_t i = 0; i < content.size(); i += size_t(type.bits / 8)) content[i] = (unsigned char)(random.between(0, 255));
    a.set(type, std::move(shape), std::move(content));
    if (target.cuda) a.device = {2, 0};
  };
  const int64_t tokens = p.starts.values.back() + random.between(0, 2), dim = f.dim;
  set(p.bcx, {std::max<int64_t>(tokens, 1), (f.form == IMBREX_CONV_GATED ? 3 : 1) * dim}), set(p.weight, {dim, f.width}),
      set(p.state, {8, f.width - 1 + f.num_drafts, dim});
  if (f.bias) set(p.bias, {dim});
  set(p.out, {std::max<int64_t>(tokens, 1), dim});
  return p;
}

struct ConvBroken {
  ConvProblem problem;
  std::string what;
  bool new_plan = false;
};

std::string break_once(ConvBroken& b, const ConvTarget& target, Random& random) {
  ConvProblem& p = b.problem;
  switch (random.between(0, 9)) {
    case 0: {
      if (target.cuda) return "";  // other kernels than those that are there
      b.new_plan = true;
      imbrex_short_conv_fields& f = p.spec.value;
      int32_t* const fields[] = {&f.dim, &f.width, &f.bias, &f.dtype, &f.num_drafts, &f.form, &f.activation};
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
    case 3: {
      const int32_t reqs = p.batch.value.num_reqs =
          random.one_in(3) ? wrong_int(random, p.batch.value.num_reqs) % 400 : p.batch.value.num_reqs + int32_t(random.between(-1, 1));
      for (const auto list : ConvProblem::kLists)  // as long as their number says
        (p.*list).values.resize(size_t(std::clamp(reqs, 0, 400) + (list == &ConvProblem::starts)), (p.*list).values.empty() ? 0 : 1);
      return fmt::format("num_reqs = {}", reqs);
    }
    case 4:
    case 5:
    case 6: {
      const size_t which = size_t(random.between(0, 4));
      Numbers& list = p.*ConvProblem::kLists[which];
      if (random.one_in(8)) return list.given = !list.given, fmt::format("list {} is {}", which, list.given ? "given" : "NULL");
      if (list.values.empty()) return "";
      int32_t& number = list.values[size_t(random.between(0, int64_t(list.values.size()) - 1))];
      number = wrong_int(random, number);
      return fmt::format("list {} has {}", which, number);
    }
    case 7:
      return p.update_first = random.one_in(2), p.runs = int(random.between(0, 3)),
             fmt::format("update {}, {} runs", p.update_first, p.runs);
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

// The calls of a broken problem. What fails has changed nothing. True: the plan has taken the batch.
bool call_broken(ConvProblem& p, imbrex_plan* plan, bool verbose) {
  bool taken = false;
  for (int call = p.update_first ? -1 : 0; call < p.runs; ++call) {
    const auto before = p.written();
    const imbrex_status status = call < 0 ? p.update(plan) : p.run(plan);
    if (verbose) std::printf("%s: %s\n", call < 0 ? "update" : "run", status == IMBREX_OK ? "done" : imbrex_last_error());
    if (status == IMBREX_OK) {
      taken = taken || call < 0;
      continue;
    }
    expect_explained(status, call < 0 ? "update" : "run");
    EXPECT_TRUE(p.written() == before) << "a call failed, but has written";
  }
  EXPECT_STRNE(imbrex_plan_str(plan), "");
  return taken;
}

void run_case(const ConvTarget& target, int number, bool verbose) {
  Random random{uint64_t(number) + 77000};
  ConvProblem right = right_problem(target, random);
  const PlanHandle plan = plan_of(right, target);
  ASSERT_NE(plan, nullptr) << imbrex_last_error();
  const auto results = [&](bool update) {
    right.make_memory();
    if (update) {
      EXPECT_EQ(right.update(plan.get()), IMBREX_OK) << imbrex_last_error();
    }
    EXPECT_EQ(right.run(plan.get()), IMBREX_OK) << imbrex_last_error();
    return right.written();
  };
  const auto expected = results(true);
  ConvBroken broken{right, {}};
  for (int64_t left = random.between(1, 3); left > 0;)
    if (const std::string what = break_once(broken, target, random); !what.empty()) broken.what += what + "; ", --left;
  SCOPED_TRACE(broken.what);
  if (verbose) std::printf("%s\n  broken: %s\n", target.backend, broken.what.c_str());
  broken.problem.make_memory();
  if (broken.new_plan) {
    const PlanHandle other = plan_of(broken.problem, target);
    if (other == nullptr) {
      expect_explained(IMBREX_INVALID, "plan");
    } else {
      call_broken(broken.problem, other.get(), verbose);
    }
  } else if (!call_broken(broken.problem, plan.get(), verbose)) {
    EXPECT_TRUE(results(false) == expected) << "after calls that have failed";
  }
  EXPECT_TRUE(results(true) == expected) << "after calls with mistakes";
}

TEST(Metadata, WrongShortConvolutionsGetAnErrorOrAResult) {
  static const imbrex_device cpu{probe_cpu(), "cpu"}, gpu{probe_cuda().at(0), "cuda:0"};
  const auto kernels = std::pair(cuda::fake::state().on_launch, cuda::fake::state().param_sizes);  // of other tests
  cuda::fake::state().on_launch = nullptr;
  cuda::fake::use_short_conv_text(short_conv_variants()[0]);
  std::vector<ConvTarget> targets{{"reference", &cpu, false}, {"cpu_generic", &cpu, false}, {"cuda_sm80", &gpu, true}};
  if (find_backend<ShortConvFamily>("cpu_avx512")->unsupported({.dim = 8}, cpu.info).empty())
    targets.push_back({"cpu_avx512", &cpu, false});
  for_each_case(kConvCases, [&](int number, bool verbose) {
    const ConvTarget& target = targets[size_t(number) % targets.size()];
    SCOPED_TRACE(target.backend);
    run_case(target, number, verbose);
  });
  std::tie(cuda::fake::state().on_launch, cuda::fake::state().param_sizes) = kernels;
}

}  // namespace
}  // namespace imbrex::test

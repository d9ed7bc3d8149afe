#pragma once
// Random steps of recurrent layers through a plan for GPUs and through the reference, side by side: on a GPU, and on the fake driver with
// the kernels' texts as host code.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/state_problem.h"
#include "imbrex/recurrent.h"

namespace imbrex::cuda::test {

struct RecurrentProblem {
  RecurrentSpec spec;
  PlanLimits limits{.max_num_reqs = 12, .max_num_tokens = 60, .max_seq_len = 1 << 20};
  int64_t gap = 0, shift = 0;  // elements, as in Twin, of all tensors with tokens and of states
  bool float_gates = true;     // gate and beta are f32, else of the spec's type
  bool gate_bias = true;       // where the spec's gate has one
  int longest = 30;            // tokens of a request in a step
  int steps = 8;
  bool on_device = false;  // update_on_device()
  bool graph = false;      // one captured graph, replayed
  unsigned seed = 1;

  SlotProblem requests() const {
    return {.limits = limits,
            .longest = longest,
            .num_drafts = spec.num_drafts,
            .trees = spec.tree_drafts,
            .sources = seed % 3 == 1,
            .seed = seed};
  }
};

// After each step the reference goes on with the plan's states: what two roundings to a state's type make of one number would grow.
class RecurrentBesideReference {
 public:
  static constexpr int kSlots = 17;

  RecurrentBesideReference(const BackendOf<RecurrentFamily>& backend, const DeviceInfo& device, const RecurrentProblem& problem)
      : p_(problem),
        spec_(p_.spec),
        stream_(open_stream(device)),
        random_(problem.seed + 1),
        requests_(problem.requests(), kSlots),
        reference_(find_backend<RecurrentFamily>("reference")->plan(spec_, probe_cpu(), {.limits = problem.limits})),
        plan_(backend.plan(spec_, device, {.limits = problem.limits, .on_device = problem.on_device})),
        q_(rows(spec_.dtype, {spec_.num_k_heads, spec_.head_dim_k})),
        k_(rows(spec_.dtype, {spec_.num_k_heads, spec_.head_dim_k})),
        v_(rows(spec_.dtype, {spec_.num_v_heads, spec_.head_dim_v})),
        gate_(rows(gate_type(), spec_.channel_gate ? std::vector<int64_t>{spec_.num_v_heads, spec_.head_dim_k}
                                                   : std::vector<int64_t>{spec_.num_v_heads})),
        beta_(rows(gate_type(), {spec_.num_v_heads})),
        out_(rows(spec_.dtype, {spec_.num_v_heads, spec_.head_dim_v})),
        z_(rows(spec_.dtype, {spec_.num_v_heads, spec_.head_dim_v})),
        rates_(parameters(spec_.channel_rates)),
        bias_(parameters(spec_.channel_gate)),
        skip_(parameters(false)),
        weight_(*stream_, gate_type(), {spec_.num_v_heads, spec_.head_dim_v}, problem.gap),
        state_(*stream_, spec_.state_dtype, {kSlots, spec_.state_rows(), spec_.num_v_heads, int64_t(spec_.head_dim_k) * spec_.head_dim_v},
               problem.gap, problem.shift),
        lists_(*stream_, problem.limits.max_num_reqs, problem.limits.max_num_tokens) {
    bias_.fill([&] { return 0.5f * number(); });
    skip_.fill([&] { return number(); });
    rates_.fill([&] { return spec_.gate == RecurrentGate::fixed ? std::fabs(0.3f * number()) : 0.3f * number() - 0.5f; });
    weight_.fill([&] { return 1 + 0.3f * number(); });
    for (Twin* t : {&rates_, &bias_, &skip_, &weight_, &state_}) t->upload();
    stream_->synchronize();
  }

  void run() {
    DeviceGraph graph;
    if (p_.graph) {
      if (!p_.on_device) plan_->update(Batch{}, stream_->get());
      graph = stream_->capture([&] {
        if (p_.on_device) update_on_device();
        layer();
      });
    }
    for (int i = 0; i < p_.steps && !testing::Test::HasFailure(); ++i) {
      const SlotStep step = requests_.next();
      SCOPED_TRACE(spec_.str() + ", step " + std::to_string(i) + " of " + std::to_string(step.tokens()) + " tokens");
      begin(step);
      if (p_.on_device) send(step);
      if (!p_.on_device) plan_->update(step.batch(spec_), stream_->get());
      if (p_.graph) {
        stream_->replay(graph);
      } else {
        if (p_.on_device) update_on_device();
        layer();
      }
      expect(step);
    }
    EXPECT_EQ(plan_->device_problems(stream_->get()), std::vector<Reason>{});
  }

  // For tests that do a step of their own.
  RecurrentPlan& plan() { return *plan_; }
  DeviceStream& stream() { return *stream_; }
  void begin(const SlotStep& step) {
    const float key_size = spec_.qk_norm ? 1.f : 1 / std::sqrt(float(spec_.head_dim_k));
    for (Twin* t : {&q_, &k_}) t->fill([&] { return key_size * number(); });
    v_.fill_random(random_);
    z_.fill([&] { return 2 * number(); });
    gate_.fill([&] { return spec_.gate == RecurrentGate::log ? -std::fabs(0.4f * number()) : number() - 0.5f; });
    beta_.fill([&] { return spec_.sigmoid_beta ? number() : std::fabs(0.5f * number()); });
    for (Twin* t : {&q_, &k_, &v_, &gate_, &beta_, &z_}) t->poison_from(step.tokens()), t->upload();
    std::fill(out_.bytes.begin(), out_.bytes.end(), char(0x5a));
    out_.upload();
    stream_->synchronize();
  }
  // first_row: of the tensors' rows, that of the step's first token.
  void layer(int64_t first_row = 0) {
    RecurrentInputs in = inputs([](Twin& t) { return t.on_device(); });
    RecurrentOutputs out{.out = out_.on_device()};
    for (TensorView* t : {&in.q, &in.k, &in.v, &in.gate, &in.beta, &in.z, &out.out}) {
      if (t->empty()) continue;
      t->data = t->as<char>() + first_row * t->stride(0) * size_of(t->dtype), t->sizes[0] -= first_row;
    }
    plan_->run(in, out, stream_->get());
  }
  // `step`: what should have been computed. What is nobody's of states and outputs has the bytes that it had.
  void expect(const SlotStep& step) {
    reference_->update(step.batch(spec_));
    reference_->run(inputs([](Twin& t) { return t.on_host(); }), {.out = out_.on_host()});
    const std::vector<char> states = state_.download();
    expect_near(state_, states, [&](std::vector<char>& actual) { return written_states(step, actual); });
    state_.bytes = states;
    expect_near(out_, out_.download(), [&](std::vector<char>& actual) { return outputs_of(step, actual); });
  }
  std::vector<char> output() const { return out_.download(); }
  std::vector<char> state() const { return state_.download(); }
  void send(const SlotStep& step) {
    lists_.send(step);
    stream_->synchronize();
  }
  void update_on_device() { plan_->update_on_device(lists_.batch(spec_), stream_->get()); }

 private:
  // Numbers of a tensor, one behind the other: those of the reference, and those of the plan.
  struct Run {
    DType dtype;
    char *expected, *actual;
    int64_t count;
  };

  float number() { return float(int32_t(random_())) * 0x1p-30f; }  // [-2, 2)
  DType gate_type() const { return p_.float_gates ? DType::f32 : spec_.dtype; }
  Twin rows(DType dtype, std::vector<int64_t> sizes) const {
    sizes.insert(sizes.begin(), p_.limits.max_num_tokens + 2);
    return {*stream_, dtype, sizes, p_.gap, p_.shift};
  }
  Twin parameters(bool of_channels) const {
    return {*stream_, DType::f32,
            of_channels ? std::vector<int64_t>{spec_.num_v_heads, spec_.head_dim_k} : std::vector<int64_t>{spec_.num_v_heads}, p_.gap};
  }
  RecurrentInputs inputs(const auto& view) {
    const bool has_gate = spec_.gate != RecurrentGate::fixed, has_rates = spec_.gate != RecurrentGate::log;
    return {.q = view(q_),
            .k = view(k_),
            .v = view(v_),
            .gate = has_gate ? view(gate_) : TensorView{},
            .beta = spec_.delta ? view(beta_) : TensorView{},
            .rates = has_rates ? view(rates_) : TensorView{},
            .gate_bias = has_gate && has_rates && p_.gate_bias ? view(bias_) : TensorView{},
            .skip = spec_.skip ? view(skip_) : TensorView{},
            .state = of_heads(view(state_)),
            .z = spec_.out_gate != OutputGate::none ? view(z_) : TensorView{},
            .norm_weight = spec_.out_norm != OutputNorm::none ? view(weight_) : TensorView{}};
  }
  // [.., head_dim_k, head_dim_v] or the other way round, of [.., their product].
  TensorView of_heads(TensorView t) const {
    const bool k_first = spec_.layout == StateLayout::k_first;
    t.sizes[3] = k_first ? spec_.head_dim_k : spec_.head_dim_v, t.sizes[4] = k_first ? spec_.head_dim_v : spec_.head_dim_k;
    t.strides[3] = t.sizes[4], t.strides[4] = 1, t.rank = 5;
    return t;
  }

  std::vector<Run> written_states(const SlotStep& step, std::vector<char>& actual) {
    const TensorView t = state_.on_host();
    std::vector<Run> runs;
    for (size_t r = 0; r < step.lens.size(); ++r)
      for (int row = 0; step.starts[r + 1] > step.starts[r] && row <= step.drafts[r]; ++row)
        for (int head = 0; head < spec_.num_v_heads; ++head)
          runs.push_back(run_at(state_, step.slots[r] * t.stride(0) + row * t.stride(1) + head * t.stride(2), t.size(3), actual));
    return runs;
  }
  std::vector<Run> outputs_of(const SlotStep& step, std::vector<char>& actual) {
    const TensorView t = out_.on_host();
    std::vector<Run> runs;
    for (int token = 0; token < step.tokens(); ++token)
      for (int head = 0; head < spec_.num_v_heads; ++head)
        runs.push_back(run_at(out_, token * t.stride(0) + head * t.stride(1), t.size(2), actual));
    return runs;
  }
  static Run run_at(Twin& twin, int64_t element, int64_t count, std::vector<char>& actual) {
    const TensorView t = twin.on_host();
    char* const expected = t.as<char>() + element * size_of(t.dtype);
    return {t.dtype, expected, actual.data() + (expected - twin.bytes.data()), count};
  }

  // A number may be the next one of its type, and off by what rounding does to the largest of them: of the plan's sums, which are floats,
  // or of the factors of products.
  void expect_near(const Twin& twin, std::vector<char> actual, const auto& runs_in) const {
    const std::vector<Run> runs = runs_in(actual);
    // Where drafts begin from rows of 16 bits, the two may have rounded these to neighbours.
    const double of_rows = !spec_.tree_drafts || spec_.state_dtype == DType::f32 ? 0 : spec_.state_dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
    const double rounding = std::max(of_rows, !plan_->rounded_products() ? 1e-5 : spec_.dtype == DType::f16 ? 0x1p-8 : 0x1p-5);
    double largest = 0;
    for (const Run& run : runs)
      for (int64_t i = 0; i < run.count; ++i) largest = std::max(largest, std::fabs(load_as_double(run.expected, run.dtype, i)));
    ASSERT_TRUE(std::isfinite(largest)) << plan_->str();
    for (const Run& run : runs) {
      const double unit = run.dtype == DType::f32 ? 0x1p-21 : run.dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
      for (int64_t i = 0; i < run.count; ++i) {
        const double e = load_as_double(run.expected, run.dtype, i), a = load_as_double(run.actual, run.dtype, i);
        ASSERT_NEAR(a, e, unit * std::fabs(e) + rounding * largest)
            << (&twin == &state_ ? "state" : "out") << ", number " << i << " behind byte " << run.expected - twin.bytes.data() << ", "
            << plan_->str();
      }
      std::copy_n(run.expected, run.count * size_of(run.dtype), run.actual);
    }
    EXPECT_TRUE(actual == twin.bytes) << "bytes that the step does not write, " << plan_->str();
  }

  RecurrentProblem p_;
  RecurrentSpec spec_;
  std::unique_ptr<DeviceStream> stream_;
  std::mt19937 random_;
  SlotRequests requests_;
  std::unique_ptr<RecurrentPlan> reference_, plan_;
  Twin q_, k_, v_, gate_, beta_, out_, z_, rates_, bias_, skip_, weight_, state_;
  SlotLists lists_;
};

// A request that comes in steps, beside another one that has the rest of the rows, has the outputs and the state that it has alone and at
// once, where a state is f32. `steps`: in units of RecurrentPlan::step_tokens().
inline void expect_same_in_steps(const BackendOf<RecurrentFamily>& backend, const DeviceInfo& device, const RecurrentSpec& spec,
                                 const std::vector<int>& steps) {
  const int unit = backend.plan(spec, device, {.limits = {.max_num_reqs = 2, .max_num_tokens = 1 << 12}})->step_tokens();
  ASSERT_GT(unit, 0) << spec.str();
  const int all = unit * std::accumulate(steps.begin(), steps.end(), 0);
  const RecurrentProblem p{.spec = spec, .limits = {.max_num_reqs = 2, .max_num_tokens = all, .max_seq_len = all}};
  RecurrentBesideReference whole(backend, device, p), parts(backend, device, p);
  const SlotStep at_once{.starts = {0, all}, .lens = {all}, .slots = {4}, .drafts = {0}, .accepted = {0}};
  whole.begin(at_once), parts.begin(at_once);
  whole.plan().update(at_once.batch(spec), whole.stream().get());
  whole.layer();
  int done = 0;
  for (const int units : steps) {
    const int count = units * unit, rest = all - done - count;
    const SlotStep step{
        .starts = {0, count, count + rest}, .lens = {done + count, rest}, .slots = {4, 5}, .drafts = {0, 0}, .accepted = {0, 0}};
    parts.plan().update(step.batch(spec), parts.stream().get());
    parts.layer(done);
    done += count;
  }
  EXPECT_TRUE(parts.output() == whole.output()) << spec.str();
  const std::vector<char> a = whole.state(), b = parts.state();
  const int64_t slot = spec.state_bytes();
  EXPECT_TRUE(std::equal(a.begin() + 4 * slot, a.begin() + 5 * slot, b.begin() + 4 * slot)) << spec.str();
}

}  // namespace imbrex::cuda::test

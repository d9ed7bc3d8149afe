#pragma once
// Random steps of the short convolution through a plan for GPUs and through the reference, side by side: on a GPU, and on the fake driver
// with the kernel's text as host code.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/state_problem.h"
#include "imbrex/short_conv.h"

namespace imbrex::cuda::test {

struct ConvProblem {
  ShortConvSpec spec;
  PlanLimits limits{.max_num_reqs = 12, .max_num_tokens = 100, .max_seq_len = 1 << 20};
  int64_t gap = 0, shift = 0;  // elements, as in Twin, of all tensors with rows
  int64_t weight_gap = 0;      // elements behind a channel's weights, and in front of all weights and biases
  int longest = 60;            // tokens of a request in a step
  int steps = 20;
  bool on_device = false;  // update_on_device()
  bool graph = false;      // one captured graph, replayed
  unsigned seed = 1;
};

using ConvStep = SlotStep;

class ConvRequests : public SlotRequests {
 public:
  ConvRequests(const ConvProblem& p, int num_slots)
      : SlotRequests({.limits = p.limits,
                      .longest = p.longest,
                      .num_drafts = p.spec.num_drafts,
                      .trees = p.spec.tree_drafts,
                      .sources = p.seed % 3 == 1,
                      .seed = p.seed},
                     num_slots) {}
};

class ConvBesideReference {
 public:
  ConvBesideReference(const BackendOf<ShortConvFamily>& backend, const DeviceInfo& device, const ConvProblem& problem)
      : p_(problem),
        stream_(open_stream(device)),
        random_(problem.seed + 1),
        requests_(problem, kSlots),
        reference_(find_backend<ShortConvFamily>("reference")->plan(problem.spec, probe_cpu(), {.limits = problem.limits})),
        plan_(backend.plan(problem.spec, device, {.limits = problem.limits, .on_device = problem.on_device})),
        input_(rows(problem.spec.input_channels())),
        out_(rows(problem.spec.dim)),
        weight_(*stream_, problem.spec.dtype, {problem.spec.dim, problem.spec.width}, problem.weight_gap, problem.weight_gap),
        bias_(*stream_, problem.spec.dtype, {problem.spec.dim}, 0, problem.weight_gap),
        state_(*stream_, problem.spec.dtype, {kSlots, problem.spec.state_rows(), problem.spec.dim}, problem.gap, problem.shift),
        lists_(*stream_, problem.limits.max_num_reqs, problem.limits.max_num_tokens) {
    for (Twin* t : {&weight_, &bias_}) t->fill_random(random_), t->upload();
    state_.upload();
    stream_->synchronize();
  }

  void run() {
    DeviceGraph graph;
    if (p_.graph) {
      if (!p_.on_device) plan_->update(ConvStep{}.batch(p_.spec), stream_->get());
      graph = stream_->capture([&] {
        if (p_.on_device) update_on_device();
        layer();
      });
    }
    for (int i = 0; i < p_.steps && !testing::Test::HasFailure(); ++i) {
      const ConvStep step = requests_.next();
      SCOPED_TRACE(p_.spec.str() + ", step " + std::to_string(i) + " of " + std::to_string(step.tokens()) + " tokens");
      begin(step);
      if (p_.on_device) send(step);
      if (p_.graph) {
        if (!p_.on_device) plan_->update(step.batch(p_.spec), stream_->get());
        stream_->replay(graph);
      } else {
        if (p_.on_device) {
          update_on_device();
        } else {
          plan_->update(step.batch(p_.spec), stream_->get());
        }
        layer();
      }
      expect(step);
    }
    EXPECT_EQ(plan_->device_problems(stream_->get()), std::vector<Reason>{});
  }

  // For tests that do a step of their own.
  ShortConvPlan& plan() { return *plan_; }
  DeviceStream& stream() { return *stream_; }
  void begin(const ConvStep& step) {
    input_.fill_random(random_), input_.poison_from(step.tokens()), input_.upload();
    std::fill(out_.bytes.begin(), out_.bytes.end(), char(0x5a));
    out_.upload();
    stream_->synchronize();
  }
  void layer() const {
    plan_->run({.input = input_.on_device(),
                .weight = weight_.on_device(),
                .bias = p_.spec.bias ? bias_.on_device() : TensorView{},
                .state = state_.on_device()},
               {.out = out_.on_device()}, stream_->get());
  }
  // `step`: what should have been computed. Everything of the state and what is nobody's of the output are the reference's bytes.
  void expect(const ConvStep& step) {
    reference_->update(step.batch(p_.spec));
    reference_->run({.input = input_.on_host(),
                     .weight = weight_.on_host(),
                     .bias = p_.spec.bias ? bias_.on_host() : TensorView{},
                     .state = state_.on_host()},
                    {.out = out_.on_host()});
    EXPECT_TRUE(state_.download() == state_.bytes) << "state, " << plan_->str();
    std::vector<char> actual = out_.download();
    expect_near(step, actual);
    EXPECT_TRUE(actual == out_.bytes) << "bytes between rows, " << plan_->str();
  }
  std::vector<char> output() const { return out_.download(); }
  std::vector<char> state() const { return state_.download(); }

  void send(const ConvStep& step) {
    lists_.send(step);
    stream_->synchronize();
  }
  void update_on_device() { plan_->update_on_device(lists_.batch(p_.spec), stream_->get()); }
  static constexpr int kSlots = 17;

 private:
  Twin rows(int64_t channels) const { return {*stream_, p_.spec.dtype, {p_.limits.max_num_tokens + 2, channels}, p_.gap, p_.shift}; }
  // Sums of the kernel are floats, which may turn a tie: then the output is the next number of its type. Takes the reference's where it is
  // near.
  void expect_near(const ConvStep& step, std::vector<char>& actual) {
    const double unit = p_.spec.dtype == DType::f32 ? 0x1p-21 : p_.spec.dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
    TensorView expected = out_.on_host(), there = expected;
    there.data = actual.data() + (static_cast<char*>(expected.data) - out_.bytes.data());
    for (int64_t t = 0; t < step.tokens(); ++t)
      for (int64_t d = 0; d < p_.spec.dim; ++d) {
        const int64_t i = t * expected.stride(0) + d;
        const double e = load_as_double(expected.data, p_.spec.dtype, i), a = load_as_double(there.data, p_.spec.dtype, i);
        ASSERT_NEAR(a, e, unit * std::fabs(e) + 2e-5) << "token " << t << ", channel " << d;
        store_from_double(there.data, p_.spec.dtype, i, e);
      }
  }

  ConvProblem p_;
  std::unique_ptr<DeviceStream> stream_;
  std::mt19937 random_;
  ConvRequests requests_;
  std::unique_ptr<ShortConvPlan> reference_, plan_;
  Twin input_, out_, weight_, bias_, state_;
  SlotLists lists_;
};

// The outputs of a request of `tokens`, and its state after them, when it comes in steps of 1 to `longest` tokens beside another one.
inline std::vector<char> in_steps(const BackendOf<ShortConvFamily>& backend, const DeviceInfo& device, const ShortConvSpec& spec,
                                  int tokens, int longest, unsigned seed) {
  const auto stream = open_stream(device);
  const auto plan = backend.plan(spec, device, {.limits = {.max_num_reqs = 2, .max_num_tokens = 2 * tokens}});
  std::mt19937 random(seed), same(5);
  const int64_t dim = spec.dim, size = size_of(spec.dtype), channels = spec.input_channels();
  Twin weight(*stream, spec.dtype, {dim, spec.width}), bias(*stream, spec.dtype, {dim}), all(*stream, spec.dtype, {tokens, channels}),
      input(*stream, spec.dtype, {2 * tokens, channels}), out(*stream, spec.dtype, {2 * tokens, dim}),
      state(*stream, spec.dtype, {2, spec.state_rows(), dim});
  for (Twin* t : {&weight, &bias, &all}) t->fill_random(same);
  input.fill_random(random);  // the other request's tokens, and padding
  for (const Twin* t : {&weight, &bias, &state}) t->upload();
  std::vector<char> results;
  for (int done = 0; done < tokens;) {
    const int mine = std::min(1 + int(random() % unsigned(longest)), tokens - done), others = int(random() % 5u);
    ConvStep step{
        .starts = {0, others, others + mine}, .lens = {others, done + mine}, .slots = {0, 1}, .drafts = {0, 0}, .accepted = {0, 0}};
    std::copy_n(all.bytes.begin() + done * channels * size, mine * channels * size, input.bytes.begin() + others * channels * size);
    input.upload();
    plan->update(step.batch(spec), stream->get());
    plan->run({.input = input.on_device(),
               .weight = weight.on_device(),
               .bias = spec.bias ? bias.on_device() : TensorView{},
               .state = state.on_device()},
              {.out = out.on_device()}, stream->get());
    const std::vector<char> rows = out.download();
    results.insert(results.end(), rows.begin() + others * dim * size, rows.begin() + (others + mine) * dim * size);
    done += mine;
  }
  const std::vector<char> states = state.download();
  results.insert(results.end(), states.begin() + long(states.size() / 2), states.end());
  return results;
}

}  // namespace imbrex::cuda::test

#pragma once
// Random steps of the short convolution through a plan for GPUs and through the reference, side by side: on a GPU, and on the fake driver
// with the kernel's text as host code.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "imbrex/device_stream.h"
#include "imbrex/short_conv.h"

namespace imbrex::cuda::test {

// A tensor on the host, and one on a device with the same strides, whose bytes between and behind the elements are there too.
class Twin {
 public:
  // `gap`: elements behind each innermost row; `shift`: in front of all.
  Twin(const DeviceStream& stream, DType dtype, const std::vector<int64_t>& sizes, int64_t gap = 0, int64_t shift = 0) : stream_(stream) {
    view_.dtype = dtype, view_.rank = int(sizes.size());
    int64_t stride = 1;
    for (int d = view_.rank - 1; d >= 0; --d) {
      view_.sizes[size_t(d)] = sizes[size_t(d)], view_.strides[size_t(d)] = stride;
      stride *= sizes[size_t(d)];
      if (d == view_.rank - 1 && d > 0) stride += gap;
    }
    shift_ = shift * size_of(dtype);
    bytes.assign(size_t(shift_ + std::max<int64_t>(stride, 1) * size_of(dtype)), char(0xff));
    device_ = stream.allocate(int64_t(bytes.size()));
  }
  std::vector<char> bytes;
  TensorView on_host() { return at(bytes.data(), {}); }
  TensorView on_device() const { return at(static_cast<char*>(device_.get()), stream_.device()); }
  void fill_random(std::mt19937& random) {
    const int64_t count = (int64_t(bytes.size()) - shift_) / size_of(view_.dtype);
    for (int64_t i = 0; i < count; ++i) store_from_float(bytes.data() + shift_, view_.dtype, i, float(int32_t(random())) * 0x1p-30f);
  }
  // Rows of the first dimension from `row` on, to NaN.
  void poison_from(int64_t row) {
    const int64_t from = shift_ + row * view_.stride(0) * size_of(view_.dtype);
    if (from < int64_t(bytes.size())) std::fill(bytes.begin() + from, bytes.end(), char(0xff));
  }
  void upload() const { stream_.upload(device_.get(), bytes.data(), int64_t(bytes.size())); }
  std::vector<char> download() const {
    std::vector<char> there(bytes.size());
    stream_.download(there.data(), device_.get(), int64_t(there.size()));
    stream_.synchronize();
    return there;
  }

 private:
  TensorView at(char* data, Device device) const {
    TensorView view = view_;
    view.data = data + shift_, view.device = device;
    return view;
  }
  const DeviceStream& stream_;
  TensorView view_;
  int64_t shift_ = 0;
  std::shared_ptr<void> device_;
};

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

// A step of some requests, each with a slot of its own.
struct ConvStep {
  std::vector<int32_t> starts{0}, lens, slots, drafts, accepted;
  int tokens() const { return starts.back(); }
  Batch batch(const ShortConvSpec& spec) const {
    Batch b;
    b.query_start_loc = starts, b.seq_lens = lens, b.state_slots = slots;
    if (spec.num_drafts > 0) b.num_drafts = drafts, b.accepted_drafts = accepted;
    return b;
  }
};

// The number of earlier tokens of each slot's request, for steps that follow each other as those of a server do.
class ConvRequests {
 public:
  ConvRequests(const ConvProblem& problem, int num_slots) : p_(problem), slots_(size_t(num_slots)), random_(problem.seed) {}
  ConvStep next() {
    ConvStep step;
    std::vector<int32_t> order(slots_.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    const int kind = below(4), count = below(std::min(p_.limits.max_num_reqs, int(order.size())) + 1);
    for (int r = 0; r < count; ++r) {
      Slot& slot = slots_[size_t(order[size_t(r)])];
      if (below(5) == 0) slot = {};  // another request gets it
      const int left = p_.limits.max_num_tokens - step.tokens(), most = kind == 0 ? 1 : kind == 1 ? 9 : p_.longest;
      const int q_len = std::min(below(6) == 0 ? 0 : 1 + below(below(2) == 0 ? most : std::min(most, 9)), left);
      const int drafts = kind == 2 ? 0 : std::min(below(p_.spec.num_drafts + 1), q_len);
      const int accepted = below(slot.drafts + 1), done = slot.done + (q_len > 0 ? accepted : 0);
      step.starts.push_back(step.tokens() + q_len);
      step.lens.push_back(done + q_len);
      step.slots.push_back(q_len > 0 ? order[size_t(r)] : -7);
      step.drafts.push_back(q_len > 0 ? drafts : 99);
      step.accepted.push_back(q_len == 0 ? -5 : done == 0 ? 0 : accepted);
      if (q_len > 0) slot = {done + q_len - drafts, drafts};
    }
    return step;
  }

 private:
  struct Slot {
    int done = 0, drafts = 0;  // tokens that stay, and those behind them that a step may keep
  };
  int below(int n) { return int(random_() % unsigned(std::max(n, 1))); }
  ConvProblem p_;
  std::vector<Slot> slots_;
  std::mt19937 random_;
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
        state_(*stream_, problem.spec.dtype, {kSlots, problem.spec.state_rows(), problem.spec.dim}, problem.gap, problem.shift) {
    for (Twin* t : {&weight_, &bias_}) t->fill_random(random_), t->upload();
    state_.upload();
    for (int i = 0; i < 5; ++i) lists_.emplace_back(*stream_, DType::i32, std::vector<int64_t>{p_.limits.max_num_reqs + (i == 0)});
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
    const int32_t end = step.tokens();
    const auto put = [&](size_t list, const std::vector<int32_t>& values, int32_t rest) {
      int32_t* const to = lists_[list].on_host().as<int32_t>();
      std::fill_n(to, lists_[list].bytes.size() / 4, rest);
      std::copy(values.begin(), values.end(), to);
      lists_[list].upload();
    };
    put(0, step.starts, end), put(1, step.lens, 0), put(2, step.slots, -1), put(3, step.drafts, -1), put(4, step.accepted, -1);
    stream_->synchronize();
  }
  void update_on_device() {
    DeviceBatch batch{.query_start_loc = lists_[0].on_device(), .seq_lens = lists_[1].on_device()};
    batch.state_slots = lists_[2].on_device();
    if (p_.spec.num_drafts > 0) batch.num_drafts = lists_[3].on_device(), batch.accepted_drafts = lists_[4].on_device();
    plan_->update_on_device(batch, stream_->get());
  }
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
  std::vector<Twin> lists_;  // starts, lens, slots, drafts, accepted
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

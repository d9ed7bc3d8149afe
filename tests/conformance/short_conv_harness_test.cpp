// What judges backends of the short convolution, judged itself: a backend with any of the usual mistakes must fail.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <span>
#include <string>

#include "core/float_types.h"
#include "core/run_parallel.h"
#include "expect_error.h"
#include "short_conv/step.h"
#include "short_conv_targets.h"
#include "slow_state.h"
#include "state_trees.h"

namespace imbrex::test {
namespace {

// A backend in floats that cuts requests into items, as one for threads would be, and makes one mistake.
enum class ConvMistake {
  none,
  h_not_rounded,
  weights_reversed,
  no_bias,
  past_of_a_new_request,  // read, though there is none
  past_not_read,
  accepted_not_looked_at,
  drafts_not_looked_at,
  source_not_looked_at,  // the slot that is written is read
  zeros_before_an_item,  // instead of what the item before it has computed
  two_units_off,
  no_activation,
  bias_behind_the_activation,
  activated_past,            // the state has outputs instead of inputs
  before_the_outputs,        // a byte is written
  a_row_too_many,            // of the outputs
  an_unread_slot,            // is written
  a_request_without_tokens,  // has its state written
  one_row_too_many,          // of the state
  state_by_the_last_item
};

constexpr int kItemTokens = 16;

class FaultyConvPlan final : public ShortConvPlan {
 public:
  FaultyConvPlan(const ShortConvSpec& spec, const PlanOptions& options, ConvMistake mistake)
      : spec_(spec), options_(options), mistake_(mistake) {}

  void update(const Batch& batch, Stream) override {
    read_batch(StateDrafts(spec_), options_.limits, batch, true, step_);
    items_.clear();
    for (const StateRequest& r : step_.requests)
      for (int begin = r.begin; begin < r.end; begin += kItemTokens) items_.push_back({&r, begin, std::min(begin + kItemTokens, r.end)});
  }

  // The backend's device has the host's memory: it reads the lists where they are.
  void update_on_device(const DeviceBatch& b, Stream stream) override {
    const auto list = [](const TensorView& t) { return std::span(t.as<const int32_t>(), t.empty() ? 0 : size_t(t.size(0))); };
    Batch batch;
    batch.query_start_loc = list(b.query_start_loc), batch.seq_lens = list(b.seq_lens), batch.state_slots = list(b.state_slots);
    batch.num_drafts = list(b.num_drafts), batch.accepted_drafts = list(b.accepted_drafts), batch.source_slots = list(b.source_slots);
    update(batch, stream);
  }

  void run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream) const override {
    std::atomic<size_t> next{0};
    run_parallel(options_.threads, [&](int) {
      for (size_t i; (i = next.fetch_add(1)) < items_.size();)
        for (int d = 0; d < spec_.dim; ++d) run_item(items_[i], d, in, out.out);
    });
    if (mistake_ == ConvMistake::a_row_too_many) store(out.out, step_.num_tokens * out.out.stride(0), 0);
    if (mistake_ == ConvMistake::before_the_outputs) out.out.as<char>()[-1] = 0;
    const int64_t slot = in.state.stride(0), row = in.state.stride(1);
    for (const StateRequest& r : step_.requests) {
      const bool is_last = r.slot + 1 == in.state.size(0);
      if (mistake_ == ConvMistake::an_unread_slot) store(in.state, (is_last ? r.slot - 1 : r.slot + 1) * slot, 1);
      if (mistake_ == ConvMistake::one_row_too_many && r.drafts < spec_.num_drafts)
        store(in.state, r.slot * slot + (spec_.width - 1 + r.drafts) * row, 1);
    }
    // This mistake takes slots to be in the order of requests.
    if (mistake_ == ConvMistake::a_request_without_tokens)
      for (int64_t s = 0; s < in.state.size(0); ++s)
        if (std::ranges::none_of(step_.requests, [&](const StateRequest& r) { return r.slot == s; })) store(in.state, s * slot, 0);
  }

  std::string str() const override { return "faulty"; }

 private:
  struct Item {
    const StateRequest* request;
    int begin, end;
  };

  float load(const TensorView& t, int64_t at) const { return load_as_float(t.data, spec_.dtype, at); }
  void store(const TensorView& t, int64_t at, float x) const { store_from_float(t.data, spec_.dtype, at, x); }

  // h of a token of the request, or of one gone by.
  float h_of(const StateRequest& r, int token, int d, const ShortConvInputs& in) const {
    if (token < r.begin) {
      if ((r.fresh && mistake_ != ConvMistake::past_of_a_new_request) || mistake_ == ConvMistake::past_not_read) return 0;
      const int first = mistake_ == ConvMistake::accepted_not_looked_at ? 0 : r.first_row;
      const int slot = mistake_ == ConvMistake::source_not_looked_at ? r.slot : r.source;
      return load(in.state, slot * in.state.stride(0) + (first + spec_.width - 1 + token - r.begin) * in.state.stride(1) + d);
    }
    const int64_t row = token * in.input.stride(0);
    if (spec_.form == ShortConvForm::plain) return load(in.input, row + d);
    const float product = load(in.input, row + d) * load(in.input, row + 2 * int64_t(spec_.dim) + d);
    char element[4];
    store_from_float(element, mistake_ == ConvMistake::h_not_rounded ? DType::f32 : spec_.dtype, 0, product);
    return load_as_float(element, mistake_ == ConvMistake::h_not_rounded ? DType::f32 : spec_.dtype, 0);
  }

  void run_item(const Item& item, int d, const ShortConvInputs& in, const TensorView& out) const {
    const StateRequest& r = *item.request;
    const int before = spec_.width - 1;
    std::vector<float> h;
    for (int t = item.begin - before; t < item.end; ++t)
      h.push_back(mistake_ == ConvMistake::zeros_before_an_item && t < item.begin && t >= r.begin ? 0 : h_of(r, t, d, in));
    for (int t = item.begin; t < item.end; ++t) {
      const float bias = spec_.bias && mistake_ != ConvMistake::no_bias ? load(in.bias, d) : 0.f;
      const bool bias_first = mistake_ != ConvMistake::bias_behind_the_activation;
      float sum = bias_first ? bias : 0.f;
      for (int i = 0; i < spec_.width; ++i) {
        const int tap = mistake_ == ConvMistake::weights_reversed ? before - i : i;
        sum += load(in.weight, d * in.weight.stride(0) + tap) * h[size_t(t - item.begin + i)];
      }
      const int64_t at = t * out.stride(0) + d;
      store(out, at, output_of(sum, t * in.input.stride(0) + d, in) + (bias_first ? 0.f : bias));
      if (mistake_ == ConvMistake::two_units_off && t == r.begin && d == spec_.dim - 1)
        for (int step = 0; step < 2; ++step) add_unit(out, at);
    }
    const bool writes = mistake_ == ConvMistake::state_by_the_last_item ? item.end == r.end : item.begin == r.begin;
    const int drafts = mistake_ == ConvMistake::drafts_not_looked_at ? 0 : r.drafts;
    for (int i = 0; writes && i < before + r.drafts; ++i) {
      const float h = h_of(r, std::min(r.end - drafts - before + i, r.end - 1), d, in);
      store(in.state, r.slot * in.state.stride(0) + i * in.state.stride(1) + d,
            mistake_ == ConvMistake::activated_past ? h / (1 + std::exp(-h)) : h);
    }
  }

  // `at`: the channel in the input's row of the token.
  float output_of(float sum, int64_t at, const ShortConvInputs& in) const {
    if (spec_.form == ShortConvForm::gated) return sum * load(in.input, at + spec_.dim);
    const bool activated = spec_.activation == ShortConvActivation::silu && mistake_ != ConvMistake::no_activation;
    return activated ? sum / (1 + std::exp(-sum)) : sum;
  }

  // Changes an element to the next number of its type.
  void add_unit(const TensorView& t, int64_t at) const {
    if (spec_.dtype == DType::f32)
      ++t.as<uint32_t>()[at];
    else
      ++t.as<uint16_t>()[at];
  }

  ShortConvSpec spec_;
  PlanOptions options_;
  ConvMistake mistake_;
  StateStep step_;
  std::vector<Item> items_;
};

struct FaultyConvBackend final : BackendOf<ShortConvFamily> {
  ConvMistake mistake = ConvMistake::none;
  explicit FaultyConvBackend(ConvMistake mistake) : mistake(mistake) {}
  std::string_view name() const override { return "faulty"; }
  std::string_view description() const override { return "plain loops with a mistake"; }
  std::vector<Reason> unsupported(const ShortConvSpec&, const DeviceInfo&) const override { return {}; }
  std::unique_ptr<ShortConvPlan> plan(const ShortConvSpec& spec, const DeviceInfo&, const PlanOptions& options) const override {
    return std::make_unique<FaultyConvPlan>(spec, options, mistake);
  }
};

std::string failure_of(ConvMistake mistake, const ShortConvCase& c) {
  const ShortConvRunResult result = run_case(FaultyConvBackend(mistake), probe_cpu(), inputs_of(c), default_options(c));
  return judge(expected_of(c), inputs_of(c), result).failure;
}

TEST(ShortConvHarness, PassesWithoutAMistakeAndFindsEachOne) {
  const struct {
    ConvMistake mistake;
    const char* case_name;
    const char* says;
  } mistakes[] = {
      {ConvMistake::h_not_rounded, "dtype_bf16_prefill", "out"},
      {ConvMistake::h_not_rounded, "dtype_f16_history", "out"},
      {ConvMistake::weights_reversed, "dtype_f32_prefill", "out"},
      {ConvMistake::no_bias, "bias_bf16_decode", "out"},
      {ConvMistake::past_of_a_new_request, "dtype_bf16_prefill", "out"},
      {ConvMistake::past_not_read, "dtype_f32_decode", "out"},
      {ConvMistake::past_not_read, "width_8_chunked", "out"},
      {ConvMistake::accepted_not_looked_at, "dtype_bf16_verify", "out"},
      {ConvMistake::drafts_not_looked_at, "dtype_f32_verify", "state"},
      {ConvMistake::source_not_looked_at, "dtype_f32_verify", "out"},
      {ConvMistake::zeros_before_an_item, "length_17_after_9", "out"},
      {ConvMistake::two_units_off, "dtype_bf16_decode", "out"},
      {ConvMistake::two_units_off, "dtype_f16_decode", "out"},
      {ConvMistake::no_activation, "silu_bf16_prefill", "out"},
      {ConvMistake::bias_behind_the_activation, "silu_f16_bias_decode", "out"},
      {ConvMistake::activated_past, "silu_f32_chunked", "out"},
      {ConvMistake::activated_past, "plain_bf16_decode", "state"},
      {ConvMistake::two_units_off, "silu_f16_history", "out"},
      {ConvMistake::weights_reversed, "silu_length_63_after_9", "out"},
      {ConvMistake::accepted_not_looked_at, "plain_f32_verify", "out"},
      {ConvMistake::a_row_too_many, "length_17_after_9", "out: byte"},
      {ConvMistake::an_unread_slot, "dtype_f32_decode", "state: row 0 of slot"},
      {ConvMistake::a_request_without_tokens, "dtype_f32_mixed", "state: row 0 of slot"},
      {ConvMistake::one_row_too_many, "dtype_f32_verify", "state: row"},
  };
  for (const auto& [mistake, name, says] : mistakes) {
    const ShortConvCase* c = find_short_conv_case(name);
    ASSERT_NE(c, nullptr) << name;
    EXPECT_EQ(failure_of(ConvMistake::none, *c), "") << name;
    EXPECT_TRUE(failure_of(mistake, *c).starts_with(says)) << name << ", mistake " << int(mistake) << ": " << failure_of(mistake, *c);
  }
}

TEST(ShortConvHarness, FindsTreesThatAreComputedAsChains) {
  int cases = 0;
  for (const ShortConvCase& c : short_conv_cases()) {
    if (!c.spec.tree_drafts || c.spec.dim < 7 || c.values != ShortConvValues::plain) continue;
    ShortConvCaseInputs chains = inputs_of(c);
    chains.requests = without_parents(chains.requests);
    const ShortConvRunResult wrong = run_case(*find_backend<ShortConvFamily>("reference"), probe_cpu(), chains, default_options(c));
    EXPECT_TRUE(judge(expected_of(c), inputs_of(c), wrong).failure.starts_with("out")) << c.name;
    ++cases;
  }
  EXPECT_GE(cases, 20);
}

// Why there is a law of its own: where whoever reads a state first is not kept waiting, everything is right by luck.
TEST(ShortConvHarness, FindsAStateThatIsWrittenBeforeItIsRead) {
  if (!SlowReads::works()) GTEST_SKIP() << "nobody waits on this machine";
  const ShortConvCaseInputs in = make_inputs(steep_case({.dim = 100, .width = 4}, {{70, 9}}));
  const ShortConvExpected expected = expect(in);
  const auto slow = [&](ConvMistake mistake) {
    int waited = 0;
    const ShortConvRunResult result =
        run_with_slow_state(FaultyConvBackend(mistake), probe_cpu(), in, std::chrono::milliseconds(500), waited);
    EXPECT_GT(waited, 0);
    return judge(expected, in, result).failure;
  };
  EXPECT_EQ(slow(ConvMistake::none), "");
  EXPECT_TRUE(slow(ConvMistake::state_by_the_last_item).starts_with("out"));
  const ShortConvRunResult quick = run_case(FaultyConvBackend(ConvMistake::state_by_the_last_item), probe_cpu(), in, {});
  EXPECT_EQ(judge(expected, in, quick).failure, "");
}

// Copies of a host's tensors that are the host's too: what a GPU is given, and what comes back.
TEST(ShortConvHarness, TheMirrorHandsOnWhatItIsGiven) {
  const FaultyConvBackend plain(ConvMistake::none), before(ConvMistake::before_the_outputs), unread(ConvMistake::an_unread_slot);
  const auto mirror = device_mirror(plain);
  for (const char* name : {"gaps_odd_verify", "gaps_aligned_mixed", "bias_f32_chunked", "requests_none", "drafts_5_width_4"}) {
    const ShortConvCase* c = find_short_conv_case(name);
    ASSERT_NE(c, nullptr) << name;
    ShortConvRunOptions options = default_options(*c);
    for (const bool on_device : {false, true}) {
      options.on_device = on_device;
      EXPECT_EQ(judge(expected_of(*c), inputs_of(*c), run_case(*mirror, probe_cpu(), inputs_of(*c), options)).failure, "") << name;
    }
  }
  const ShortConvCase& c = *find_short_conv_case("dtype_f32_prefill");
  EXPECT_EQ(error_code([&] { run_case(*device_mirror(before), probe_cpu(), inputs_of(c), default_options(c)); }), "mirror.guard");
  const ShortConvRunResult other_slots = run_case(*device_mirror(unread), probe_cpu(), inputs_of(c), {});
  EXPECT_TRUE(judge(expected_of(c), inputs_of(c), other_slots).failure.starts_with("state: row 0 of slot"));
}

// What the bound leaves room for, and what it does not.
TEST(ShortConvHarness, TheBoundIsOneRounding) {
  for (const char* name : {"dtype_f32_prefill", "dtype_bf16_prefill", "dtype_f16_prefill", "silu_f32_prefill", "silu_bf16_bias_prefill"}) {
    const ShortConvCase& c = *find_short_conv_case(name);
    const ShortConvCaseInputs& in = inputs_of(c);
    const ShortConvExpected& expected = expected_of(c);
    const double unit = c.spec.dtype == DType::f32 ? 0x1p-23 : c.spec.dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
    for (size_t i = 0; i < expected.out.size(); ++i) {
      EXPECT_GE(expected.allowed[i], unit / 2 * std::abs(expected.out[i]));
      // Sums of some terms, of which a few cancel.
      EXPECT_LE(expected.allowed[i], unit * std::abs(expected.out[i]) + 3e-5) << name;
    }
    ShortConvRunResult result{.out = {}, .state = expected.state, .violations = {}};
    for (const double x : expected.out) result.out.push_back(float(x));
    EXPECT_TRUE(judge(expected, in, result).pass());
    result.out[7] += float(1.01 * expected.allowed[7] + std::abs(expected.out[7]) * 0x1p-23);
    EXPECT_FALSE(judge(expected, in, result).pass());
    result.out[7] = float(expected.out[7]);
    result.state.bytes[3] ^= 1;
    EXPECT_TRUE(judge(expected, in, result).failure.starts_with("state")) << judge(expected, in, result).failure;
  }
}

TEST(ShortConvHarness, ContentsDoNotDependOnTheBatch) {
  const ShortConvSpec spec{.dim = 20, .width = 4};
  ShortConvCase c = steep_case(spec, {{3, 0}, {5, 2}, {10, 40}});
  const ShortConvCaseInputs all = make_inputs(c);
  c.requests = {c.requests[2]};
  const ShortConvCaseInputs one = make_inputs(c);
  const long row = 3 * 20 * 2;  // request 2 begins at token 8
  EXPECT_TRUE(std::equal(one.input.bytes.begin(), one.input.bytes.end(), all.input.bytes.begin() + 8 * row));
  EXPECT_TRUE(std::equal(one.state.bytes.begin(), one.state.bytes.end(), all.state.bytes.begin() + 2 * spec.state_bytes()));
}

// The state of inputs is what a run of the tokens before leaves.
TEST(ShortConvHarness, TheStateOfACaseIsThatOfItsPast) {
  for (const int past : {1, 2, 3, 40}) {
    const ShortConvSpec spec{.dim = 20, .width = 4};
    const ShortConvCaseInputs before = make_inputs(steep_case(spec, {{past, 0}})), after = make_inputs(steep_case(spec, {{2, past}}));
    EXPECT_EQ(expect(before).state.bytes, after.state.bytes) << past;
  }
}

}  // namespace
}  // namespace imbrex::test

// The plan of recurrent layers for GPUs on the fake driver: what it refuses and launches, that a failed call changes nothing, and that a
// captured graph serves any batch. The kernels' texts, compiled for the host (tests/cuda/lanes), do the work.
#include <algorithm>
#include <array>

#include "allocations.h"
#include "cuda/fake/recurrent_calls.h"
#include "expect_error.h"

namespace imbrex::cuda {
namespace {

using fake::FailCall;
using imbrex::test::error_code, imbrex::test::FailAllocation;
using test::RecurrentProblem, test::SlotRequests;

TEST_F(RecurrentPlans, OutputsAndStatesAreThoseOfTheReference) {
  if (!fake::has_texts()) GTEST_SKIP();
  unsigned seed = 1;
  for (const RecurrentVariant& variant : recurrent_variants()) {
    use(variant);
    for (const int64_t gap : {0, 3, 8})
      run({.spec = variant.with_drafts(gap == 3 ? 0 : 4),
           .gap = gap,
           .shift = gap == 3 ? 1 : 2 * gap,
           .float_gates = gap != 8,
           .gate_bias = gap == 3,
           .steps = 5,
           .seed = seed++});
  }
}

// Settings that are no constants of the kernel that computes token by token, one at a time: all run the text of one variant. Queries are
// too short for chunks, whose kernels have some of them as constants.
TEST_F(RecurrentPlans, EverySettingIsThatOfTheReference) {
  if (!fake::has_texts()) GTEST_SKIP();
  unsigned seed = 20;
  const auto run_changed = [&](const RecurrentVariant& variant, const auto& change) {
    RecurrentSpec spec = variant.with_drafts(2);
    change(spec);
    use(variant);
    ASSERT_TRUE(variant.runs_tokens(spec)) << spec.str();
    run({.spec = spec,
         .limits = {.max_num_reqs = 12, .max_num_tokens = 100, .max_seq_len = 1 << 20, .max_query_len = 12},
         .longest = 12,
         .steps = 3,
         .seed = seed++});
  };
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (variant.layer.has_output_stage()) continue;
    const bool narrow = variant.layer.head_dim_v == 1, channels = variant.layer.channel_gate;
    run_changed(variant, [](RecurrentSpec& s) { s.scale = 0.3f; });
    run_changed(variant, [](RecurrentSpec& s) { s.qk_norm = !s.qk_norm; });
    run_changed(variant, [](RecurrentSpec& s) { s.skip = !s.skip; });
    run_changed(variant, [](RecurrentSpec& s) { s.num_v_heads = s.num_k_heads = 5; });
    run_changed(variant, [](RecurrentSpec& s) { s.gate = RecurrentGate::softplus, s.gate_min = 0.2f, s.gate_max = 0.6f; });
    run_changed(variant, [](RecurrentSpec& s) { s.gate = RecurrentGate::sigmoid, s.gate_min = -3, s.scaled_values = false; });
    if (!variant.layer.channel_rates)
      run_changed(variant, [](RecurrentSpec& s) { s.gate = RecurrentGate::log, s.gate_min = 0, s.scaled_values = false; });
    if (!channels) run_changed(variant, [](RecurrentSpec& s) { s.gate = RecurrentGate::fixed, s.gate_min = 0, s.scaled_values = false; });
    if (!channels) run_changed(variant, [](RecurrentSpec& s) { s.gate = RecurrentGate::softplus, s.gate_min = 0, s.scaled_values = true; });
    if (narrow) continue;  // those have no delta rule
    run_changed(variant, [](RecurrentSpec& s) { s.delta = true, s.sigmoid_beta = true, s.beta_scale = 2, s.qk_norm = true; });
    run_changed(variant, [](RecurrentSpec& s) { s.delta = true, s.sigmoid_beta = false, s.beta_scale = 1; });
    run_changed(variant, [](RecurrentSpec& s) { s.delta = s.sigmoid_beta = false, s.beta_scale = 1; });
  }
}

// Heads with values of one dimension: in several thread blocks, of which some share a key head and others do not.
TEST_F(RecurrentPlans, ManyNarrowHeads) {
  if (!fake::has_texts()) GTEST_SKIP();
  const RecurrentVariant variant = recurrent_variants().back();
  use(variant);
  unsigned seed = 50;
  for (const auto& [k_heads, v_heads] : {std::pair{1, 130}, {2, 256}, {5, 200}, {3, 384}, {7, 7}, {150, 300}})
    for (const bool qk_norm : {false, true}) {
      RecurrentSpec spec = variant.with_drafts(1);
      spec.num_k_heads = k_heads, spec.num_v_heads = v_heads, spec.qk_norm = qk_norm;
      run({.spec = spec,
           .limits = {.max_num_reqs = 5, .max_num_tokens = 24, .max_seq_len = 1 << 20},
           .longest = 12,
           .steps = 3,
           .seed = seed++});
    }
}

// A norm over more numbers than a warp keeps: of heads that are neighbours, and apart.
TEST_F(RecurrentPlans, WarpsShareANorm) {
  if (!fake::has_texts()) GTEST_SKIP();
  const RecurrentVariant variant = imbrex::test::wide_outputs_variant();
  use(variant);
  for (const int64_t gap : {0, 3})
    run({.spec = variant.layer,
         .limits = {.max_num_reqs = 3, .max_num_tokens = 6, .max_seq_len = 1 << 20},
         .gap = gap,
         .longest = 3,
         .steps = 2,
         .seed = 60});
}

TEST_F(RecurrentPlans, LengthsOnTheDevice) {
  if (!fake::has_texts()) GTEST_SKIP();
  unsigned seed = 70;
  for (const RecurrentVariant& variant : recurrent_variants()) {
    use(variant);
    run({.spec = variant.with_drafts(3), .longest = 20, .steps = 5, .on_device = true, .seed = seed++});
  }
}

TEST_F(RecurrentPlans, OneGraphForAllSteps) {
  if (!fake::has_texts()) GTEST_SKIP();
  unsigned seed = 90;
  for (const RecurrentVariant& variant : recurrent_variants())
    for (const bool on_device : {false, true}) {
      use(variant);
      run({.spec = variant.with_drafts(3), .longest = 20, .steps = 5, .on_device = on_device, .graph = true, .seed = seed++});
    }
}

TEST_F(RecurrentPlans, StepsAndNeighboursChangeNoBit) {
  if (!fake::has_texts()) GTEST_SKIP();
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (variant.layer.state_dtype != DType::f32) continue;
    use(variant);
    test::expect_same_in_steps(backend, device, variant.with_drafts(2), {1, 7, 9, 2, 1});
  }
}

// Each plan has its own lists: the launches of two wait on two streams at a time.
TEST_F(RecurrentPlans, TwoPlansOnTwoStreams) {
  if (!fake::has_texts()) GTEST_SKIP();
  use(recurrent_variants()[0]);
  const RecurrentProblem p{.spec = recurrent_variants()[0].with_drafts(2), .seed = 3};
  RecurrentBesideReference one(backend, device, p), two(backend, device, p);
  SlotRequests requests(p.requests(), RecurrentBesideReference::kSlots);
  SlotRequests others({.limits = p.limits, .longest = 9, .num_drafts = 2, .seed = 4}, RecurrentBesideReference::kSlots);
  for (int i = 0; i < 4 && !HasFailure(); ++i) {
    const SlotStep first = requests.next(), second = others.next();
    one.begin(first), two.begin(second);
    one.plan().update(first.batch(p.spec), one.stream().get());
    two.plan().update(second.batch(p.spec), two.stream().get());
    one.layer(), two.layer();
    two.expect(second), one.expect(first);
  }
}

TEST_F(RecurrentCalls, RefuseWhatIsWrong) {
  EXPECT_EQ(backend.unsupported(spec, describe_device("h200")).size(), 0u);
  EXPECT_EQ(backend.unsupported(spec, probe_cpu()).at(0).str(), "device.type: wanted cuda, got cpu");
  DeviceInfo old = device;
  old.sm = 75;
  EXPECT_EQ(backend.unsupported(spec, old).at(0).str(), "device.sm: wanted 80 or more, got 75");
  EXPECT_EQ(error_code([&] { backend.plan(spec, describe_device("h200"), {}); }), "backend.device_absent");
  EXPECT_EQ(error_code([&] { plan(spec, {.balanced = true, .on_device = true}); }), "backend.on_device");
  EXPECT_EQ(error_code([&] { plan(spec, {.out_dtype = DType::f32}); }), "backend.out_dtype");

  const auto p = plan(spec, {.limits = limits});
  EXPECT_EQ(error_code([&] { p->update_on_device(on_device); }), "update.on_device");
  EXPECT_TRUE(p->device_problems().empty());
  p->update(batch);
  const std::string text = p->str();
  EXPECT_EQ(text, "cuda_sm80 (sm_90a): 5 tokens of 2 requests");
  const auto refused = [&](auto change) {
    Batch bad = batch;
    std::vector<int32_t> values;
    change(bad, values);
    const std::string code = error_code([&] { p->update(bad); });
    EXPECT_EQ(p->str(), text);
    return code;
  };
  EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 0, 0}, b.state_slots = l; }), "batch.state.shared");
  EXPECT_EQ(refused([](Batch& b, auto&) { b.state_slots = {}; }), "batch.state.size");
  EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 0, 3}, b.num_drafts = l; }), "batch.state.num_drafts");
  EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 1, 2, 60}, b.query_start_loc = l; }), "batch.seq_len.shorter_than_query");
  const auto run_code = [&](auto change) {
    RecurrentInputs inputs = in;
    RecurrentOutputs outputs = out;
    change(inputs, outputs);
    return error_code([&] { p->run(inputs, outputs); });
  };
  EXPECT_EQ(run_code([](auto&, auto&) {}), kFine);
  EXPECT_EQ(run_code([](auto& i, auto&) { i.q.device = {}; }), "recurrent.run.tensor");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.v.sizes[0] = 4; }), "recurrent.run.tensor");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.state.sizes[0] = 1; }), "recurrent.run.tensor");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.state.device.index = 1; }), "recurrent.run.tensor");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.state.strides[3] = 68, i.state.sizes[0] = 2; }), "recurrent.run.state");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.beta = {}; }), "recurrent.run.missing");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.skip = i.rates; }), "recurrent.run.missing");
  EXPECT_EQ(run_code([](auto&, auto& o) { o.out.strides[0] = 32; }), "tensor.overlap");

  // A plan whose batches nobody validates has no room for more than its limits all the same.
  const auto unchecked = plan(spec, {.limits = {.max_num_reqs = 1, .max_num_tokens = 4}, .validate = false});
  EXPECT_EQ(error_code([&] { unchecked->update(batch); }), "update.limits");
}

// A kernel numbers the parts of all requests with 31 bits.
TEST_F(RecurrentCalls, RefuseMoreRequestsThanPartsHaveNumbers) {
  RecurrentSpec many = spec;
  many.num_v_heads = 1 << 16;  // a part each
  const auto code = [&](const RecurrentSpec& of, int reqs) {
    return error_code([&] { plan(of, {.limits = {.max_num_reqs = reqs, .max_query_len = 1}}); });
  };
  EXPECT_EQ(code(many, 1 << 15), "limits.max_num_reqs");
  EXPECT_EQ(code(many, (1 << 15) - 1), kFine);
  use(recurrent_variants().back());
  RecurrentSpec narrow = recurrent_variants().back().layer;
  narrow.num_v_heads = 1 << 16;  // of which a part has 64
  EXPECT_EQ(code(narrow, 1 << 21), "limits.max_num_reqs");
  EXPECT_EQ(code(narrow, (1 << 21) - 1), kFine);
}

// Aligned states and outputs take one kernel, others the other; grids follow from requests where the host knows them, else from the limits,
// which are such that there may be chunks in one round.
TEST_F(RecurrentCalls, LaunchWhatTheyNeed) {
  auto p = plan(spec, {.limits = limits});
  const auto launched = [&](auto change) {
    RecurrentInputs inputs = in;
    RecurrentOutputs outputs = out;
    change(inputs, outputs);
    fake::state().launches.clear();
    p->run(inputs, outputs);
    const auto& all = fake::state().launches;
    std::string text = all.empty() ? "nothing" : "";
    for (const fake::Launch& launch : all) {
      EXPECT_EQ(launch.threads, launch.entry == "recurrent_chunks" ? 256u : 128u);
      EXPECT_TRUE(launch.programmatic);
      text += (text.empty() ? "" : ", ") + launch.entry + " " + std::to_string(launch.grid_x);
    }
    return text;
  };
  const auto unchanged = [](auto&, auto&) {};
  EXPECT_EQ(launched(unchanged), "nothing");  // there is no step yet
  p->update(batch);
  const int maps = fake::state().maps;
  EXPECT_EQ(launched(unchanged), "recurrent_aligned 8");  // 4 heads of 2 requests
  EXPECT_EQ(fake::state().maps, maps) << "tokens one by one need none";
  EXPECT_EQ(launched([](auto& i, auto&) { i.q.data = i.q.template as<char>() + 2; }), "recurrent_aligned 8");
  EXPECT_EQ(launched([](auto& i, auto&) { i.state.data = i.state.template as<char>() + 4; }), "recurrent_unaligned 8");
  EXPECT_EQ(launched([](auto&, auto& o) { o.out.data = o.out.template as<char>() + 2; }), "recurrent_unaligned 8");
  EXPECT_EQ(launched([](auto&, auto& o) { o.out.strides[0] = 260, o.out.sizes[0] = 5; }), "recurrent_unaligned 8");
  p->update({});
  EXPECT_EQ(launched(unchanged), "nothing");

  const auto stream = open_stream(device);
  const DeviceGraph graph = stream->capture([&] { p->run(in, out, stream->get()); });
  unsigned blocks = 0;
  fake::state().on_launch = [&](const fake::Launch& launch) { blocks = launch.grid_x; };
  stream->replay(graph);
  stream->synchronize();
  EXPECT_EQ(blocks, 16u);  // of 4 requests

  fake::state().on_launch = nullptr;
  p = plan(spec, {.limits = limits, .on_device = true});
  p->update_on_device(on_device);
  EXPECT_EQ(launched(unchanged), "recurrent_weights 8, recurrent_chunks 16, recurrent_aligned 16");  // 4 numbers of chunks
  EXPECT_EQ(launched([](auto& i, auto&) { i.q.data = i.q.template as<char>() + 2; }), "recurrent_aligned 16");
  EXPECT_EQ(launched([](auto& i, auto&) { i.q.strides[0] = int64_t(1) << 39; }), "recurrent_aligned 16");  // too far apart for TMA
  p = plan(spec, {.limits = {.max_num_reqs = 1 << 20, .max_query_len = 15}, .on_device = true});
  p->update_on_device(on_device);
  EXPECT_EQ(launched(unchanged), "recurrent_stream 528");  // blocks that stay, four on each of 132 multiprocessors
  EXPECT_EQ(launched([](auto& i, auto&) { i.state.data = i.state.template as<char>() + 4; }), "recurrent_unaligned 32768");
}

TEST_F(RecurrentCalls, HoldAGraphToTheTensorsOfItsCapture) {
  const auto stream = open_stream(device);
  const auto p = plan(spec, {.limits = limits});
  p->update({}, stream->get());
  const DeviceGraph graph = stream->capture([&] {
    p->run(in, out, stream->get());
    EXPECT_EQ(error_code([&] { p->update(batch, stream->get()); }), "update.captured");
  });
  EXPECT_EQ(error_code([&] { p->update(batch, stream->get()); }), kFine);
  // A longer step is for other tensors. Replayed, the graph computes those requests that it has rows for.
  SlotStep longer = step;
  longer.starts.back() = 7, longer.drafts.back() = 0;
  p->update(longer.batch(spec), stream->get());
  begin();
  stream->replay(graph);
  stream->synchronize();
  const std::string rows = outputs();
  EXPECT_EQ(rows.substr(2 * kRowBytes), std::string(4 * kRowBytes, 0x22));
  EXPECT_EQ(fake::has_texts(), rows.substr(0, 2 * kRowBytes) != std::string(2 * kRowBytes, 0x22));
  EXPECT_EQ(states().substr(0, kSlotBytes), first_state.substr(0, kSlotBytes));  // of the request without rows
  SlotStep beyond = step;
  beyond.slots[0] = 2;
  EXPECT_EQ(error_code([&] { p->update(beyond.batch(spec), stream->get()); }), "update.captured_cache");
  EXPECT_TRUE(p->capturable());

  const auto on_demand = plan(spec, {.limits = limits, .load_on_demand = true});
  EXPECT_FALSE(on_demand->capturable());
  on_demand->update(batch, stream->get());
  stream->capture([&] { EXPECT_EQ(error_code([&] { on_demand->run(in, out, stream->get()); }), "run.on_demand"); });
  EXPECT_EQ(error_code([&] { on_demand->run(in, out, stream->get()); }), kFine);
}

// Whether a call threw, and whether it was made to.
struct RecurrentOutcome {
  bool threw = false, was_made_to = false;
};
template <class Fault>
RecurrentOutcome with_fault(long number, const auto& call) {
  RecurrentOutcome outcome;
  const Fault fault(number);
  try {
    call();
  } catch (const std::exception&) {
    outcome.threw = true;
  }
  outcome.was_made_to = fault.has_failed();
  return outcome;
}

// Where a plan cannot be made, what it has asked the driver for is given back.
TEST_F(RecurrentCalls, AFailedPlanLeavesNothing) {
  const auto alive = [] {
    const auto& s = fake::state();
    return std::array{s.buffers, s.pinned, s.streams, s.events, s.libraries, s.contexts};
  };
  for (const bool on_device : {false, true}) {
    int failures = 0;
    for (long number = 1;; ++number) {
      const auto before = alive();
      std::unique_ptr<RecurrentPlan> made;
      const RecurrentOutcome outcome =
          with_fault<FailCall<false>>(number, [&] { made = plan(spec, {.limits = limits, .on_device = on_device}); });
      EXPECT_EQ(made == nullptr, outcome.threw);
      made = nullptr;
      EXPECT_EQ(alive(), before) << number;
      if (!outcome.was_made_to || HasFailure()) break;
      failures += int(outcome.threw);
    }
    EXPECT_GT(failures, 5);
  }
}

template <class Fault>
class RecurrentGuarantees : public RecurrentCalls {};
using RecurrentFaults = testing::Types<FailCall<false>, FailCall<true>, FailAllocation>;
TYPED_TEST_SUITE(RecurrentGuarantees, RecurrentFaults);

// After an update of which anything has failed, the plan computes the step before, bit for bit; or no step, where the driver goes on
// failing.
TYPED_TEST(RecurrentGuarantees, AFailedUpdateLeavesTheStepBefore) {
  if (!fake::has_texts()) GTEST_SKIP();
  const auto stream = open_stream(this->device);
  int failures = 0;
  for (long number = 1;; ++number) {
    const auto p = this->plan(this->spec, {.limits = this->limits});
    p->update(this->batch, stream->get());
    const std::string before = this->results(*p, *stream), text = p->str();
    const auto outcome = with_fault<TypeParam>(number, [&] { p->update(this->other.batch(this->spec), stream->get()); });
    if (!outcome.was_made_to) break;
    ++failures;
    if (outcome.threw) {
      EXPECT_EQ(p->str(), text);
      try {
        EXPECT_TRUE(this->results(*p, *stream) == before) << number;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), "plan.no_step");
        EXPECT_TRUE((std::is_same_v<TypeParam, FailCall<true>>));
      }
    }
    p->update(this->other.batch(this->spec), stream->get());
    const std::string after = this->results(*p, *stream);
    const auto fresh = this->plan(this->spec, {.limits = this->limits});
    fresh->update(this->other.batch(this->spec), stream->get());
    EXPECT_TRUE(this->results(*fresh, *stream) == after) << number;
    EXPECT_FALSE(after == before);
    if (this->HasFailure()) return;
  }
  EXPECT_GT(failures, 0);
}

// A run() that failed, while it loaded kernels or launched them, has computed nothing, and the next one computes the step.
TYPED_TEST(RecurrentGuarantees, AFailedRunComputesNothing) {
  if (!fake::has_texts()) GTEST_SKIP();
  const auto stream = open_stream(this->device);
  const auto p = this->plan(this->spec, {.limits = this->limits});
  p->update(this->batch, stream->get());
  const std::string expected = this->results(*p, *stream);
  int failures = 0;
  for (const bool on_demand : {true, false})
    for (long number = 1;; ++number) {
      const auto plan = this->plan(this->spec, {.limits = this->limits, .load_on_demand = on_demand});
      plan->update(this->batch, stream->get());
      stream->synchronize();
      this->begin();
      const std::string untouched = this->states() + this->outputs();
      const auto outcome = with_fault<TypeParam>(number, [&] { plan->run(this->in, this->out, stream->get()); });
      stream->synchronize();
      if (!outcome.was_made_to) break;
      ++failures;
      EXPECT_EQ(this->states() + this->outputs() == untouched, outcome.threw) << number;
      EXPECT_TRUE(this->results(*plan, *stream) == expected) << number;
      if (this->HasFailure()) return;
    }
  EXPECT_GT(failures, 1);
}

}  // namespace
}  // namespace imbrex::cuda

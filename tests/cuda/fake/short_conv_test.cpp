// The short convolution's plan for GPUs on the fake driver: what it refuses and launches, that a failed update changes nothing, and that a
// captured graph serves any batch. The kernels' texts, compiled for the host (tests/cuda/lanes), do the work.
#include <cstring>

#include "allocations.h"
#include "cuda/fake/short_conv_calls.h"
#include "expect_error.h"

namespace imbrex::cuda {
namespace {

using fake::FailCall;
using imbrex::test::error_code, imbrex::test::FailAllocation, imbrex::test::short_conv_variants, imbrex::test::ShortConvVariant;
using test::ConvProblem;

TEST_F(ShortConvPlans, OutputsAndStatesAreThoseOfTheReference) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  unsigned seed = 1;
  for (const ShortConvVariant& variant : short_conv_variants()) {
    use(variant);
    for (const int dim : {1, 7, 104, 520})
      for (const int64_t gap : {0, 3, 8})
        run({.spec = variant.spec(dim, seed % 2 == 0 ? 0 : 5),
             .limits = {.max_num_reqs = 12, .max_num_tokens = 60, .max_seq_len = 1 << 20},
             .gap = gap,
             .shift = gap == 3 ? 1 : gap,
             .longest = 40,
             .steps = 6,
             .seed = seed++});
  }
}

// Rows and tensors begin at every place in 16 bytes that elements have, and B, C and x at different ones.
TEST_F(ShortConvPlans, RowsBeginAnywhere) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  unsigned seed = 100;
  for (const ShortConvVariant& variant : short_conv_variants()) {
    use(variant);
    const int64_t places = 16 / size_of(variant.dtype);
    for (int64_t shift = 0; shift < places; ++shift)
      for (const int dim : {32, 131, 262, 516})
        run({.spec = variant.spec(dim, 3),
             .limits = {.max_num_reqs = 6, .max_num_tokens = 24, .max_seq_len = 1 << 20},
             .gap = (shift + seed) % places,
             .shift = shift,
             .weight_gap = (shift + seed / 2) % 3,
             .longest = 20,
             .steps = 3,
             .seed = seed++});
  }
}

// A GPU of one multiprocessor has few chunks of many tokens, so that the last tokens of a request, of which its state is made, are in
// chunks with those of others.
TEST_F(ShortConvPlans, FewChunksOfManyTokens) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  DeviceInfo small = device;
  small.num_workers = 1;
  for (const ShortConvVariant& variant : short_conv_variants()) {
    use(variant);
    for (const int64_t gap : {0, 3})
      ConvBesideReference(*find_backend<ShortConvFamily>("cuda_sm80"), small,
                          {.spec = variant.spec(1024, 40),
                           .limits = {.max_num_reqs = 12, .max_num_tokens = 400, .max_seq_len = 1 << 20},
                           .gap = gap,
                           .longest = 200,
                           .steps = 4})
          .run();
  }
}

TEST_F(ShortConvPlans, LengthsOnTheDevice) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  unsigned seed = 30;
  for (const ShortConvVariant& variant : short_conv_variants()) {
    use(variant);
    run({.spec = variant.spec(40, 5), .longest = 30, .steps = 10, .on_device = true, .seed = seed++});
  }
}

TEST_F(ShortConvPlans, OneGraphForAllSteps) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  unsigned seed = 60;
  for (const ShortConvVariant& variant : short_conv_variants())
    for (const bool on_device : {false, true}) {
      use(variant);
      run({.spec = variant.spec(40, 3), .longest = 40, .steps = 8, .on_device = on_device, .graph = true, .seed = seed++});
    }
}

TEST_F(ShortConvPlans, StepsAndNeighboursChangeNoBit) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  const BackendOf<ShortConvFamily>& backend = *find_backend<ShortConvFamily>("cuda_sm80");
  for (const ShortConvVariant& variant : short_conv_variants()) {
    use(variant);
    for (const int dim : {7, 104}) {
      const std::vector<char> whole = test::in_steps(backend, device, variant.spec(dim), 60, 1 << 20, 1);
      for (const int longest : {2, 20})
        EXPECT_TRUE(test::in_steps(backend, device, variant.spec(dim), 60, longest, unsigned(longest)) == whole) << variant.name << longest;
    }
  }
}

// A step has so many requests that the search for a token's request takes three turns.
TEST_F(ShortConvPlans, ManyRequests) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  use(short_conv_variants()[0]);
  const ShortConvSpec spec = short_conv_variants()[0].spec(8);
  constexpr int kReqs = 1100;
  std::vector<int32_t> starts{0}, lens(kReqs, 1), slots(kReqs);
  for (int r = 0; r < kReqs; ++r) starts.push_back(r + 1), slots[size_t(r)] = kReqs - 1 - r;
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots;
  std::vector<uint16_t> input(kReqs * 24), weight(24, 0x3f80), state(kReqs * 16, 0x7fff), out(kReqs * 8);
  for (int r = 0; r < kReqs; ++r)
    for (int i = 0; i < 24; ++i) input[size_t(r * 24 + i)] = i < 16 ? 0x3f80 : uint16_t(0x4000 + r % 128);  // B and C are 1
  const auto p = plan(spec, {.limits = {.max_num_reqs = kReqs, .max_num_tokens = kReqs}});
  p->update(batch);
  p->run({.input = TensorView::contiguous(input.data(), DType::bf16, {kReqs, 24}, kGpu),
          .weight = TensorView::contiguous(weight.data(), DType::bf16, {8, 3}, kGpu),
          .bias = {},
          .state = TensorView::contiguous(state.data(), DType::bf16, {kReqs, 2, 8}, kGpu)},
         {.out = TensorView::contiguous(out.data(), DType::bf16, {kReqs, 8}, kGpu)});
  for (int r = 0; r < kReqs; ++r) {
    EXPECT_EQ(out[size_t(r * 8 + 5)], 0x4000 + r % 128) << r;
    EXPECT_EQ(state[size_t((kReqs - 1 - r) * 16 + 8)], 0x4000 + r % 128);
    EXPECT_EQ(state[size_t((kReqs - 1 - r) * 16)], 0);
  }
}

TEST_F(ShortConvCalls, RefuseWhatIsWrong) {
  const BackendOf<ShortConvFamily>& backend = *find_backend<ShortConvFamily>("cuda_sm80");
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
  EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 1, 2, 60}, b.query_start_loc = l; }), "batch.seq_len.shorter_than_query");
  const auto run_code = [&](auto change) {
    ShortConvInputs inputs = in;
    ShortConvOutputs outputs = out;
    change(inputs, outputs);
    return error_code([&] { p->run(inputs, outputs); });
  };
  EXPECT_EQ(run_code([](auto&, auto&) {}), kFine);
  EXPECT_EQ(run_code([](auto& i, auto&) { i.input.device = {}; }), "short_conv.run.tensor");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.input.sizes[0] = 4; }), "short_conv.run.tensor");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.state.sizes[0] = 1; }), "short_conv.run.tensor");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.state.device.index = 1; }), "short_conv.run.tensor");
  EXPECT_EQ(run_code([](auto&, auto& o) { o.out.strides[0] = 32; }), "tensor.overlap");

  // A plan whose batches nobody validates has no room for more than its limits all the same.
  const auto unchecked = plan(spec, {.limits = {.max_num_reqs = 1, .max_num_tokens = 4}, .validate = false});
  EXPECT_EQ(error_code([&] { unchecked->update(batch); }), "update.limits");
}

// Aligned tensors take one kernel, others the other; grids follow from tokens where the host knows them, from the limits in a graph.
TEST_F(ShortConvCalls, LaunchWhatTheyNeed) {
  const auto p = plan(spec, {.limits = limits});
  const auto launched = [&](auto change) {
    ShortConvInputs inputs = in;
    change(inputs);
    fake::state().launches.clear();
    p->run(inputs, out);
    const auto& all = fake::state().launches;
    if (all.size() != 1) return std::to_string(all.size()) + " launches";
    EXPECT_EQ(all[0].threads, unsigned(kShortConvThreads));
    EXPECT_TRUE(all[0].programmatic);
    return all[0].entry + " " + std::to_string(all[0].grid_x);
  };
  EXPECT_EQ(launched([](auto&) {}), "0 launches");  // there is no step yet
  p->update(batch);
  EXPECT_EQ(launched([](auto&) {}), "short_conv_aligned 1");  // 5 tokens, two in a chunk, 4 warps of a block
  EXPECT_EQ(launched([](auto& i) { i.input.data = i.input.template as<char>() + 2; }), "short_conv_unaligned 1");
  EXPECT_EQ(launched([](auto& i) { i.weight.data = i.weight.template as<char>() + 2; }), "short_conv_unaligned 1");
  EXPECT_EQ(launched([](auto& i) { i.input.strides[0] = 196, i.input.sizes[0] = 5; }), "short_conv_unaligned 1");
  EXPECT_EQ(launched([](auto& i) { i.weight.strides[0] = 4; }), "short_conv_unaligned 1");
  p->update({});
  EXPECT_EQ(launched([](auto&) {}), "0 launches");

  const auto stream = open_stream(device);
  const DeviceGraph graph = stream->capture([&] { p->run(in, out, stream->get()); });
  unsigned blocks = 0;
  fake::state().on_launch = [&](const fake::Launch& launch) { blocks = launch.grid_x; };
  stream->replay(graph);
  stream->synchronize();
  EXPECT_EQ(blocks, 13u);  // 50 tokens
}

TEST_F(ShortConvCalls, HoldAGraphToTheTensorsOfItsCapture) {
  const auto stream = open_stream(device);
  const auto p = plan(spec, {.limits = limits});
  p->update({}, stream->get());
  const DeviceGraph graph = stream->capture([&] {
    p->run(in, out, stream->get());
    EXPECT_EQ(error_code([&] { p->update(batch, stream->get()); }), "update.captured");
  });
  EXPECT_EQ(error_code([&] { p->update(batch, stream->get()); }), kFine);
  // A longer step is for other tensors. Replayed, the graph computes those requests that it has rows for.
  ConvStep longer = step;
  longer.starts.back() = 7, longer.drafts.back() = 0;
  p->update(longer.batch(spec), stream->get());
  std::memset(out.out.data, 0x22, 6 * 64 * 2);
  stream->replay(graph);
  stream->synchronize();
  const char* const rows = out.out.as<char>();
  EXPECT_TRUE(std::all_of(rows + 2 * 64 * 2, rows + 6 * 64 * 2, [](char b) { return b == 0x22; }));
  EXPECT_EQ(fake::has_short_conv_texts(), !std::all_of(rows, rows + 2 * 64 * 2, [](char b) { return b == 0x22; }));
  ConvStep beyond = step;
  beyond.slots[0] = 2;
  EXPECT_EQ(error_code([&] { p->update(beyond.batch(spec), stream->get()); }), "update.captured_cache");
  EXPECT_TRUE(p->capturable());

  const auto on_demand = plan(spec, {.limits = limits, .load_on_demand = true});
  EXPECT_FALSE(on_demand->capturable());
  on_demand->update(batch, stream->get());
  stream->capture([&] { EXPECT_EQ(error_code([&] { on_demand->run(in, out, stream->get()); }), "run.on_demand"); });
  EXPECT_EQ(error_code([&] { on_demand->run(in, out, stream->get()); }), kFine);
}

// After an update of which anything has failed, the plan computes the step before, bit for bit; or no step, where the driver goes on
// failing.
template <class Fault>
class ShortConvUpdateGuarantee : public ShortConvCalls {};
using Faults = testing::Types<FailCall<false>, FailCall<true>, FailAllocation>;
TYPED_TEST_SUITE(ShortConvUpdateGuarantee, Faults);

TYPED_TEST(ShortConvUpdateGuarantee, Holds) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  auto& in = this->in;
  auto& out = this->out;
  for (int i = 0; i < 6 * 192; ++i) in.input.template as<uint16_t>()[i] = uint16_t(0x3f00 + i % 251);
  for (int i = 0; i < 64 * 3; ++i) in.weight.template as<uint16_t>()[i] = uint16_t(0x3f00 + i % 101);
  const auto stream = open_stream(this->device);
  const auto results = [&](const ShortConvPlan& p) {
    std::memset(in.state.data, 0x11, 2 * 4 * 64 * 2), std::memset(out.out.data, 0x22, 6 * 64 * 2);
    p.run(in, out, stream->get());
    stream->synchronize();
    const char *const s = in.state.template as<char>(), *const o = out.out.template as<char>();
    return std::string(s, s + 2 * 4 * 64 * 2) + std::string(o, o + 6 * 64 * 2);
  };
  const ConvStep other{.starts = {0, 1, 6}, .lens = {4, 5}, .slots = {0, 1}, .drafts = {1, 0}, .accepted = {2, 0}};
  int failures = 0;
  for (long number = 1;; ++number) {
    const auto p = this->plan(this->spec, {.limits = this->limits});
    p->update(this->batch, stream->get());
    const std::string before = results(*p), text = p->str();
    bool updated = false, failed = false;
    {
      const TypeParam fault(number);
      try {
        p->update(other.batch(this->spec), stream->get());
        updated = true;
      } catch (const std::exception&) {
      }
      failed = fault.has_failed();
    }
    if (!failed) break;
    ++failures;
    if (!updated) {
      EXPECT_EQ(p->str(), text);
      try {
        EXPECT_TRUE(results(*p) == before) << number;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), "plan.no_step");
        EXPECT_TRUE((std::is_same_v<TypeParam, FailCall<true>>));
      }
    }
    p->update(other.batch(this->spec), stream->get());
    const std::string after = results(*p);
    const auto fresh = this->plan(this->spec, {.limits = this->limits});
    fresh->update(other.batch(this->spec), stream->get());
    EXPECT_TRUE(results(*fresh) == after) << number;
    EXPECT_FALSE(after == before);
    if (this->HasFailure()) return;
  }
  EXPECT_GT(failures, 0);
}

}  // namespace
}  // namespace imbrex::cuda

// The short convolution: every CPU backend beside the reference, steps that are cut anywhere, drafts that are taken back, and memory that
// is nobody's.
#include "imbrex/short_conv.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "expect_error.h"

namespace imbrex {
namespace {

// A tensor of random numbers, or of one.
struct Tensor {
  std::vector<char> bytes;
  TensorView view;

  Tensor(DType dtype, std::vector<int64_t> sizes, std::mt19937* random, float fill = 0.f) {
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    bytes.resize(size_t(count * size_of(dtype)));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) store_from_float(bytes.data(), dtype, i, random ? normal(*random) : fill);
    view.data = bytes.data(), view.dtype = dtype, view.rank = int(sizes.size());
    int64_t stride = 1;
    for (int d = view.rank - 1; d >= 0; --d)
      view.sizes[size_t(d)] = sizes[size_t(d)], view.strides[size_t(d)] = stride, stride *= sizes[size_t(d)];
  }
};

struct Request {
  int tokens, slot;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Weights, and tokens of some requests, one after the other.
struct Problem {
  ShortConvSpec spec;
  std::vector<Request> requests;
  int num_slots;
  std::mt19937 random{7};
  int total = 0;
  Tensor weight, bias, bcx;

  Problem(const ShortConvSpec& spec, std::vector<Request> requests, int num_slots)
      : spec(spec),
        requests(std::move(requests)),
        num_slots(num_slots),
        total(count_of(this->requests)),
        weight(spec.dtype, {spec.dim, spec.width}, &random),
        bias(spec.dtype, {spec.dim}, &random),
        bcx(spec.dtype, {total, 3 * spec.dim}, &random) {}

  static int count_of(const std::vector<Request>& list) {
    int count = 0;
    for (const Request& r : list) count += r.tokens;
    return count;
  }
  int begin_of(size_t request) const {
    int begin = 0;
    for (size_t r = 0; r < request; ++r) begin += requests[r].tokens;
    return begin;
  }
  Tensor empty_state() const { return {spec.dtype, {num_slots, spec.state_rows(), spec.dim}, nullptr, kNan}; }
};

struct Part {
  int tokens, drafts, accepted;
};

// One step of some of the requests: the part after `done` tokens of each. Rows of the output go to those of `out`.
void run_step(const Problem& p, ShortConvPlan& plan, const std::vector<int>& done, const std::vector<Part>& parts, Tensor& state,
              Tensor& out) {
  std::vector<int32_t> starts{0}, lens, slots, drafts, accepted;
  std::vector<int> rows;
  for (size_t r = 0; r < p.requests.size(); ++r) {
    starts.push_back(starts.back() + parts[r].tokens);
    lens.push_back(done[r] + parts[r].tokens);
    slots.push_back(parts[r].tokens == 0 ? -1 : p.requests[r].slot);
    drafts.push_back(parts[r].drafts);
    accepted.push_back(parts[r].accepted);
    for (int t = 0; t < parts[r].tokens; ++t) rows.push_back(p.begin_of(r) + done[r] + t);
  }
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots;
  if (p.spec.num_drafts > 0) batch.num_drafts = drafts, batch.accepted_drafts = accepted;
  plan.update(batch, nullptr);
  const int64_t size = size_of(p.spec.dtype), dim = p.spec.dim, count = int64_t(rows.size());
  Tensor bcx(p.spec.dtype, {count + 2, 3 * dim}, nullptr, kNan), result(p.spec.dtype, {count + 2, dim}, nullptr, 42.f);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(bcx.bytes.data() + i * 3 * dim * size, p.bcx.bytes.data() + rows[size_t(i)] * 3 * dim * size, size_t(3 * dim * size));
  plan.run({.bcx = bcx.view, .weight = p.weight.view, .bias = p.spec.bias ? p.bias.view : TensorView{}, .state = state.view},
           {.out = result.view}, nullptr);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(out.bytes.data() + rows[size_t(i)] * dim * size, result.bytes.data() + i * dim * size, size_t(dim * size));
  for (int64_t i = count * dim; i < (count + 2) * dim; ++i) EXPECT_EQ(load_as_float(result.bytes.data(), p.spec.dtype, i), 42.f);
}

struct Result {
  Tensor out, state;
};

// All tokens, in steps of `next(left)` of each request's.
template <class Next>
Result run_all(const Problem& p, ShortConvPlan& plan, Next next) {
  Result result{{p.spec.dtype, {std::max(p.total, 1), p.spec.dim}, nullptr, 0.f}, p.empty_state()};
  std::vector<int> done(p.requests.size(), 0);
  for (bool more = true; more;) {
    more = false;
    std::vector<Part> parts;
    for (size_t r = 0; r < p.requests.size(); ++r) {
      const int left = p.requests[r].tokens - done[r];
      parts.push_back({left > 0 ? std::clamp(next(left), 0, left) : 0, 0, 0});
    }
    run_step(p, plan, done, parts, result.state, result.out);
    for (size_t r = 0; r < p.requests.size(); ++r) done[r] += parts[r].tokens, more = more || done[r] < p.requests[r].tokens;
  }
  return result;
}

const auto kWhole = [](int left) { return left; };

struct Target {
  std::string backend;
  CpuIsa isa;
};
std::vector<Target> targets() {
  std::vector<Target> list;
  for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512}) {
    if (isa > probe_cpu().isa) continue;
    list.push_back({isa == CpuIsa::avx512 ? "cpu_avx512" : "cpu_generic", isa});
  }
  return list;
}
std::unique_ptr<ShortConvPlan> plan_of(const Target& target, const ShortConvSpec& spec, const PlanOptions& options = {}) {
  DeviceInfo device = probe_cpu();
  device.isa = target.isa;
  return find_backend<ShortConvFamily>(target.backend)->plan(spec, device, options);
}
std::unique_ptr<ShortConvPlan> reference(const ShortConvSpec& spec) {
  return find_backend<ShortConvFamily>("reference")->plan(spec, probe_cpu(), {});
}

// The sum of width products is in floats, which may turn a tie: then the output is the next number of its type.
void expect_near(const Problem& p, const Tensor& actual, const Tensor& expected) {
  const double unit = p.spec.dtype == DType::f32 ? 0x1p-22 : p.spec.dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
  for (int64_t i = 0; i < expected.view.num_elements(); ++i) {
    const double a = load_as_double(actual.bytes.data(), p.spec.dtype, i), e = load_as_double(expected.bytes.data(), p.spec.dtype, i);
    ASSERT_NEAR(a, e, unit * std::fabs(e) + 1e-5) << "element " << i;
  }
}

std::vector<ShortConvSpec> specs() {
  return {{.dim = 64, .width = 3},
          {.dim = 2048, .width = 3, .bias = true},
          {.dim = 300, .width = 4, .dtype = DType::f32},
          {.dim = 7, .width = 2, .bias = true, .dtype = DType::f16},
          {.dim = 513, .width = 8, .dtype = DType::bf16}};
}
const std::vector<Request> kMixed{{1, 5}, {130, 2}, {0, 0}, {64, 7}, {2, 0}, {65, 3}, {3, 1}};

TEST(ShortConv, OutputsAndStatesAreThoseOfTheReference) {
  for (const ShortConvSpec& spec : specs()) {
    const Problem p(spec, kMixed, 9);
    const auto by_reference = reference(spec);
    const Result expected = run_all(p, *by_reference, kWhole);
    for (const Target& target : targets()) {
      SCOPED_TRACE(spec.str() + " on " + to_string(target.isa));
      const auto plan = plan_of(target, spec);
      const Result actual = run_all(p, *plan, kWhole);
      expect_near(p, actual.out, expected.out);
      EXPECT_EQ(actual.state.bytes, expected.state.bytes);  // slots of nobody too
    }
  }
}

TEST(ShortConv, StepsThreadsAndSlotsChangeNoBit) {
  for (const ShortConvSpec& spec : specs()) {
    for (const Target& target : targets()) {
      SCOPED_TRACE(spec.str() + " on " + to_string(target.isa));
      const Problem p(spec, kMixed, 9);
      const auto plan = plan_of(target, spec);
      const Result whole = run_all(p, *plan, kWhole);
      ThreadPool pool(3);
      const auto threaded = plan_of(target, spec, {.threads = pool.parallel_for()});
      std::mt19937 random(3);
      for (const int longest : {1, 2, 5, 70}) {
        const Result parts = run_all(p, *threaded, [&](int) { return int(random() % unsigned(longest + 1)); });
        EXPECT_EQ(parts.out.bytes, whole.out.bytes) << "steps of up to " << longest;
        EXPECT_EQ(parts.state.bytes, whole.state.bytes);
      }
    }
  }
}

// What is taken back leaves no trace: a step of drafts of which some are kept, again and again, as if only those had come.
TEST(ShortConv, DraftsCanBeTakenBack) {
  const ShortConvSpec spec{.dim = 96, .width = 4, .num_drafts = 5};
  const Problem p(spec, {{90, 1}, {75, 0}}, 3);
  const auto by_reference = reference(spec);
  const Result expected = run_all(p, *by_reference, kWhole);
  std::vector<Target> all = targets();
  all.push_back({"reference", CpuIsa::generic});
  for (const Target& target : all) {
    const auto plan = plan_of(target, spec);
    const Result once = run_all(p, *plan, kWhole);
    Result result{{spec.dtype, {p.total, spec.dim}, nullptr, 0.f}, p.empty_state()};
    std::mt19937 random(11);
    std::vector<int> done{0, 0}, accepted{0, 0};
    while (done[0] < p.requests[0].tokens || done[1] < p.requests[1].tokens) {
      std::vector<Part> parts;
      for (size_t r = 0; r < 2; ++r) {
        const int left = p.requests[r].tokens - done[r], drafts = std::min(int(random() % 6), left);
        const int tokens = std::min(left, drafts + int(random() % 3));
        parts.push_back({tokens, std::min(drafts, tokens), accepted[r]});
      }
      run_step(p, *plan, done, parts, result.state, result.out);
      for (size_t r = 0; r < 2; ++r) {
        if (parts[r].tokens == 0) continue;
        accepted[r] = parts[r].drafts == 0 ? 0 : int(random() % unsigned(parts[r].drafts + 1));
        done[r] += parts[r].tokens - parts[r].drafts + accepted[r];
        if (done[r] == 0) accepted[r] = 0;  // all of it was drafts and none was kept: nothing has gone by
      }
    }
    EXPECT_EQ(result.out.bytes, once.out.bytes) << target.backend;
    expect_near(p, result.out, expected.out);
  }
}

TEST(ShortConv, ARequestWithoutTokensKeepsItsState) {
  const ShortConvSpec spec{.dim = 32};
  const Problem p(spec, {{4, 1}, {6, 0}}, 2);
  for (const Target& target : targets()) {
    const auto plan = plan_of(target, spec);
    Tensor state = p.empty_state(), out(spec.dtype, {p.total, spec.dim}, nullptr, 0.f);
    run_step(p, *plan, {0, 0}, {{4, 0, 0}, {3, 0, 0}}, state, out);
    const std::vector<char> before = state.bytes;
    run_step(p, *plan, {4, 3}, {{0, 0, 0}, {3, 0, 0}}, state, out);
    const size_t slot = before.size() / 2;
    EXPECT_TRUE(std::equal(before.begin() + long(slot), before.end(), state.bytes.begin() + long(slot)));
    EXPECT_FALSE(std::equal(before.begin(), before.begin() + long(slot), state.bytes.begin()));
  }
}

TEST(ShortConv, WhatIsWrongIsRefusedAndTheStepBeforeStays) {
  const ShortConvSpec spec{.dim = 32, .num_drafts = 2};
  for (const std::string name : {"cpu_generic", "reference"}) {
    const auto plan = find_backend<ShortConvFamily>(name)->plan(spec, probe_cpu(), {});
    std::vector<int32_t> starts{0, 2, 5}, lens{2, 9}, slots{1, 0}, none{0, 0};
    Batch good;
    good.query_start_loc = starts, good.seq_lens = lens, good.state_slots = slots, good.num_drafts = none, good.accepted_drafts = none;
    plan->update(good, nullptr);
    const auto refused = [&](auto change) {
      Batch batch = good;
      std::vector<int32_t> list;
      change(batch, list);
      return test::error_code([&] { plan->update(batch, nullptr); });
    };
    EXPECT_EQ(refused([](Batch& b, auto&) { b.state_slots = {}; }), "batch.state.size");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {1, 1}, b.state_slots = l; }), "batch.state.shared");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {-1, 1}, b.state_slots = l; }), "batch.state.slot");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 3}, b.num_drafts = l; }), "batch.state.num_drafts");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {1, 0}, b.accepted_drafts = l; }), "batch.state.accepted_drafts");  // nothing has gone by
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 3}, b.accepted_drafts = l; }), "batch.state.accepted_drafts");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 2, 1}, b.query_start_loc = l; }), "batch.query_start_loc.monotone");

    std::mt19937 random(1);
    Tensor bcx(spec.dtype, {5, 96}, &random), weight(spec.dtype, {32, 3}, &random), state(spec.dtype, {2, 4, 32}, &random),
        out(spec.dtype, {5, 32}, nullptr);
    const auto run = [&](auto change) {
      ShortConvInputs in{.bcx = bcx.view, .weight = weight.view, .bias = {}, .state = state.view};
      ShortConvOutputs to{.out = out.view};
      change(in, to);
      return test::error_code([&] { plan->run(in, to, nullptr); });
    };
    EXPECT_EQ(run([](auto& in, auto&) { in.bcx.sizes[0] = 4; }), "short_conv.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.weight.sizes[1] = 4; }), "short_conv.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.state.sizes[0] = 1; }), "short_conv.run.tensor");
    EXPECT_EQ(run([](auto& in, auto&) { in.state.strides[0] = 32; }), "tensor.overlap");
    EXPECT_EQ(run([](auto& in, auto&) { in.bias = in.weight; }), "short_conv.run.bias");
    EXPECT_EQ(run([](auto&, auto& to) { to.out.dtype = DType::f16; }), "short_conv.run.tensor");
    EXPECT_EQ(run([](auto&, auto&) {}), "nothing thrown");
  }
  EXPECT_EQ(test::error_code([&] { find_backend<ShortConvFamily>("cpu_generic")->plan(spec, probe_cpu(), {.out_dtype = DType::f32}); }),
            "backend.out_dtype");
  EXPECT_EQ(test::error_code([&] { find_backend<ShortConvFamily>("reference")->plan(spec, describe_device("h200"), {}); }),
            "backend.unsupported");
  const auto invalid = [](const ShortConvSpec& bad) { return test::error_code([&] { bad.validate(); }); };
  EXPECT_EQ(invalid({.dim = 0}), "short_conv.dim");
  EXPECT_EQ(invalid({.dim = 8, .width = 9}), "short_conv.width");
  EXPECT_EQ(invalid({.dim = 8, .dtype = DType::fp8_e4m3}), "short_conv.dtype");
  EXPECT_EQ(invalid({.dim = 8, .num_drafts = -1}), "short_conv.num_drafts");
}

TEST(ShortConv, IsSelectedWithReasons) {
  const ShortConvSpec spec{.dim = 2048, .width = 3, .bias = true, .num_drafts = 4};
  EXPECT_EQ(spec.str(), "short_conv d2048 w3 bf16 bias drafts4");
  EXPECT_EQ(spec.state_bytes(), 6 * 2048 * 2);
  const auto selection = select<ShortConvFamily>(spec, describe_device("avx2,4 threads"));
  EXPECT_EQ(selection.backend->name(), "cpu_generic");
  EXPECT_EQ(select<ShortConvFamily>(spec, describe_device("avx512,4 threads")).backend->name(), "cpu_avx512");
  ASSERT_EQ(selection.candidates[1].reasons.size(), 1u);
  EXPECT_EQ(selection.candidates[1].reasons[0].code, "device.isa");
  EXPECT_EQ(select<ShortConvFamily>(spec, describe_device("h200")).backend->name(), "cuda_sm80");
  DeviceInfo old_gpu = describe_device("h200");
  old_gpu.sm = 75;
  const auto on_old_gpu = select<ShortConvFamily>(spec, old_gpu);
  EXPECT_EQ(on_old_gpu.backend, nullptr);
  ASSERT_EQ(on_old_gpu.candidates[0].reasons.size(), 1u);
  EXPECT_EQ(on_old_gpu.candidates[0].reasons[0].code, "device.sm");
  ASSERT_EQ(on_old_gpu.proposals.size(), 1u);
  EXPECT_TRUE(on_old_gpu.proposals[0].starts_with("device cpu: "));
}

}  // namespace
}  // namespace imbrex

// Running a CPU plan: it allocates nothing, and gives the same bits on whatever threads the host lends it.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "count_allocations.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

constexpr int kBlockSize = 16;

TensorView row_of(void* data, DType dtype, size_t n) { return TensorView::contiguous(data, dtype, {int64_t(n)}); }

AttentionSpec bf16_spec(bool relative) {
  AttentionSpec spec{
      .num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 8, .block_size = kBlockSize, .mask = {}, .score = {}};
  if (relative) spec.score.relative_buckets = 8, spec.score.relative_max_distance = 64;
  return spec;
}

// Backends that run here, with every instruction set of this machine.
struct Runner {
  const Backend* backend;
  DeviceInfo device;
  std::string name;
};
std::vector<Runner> runners() {
  const DeviceInfo probed = probe_cpu();
  std::vector<Runner> all;
  for (const char* name : {"cpu_generic", "cpu_avx512", "cpu_amx"})
    for (CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx}) {
      DeviceInfo device = probed;
      device.isa = isa;
      if (isa <= probed.isa && find_backend(name)->unsupported(bf16_spec(false), device).empty())
        all.push_back({find_backend(name), device, std::string(name) + " on " + to_string(isa)});
    }
  return all;
}

// Long enough to be split and merged, in bf16, which every backend takes.
struct LongStep {
  AttentionSpec spec;
  std::vector<int32_t> starts{0, 3, 103, 104, 105}, lens{9000, 100, 4100, 33}, indptr{0}, indices;
  std::vector<int64_t> slots;
  std::vector<uint16_t> q, k, v;
  std::vector<float> out, lse, bias;
  KvAllocation allocation;
  Batch batch;
  Inputs in;
  Outputs o;

  explicit LongStep(bool relative) : spec(bf16_spec(relative)), allocation(spec, 1, 900) {
    for (int32_t len : lens) {
      for (int b = 0; b * kBlockSize < len; ++b) indices.push_back(int32_t((indices.size() * 7 + 5) % 900));
      indptr.push_back(int32_t(indices.size()));
    }
    std::mt19937 random(2);
    const auto value = [&] { return uint16_t((random() % 2 ? 0xbf00 : 0x3f00) + random() % 128); };
    const auto fill = [&](std::vector<uint16_t>& x, size_t n) {
      x.resize(n);
      for (uint16_t& f : x) f = value();
    };
    fill(q, 105 * 4 * 16);
    fill(k, 105 * 2 * 16);
    fill(v, 105 * 2 * 8);
    bias.assign(8 * 4, 0.25f);
    out.resize(105 * 4 * 8);
    lse.resize(105 * 4);
    const KvCache cache = allocation.layer(0);
    for (const TensorView* t : {&cache.k, &cache.v})
      for (int64_t i = 0; i < t->num_elements(); ++i) t->as<uint16_t>()[i] = value();
    for (int64_t t = 0; t < 105; ++t) slots.push_back(t % 5 == 0 ? -1 : 899 * 16 - t);
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    batch.kv_indptr = row_of(indptr.data(), DType::i32, indptr.size());
    batch.kv_indices = row_of(indices.data(), DType::i32, indices.size());
    batch.slot_mapping = row_of(slots.data(), DType::i64, slots.size());
    in.q = TensorView::contiguous(q.data(), DType::bf16, {105, 4, 16});
    in.kv = cache;
    if (relative) in.relative_bias = TensorView::contiguous(bias.data(), DType::f32, {8, 4});
    o.out = TensorView::contiguous(out.data(), DType::f32, {105, 4, 8});
    o.lse = TensorView::contiguous(lse.data(), DType::f32, {105, 4});
  }
  LongStep(const LongStep&) = delete;

  void call(Plan& plan) {
    plan.write_kv(in.kv, TensorView::contiguous(k.data(), DType::bf16, {105, 2, 16}),
                  TensorView::contiguous(v.data(), DType::bf16, {105, 2, 8}));
    plan.run(in, o);
  }
  std::vector<float> results(const Runner& runner, const PlanOptions& options) {
    const auto plan = runner.backend->plan(spec, runner.device, options);
    plan->update(batch);
    std::fill(out.begin(), out.end(), -7.f);
    call(*plan);
    std::vector<float> both = out;
    both.insert(both.end(), lse.begin(), lse.end());
    return both;
  }
};

TEST(CpuPlanRun, RunningAllocatesNothing) {
  ASSERT_FALSE(runners().empty());
  ThreadPool pool(3);
  for (const Runner& runner : runners())
    for (const bool relative : {false, true})
      for (const bool threads : {false, true}) {
        LongStep step(relative);
        const auto plan = runner.backend->plan(step.spec, runner.device, {.threads = threads ? pool.parallel_for() : ParallelFor{}});
        for (int i = 0; i < 2; ++i) plan->update(step.batch);  // the step, and the one it is prepared beside
        EXPECT_EQ(test::count_allocations([&] { step.call(*plan); }), 0) << runner.name;
        EXPECT_EQ(test::count_allocations([&] { plan->update(step.batch); }), 0) << runner.name;  // warm
      }
  EXPECT_GT(test::count_allocations([] { LongStep step(false); }), 0);  // the counter counts
}

TEST(CpuPlanRun, AnyHookGivesTheSameBits) {
  struct Host {
    int calls = 0, num_workers = 0;
  } host;
  using Invoke = void (*)(void*, int, ParallelFor::Body, void*);
  const Invoke sequential = [](void* context, int n, ParallelFor::Body body, void* argument) {
    static_cast<Host*>(context)->calls++;
    static_cast<Host*>(context)->num_workers = n;
    for (int w = 0; w < n; ++w) body(argument, w);
  };
  const Invoke backwards = [](void* context, int n, ParallelFor::Body body, void* argument) {
    static_cast<Host*>(context)->calls++;
    static_cast<Host*>(context)->num_workers = n;
    for (int w = n; w-- > 0;) body(argument, w);
  };
  const Invoke new_threads = [](void* context, int n, ParallelFor::Body body, void* argument) {
    static_cast<Host*>(context)->calls++;
    static_cast<Host*>(context)->num_workers = n;
    std::vector<std::thread> threads;
    for (int w = 0; w < n; ++w) threads.emplace_back([=] { body(argument, w); });
    for (std::thread& t : threads) t.join();
  };
  for (const Runner& runner : runners()) {
    LongStep step(false);
    const std::vector<float> expected = step.results(runner, {});
    EXPECT_EQ(std::count(expected.begin(), expected.end(), -7.f), 0);
    for (const Invoke invoke : {sequential, backwards, new_threads})
      for (const int num_workers : {2, 5, 40}) {  // 40: more workers than there is work
        host = {};
        const ParallelFor hook{.num_workers = num_workers, .context = &host, .invoke = invoke};
        EXPECT_EQ(step.results(runner, {.threads = hook}), expected) << runner.name << ", " << num_workers << " workers";
        EXPECT_GE(host.calls, 1);
        EXPECT_EQ(host.num_workers, num_workers);
      }
    ThreadPool pool(3);
    EXPECT_EQ(step.results(runner, {.threads = pool.parallel_for()}), expected) << runner.name;
    EXPECT_EQ(step.results(runner, {.threads = {.num_workers = 8}}), expected) << runner.name;  // no hook: the calling thread
    EXPECT_EQ(step.results(runner, {.validate = false}), expected) << runner.name;
  }
}

TEST(CpuPlanRun, LongRequestsAreSplitAndMerged) {
  LongStep step(false);
  const Runner runner = runners().front();
  const auto plan = runner.backend->plan(step.spec, runner.device, {});
  plan->update(step.batch);
  EXPECT_NE(plan->str().find(", 2 merges"), std::string::npos) << plan->str();
}

}  // namespace
}  // namespace imbrex

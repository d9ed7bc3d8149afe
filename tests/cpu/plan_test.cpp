// The plan that all CPU backends share: what it refuses, with which codes, and what a refusal leaves as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "expect_error.h"
#include "imbrex/select.h"
#include "imbrex/short_conv.h"

namespace imbrex {
namespace {

using test::error_code;

const char* const kFine = "nothing thrown";
constexpr int kBlocks = 12, kBlockSize = 16;

AttentionSpec small_spec() {
  return {.num_q_heads = 4,
          .num_kv_heads = 2,
          .head_dim_qk = 16,
          .head_dim_v = 8,
          .q_dtype = DType::f32,
          .kv_dtype = DType::f32,
          .block_size = kBlockSize,
          .mask = {},
          .score = {}};
}

TensorView row_of(void* data, DType dtype, size_t n) { return TensorView::contiguous(data, dtype, {int64_t(n)}); }

// A step with all that a plan is called with: prefill of 20, a padded request, a decode at 100 keys. Every test spoils a copy.
struct Step {
  AttentionSpec spec = small_spec();
  std::vector<int32_t> starts{0, 20, 20, 21}, lens{20, 0, 100},
      table{3, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 7, 1, 2, 9, 4, 11, 8};
  std::vector<int64_t> slots;
  std::vector<float> q, k, v, out, lse, per_head{0.5f, 0.25f, 0.125f, 0.0625f}, bias;
  KvAllocation allocation;
  KvCache cache;
  Batch batch;
  Inputs in;
  Outputs o;

  explicit Step(const AttentionSpec& s = small_spec()) : spec(s), allocation(s, 1, kBlocks), cache(allocation.layer(0)) {
    for (int t = 0; t < 20; ++t) slots.push_back(table[size_t(t / kBlockSize)] * kBlockSize + t % kBlockSize);
    slots.push_back(table[20] * kBlockSize + 99 % kBlockSize);
    std::mt19937 random(1);
    const auto fill = [&](std::vector<float>& x, size_t n) {
      x.resize(n);
      for (float& f : x) f = float(random() % 2001) / 1000 - 1;
    };
    fill(q, 21 * 4 * 16);
    fill(k, 21 * 2 * 16);
    fill(v, 21 * 2 * 8);
    fill(bias, 8 * 4);
    out.resize(21 * 4 * 8);
    lse.resize(21 * 4);
    if (spec.kv_dtype == DType::f32) {
      for (const TensorView* t : {&cache.k, &cache.v})
        for (int64_t i = 0; i < t->num_elements(); ++i) t->as<float>()[i] = float(random() % 2001) / 1000 - 1;
    }
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {3, 7});
    batch.slot_mapping = row_of(slots.data(), DType::i64, slots.size());
    in.q = TensorView::contiguous(q.data(), DType::f32, {21, 4, 16});
    in.kv = cache;
    o.out = TensorView::contiguous(out.data(), DType::f32, {21, 4, 8});
    o.lse = TensorView::contiguous(lse.data(), DType::f32, {21, 4});
  }
  Step(const Step&) = delete;
  TensorView k_view() { return TensorView::contiguous(k.data(), DType::f32, {21, 2, 16}); }
  TensorView v_view() { return TensorView::contiguous(v.data(), DType::f32, {21, 2, 8}); }
  TensorView heads() { return row_of(per_head.data(), DType::f32, 4); }
};

DeviceInfo lowest_cpu() {
  DeviceInfo device = probe_cpu();
  device.isa = CpuIsa::generic;
  return device;
}
std::unique_ptr<Plan> plan_for(const AttentionSpec& spec, const PlanOptions& options = {}) {
  return find_backend("cpu_generic")->plan(spec, lowest_cpu(), options);
}

TensorView on_gpu(TensorView t) {
  t.device = {DeviceType::cuda, 0};
  return t;
}

struct Refusal {
  const char* code;
  void (*spoil)(Step&);
};

TEST(CpuPlan, RunRefusesTensorsThatDoNotFit) {
  const std::vector<Refusal> refusals = {
      {kFine, [](Step&) {}},
      {kFine, [](Step& s) { s.o.lse = {}; }},
      {"run.q", [](Step& s) { s.in.q = {}; }},
      {"run.q", [](Step& s) { s.in.q.dtype = DType::bf16; }},
      {"run.q", [](Step& s) { s.in.q.rank = 2; }},
      {"run.q", [](Step& s) { s.in.q.sizes[0] = 20; }},
      {"run.q", [](Step& s) { s.in.q.sizes[1] = 2; }},
      {"run.q", [](Step& s) { s.in.q.sizes[2] = 8; }},
      {"run.q", [](Step& s) { s.in.q.data = nullptr; }},
      {"run.q", [](Step& s) { s.in.q = on_gpu(s.in.q); }},
      {"run.out", [](Step& s) { s.o.out = {}; }},
      {"run.out", [](Step& s) { s.o.out.dtype = DType::f16; }},
      {"run.out", [](Step& s) { s.o.out.sizes[0] = 20; }},
      {"run.out", [](Step& s) { s.o.out.sizes[1] = 5; }},
      {"run.out", [](Step& s) { s.o.out.sizes[2] = 16; }},
      {"run.out", [](Step& s) { s.o.out = on_gpu(s.o.out); }},
      {"run.stride", [](Step& s) { s.in.q.strides[2] = 2; }},
      {"run.stride", [](Step& s) { s.o.out.strides[2] = 0; }},
      {"run.lse", [](Step& s) { s.o.lse.dtype = DType::bf16; }},
      {"run.lse", [](Step& s) { s.o.lse.rank = 1; }},
      {"run.lse", [](Step& s) { s.o.lse.sizes[0] = 20; }},
      {"run.lse", [](Step& s) { s.o.lse.sizes[1] = 2; }},
      {"run.lse", [](Step& s) { s.o.lse = on_gpu(s.o.lse); }},
      {"run.sinks", [](Step& s) { s.in.sinks = s.heads(); }},
      {"run.alibi_slopes", [](Step& s) { s.in.alibi_slopes = s.heads(); }},
      {"run.head_scales", [](Step& s) { s.in.head_scales = s.heads(); }},
      {"run.relative_bias", [](Step& s) { s.in.relative_bias = s.heads(); }},
      {"kv_cache.k.missing", [](Step& s) { s.in.kv = {}; }},
      {"kv_cache.v.head_dim", [](Step& s) { s.in.kv.v = s.in.kv.k; }},
      {"run.device", [](Step& s) { s.in.kv.k = on_gpu(s.in.kv.k), s.in.kv.v = on_gpu(s.in.kv.v); }},
      {"run.block_id", [](Step& s) { s.in.kv.k = s.cache.k.slice(0, 0, 11), s.in.kv.v = s.cache.v.slice(0, 0, 11); }},
  };
  for (size_t i = 0; i < refusals.size(); ++i) {
    Step step;
    const auto plan = plan_for(step.spec);
    plan->update(step.batch);
    refusals[i].spoil(step);
    const std::vector<float> before = step.out;
    EXPECT_EQ(error_code([&] { plan->run(step.in, step.o); }), refusals[i].code) << "case " << i;
    EXPECT_EQ(step.out == before, refusals[i].code != std::string(kFine)) << "case " << i;
  }
}

TEST(CpuPlan, VectorsOfHeadsAreCheckedWhereTheSpecAsksForThem) {
  struct Parameter {
    const char* code;
    TensorView Inputs::*member;
    void (*ask)(ScoreMod&);
  };
  const Parameter parameters[] = {{"run.sinks", &Inputs::sinks, [](ScoreMod& m) { m.sinks = true; }},
                                  {"run.alibi_slopes", &Inputs::alibi_slopes, [](ScoreMod& m) { m.alibi = true; }},
                                  {"run.head_scales", &Inputs::head_scales, [](ScoreMod& m) { m.head_scales = true; }}};
  for (const Parameter& p : parameters) {
    AttentionSpec spec = small_spec();
    p.ask(spec.score);
    Step step(spec);
    const auto plan = plan_for(spec);
    plan->update(step.batch);
    const auto code = [&](TensorView t) {
      step.in.*p.member = t;
      return error_code([&] { plan->run(step.in, step.o); });
    };
    EXPECT_EQ(code(step.heads()), kFine);
    EXPECT_EQ(code({}), p.code);
    EXPECT_EQ(code(row_of(step.per_head.data(), DType::f32, 3)), p.code);
    EXPECT_EQ(code(row_of(step.per_head.data(), DType::bf16, 4)), p.code);
    EXPECT_EQ(code(TensorView::contiguous(step.per_head.data(), DType::f32, {4, 1})), p.code);
    EXPECT_EQ(code(on_gpu(step.heads())), p.code);
  }
}

AttentionSpec relative_spec() {
  AttentionSpec spec = small_spec();
  spec.score.relative_buckets = 8;
  spec.score.relative_max_distance = 64;
  return spec;
}

TEST(CpuPlan, RelativeBiasIsChecked) {
  Step step(relative_spec());
  const auto plan = plan_for(step.spec);
  plan->update(step.batch);
  const auto code = [&](TensorView t) {
    step.in.relative_bias = t;
    return error_code([&] { plan->run(step.in, step.o); });
  };
  const TensorView good = TensorView::contiguous(step.bias.data(), DType::f32, {8, 4});
  EXPECT_EQ(code(good), kFine);
  EXPECT_EQ(code({}), "run.relative_bias");
  EXPECT_EQ(code(on_gpu(good)), "run.relative_bias");
  EXPECT_EQ(code(good.slice(0, 0, 7)), "run.relative_bias");
  EXPECT_EQ(code(good.slice(1, 0, 3)), "run.relative_bias");
  EXPECT_EQ(code(row_of(step.bias.data(), DType::f32, 32)), "run.relative_bias");
}

TEST(CpuPlan, WriteKvRefusesTensorsThatDoNotFit) {
  struct Call {
    TensorView k, v;
    KvCache cache;
  };
  struct WriteRefusal {
    const char* code;
    void (*spoil)(Call&);
  };
  const std::vector<WriteRefusal> refusals = {
      {kFine, [](Call&) {}},
      {"write_kv.k", [](Call& c) { c.k = {}; }},
      {"write_kv.k", [](Call& c) { c.k.dtype = DType::bf16; }},
      {"write_kv.k", [](Call& c) { c.k.sizes[0] = 20; }},
      {"write_kv.k", [](Call& c) { c.k.sizes[1] = 4; }},
      {"write_kv.k", [](Call& c) { c.k.sizes[2] = 8; }},
      {"write_kv.k", [](Call& c) { c.k.data = nullptr; }},
      {"write_kv.k", [](Call& c) { c.k = on_gpu(c.k); }},
      {"write_kv.v", [](Call& c) { c.v = {}; }},
      {"write_kv.v", [](Call& c) { c.v.dtype = DType::f16; }},
      {"write_kv.v", [](Call& c) { c.v.sizes[0] = 1; }},
      {"write_kv.v", [](Call& c) { c.v.sizes[2] = 16; }},
      {"write_kv.v", [](Call& c) { c.v = on_gpu(c.v); }},
      {"write_kv.device", [](Call& c) { c.cache.k = on_gpu(c.cache.k), c.cache.v = on_gpu(c.cache.v); }},
      {"write_kv.slot", [](Call& c) { c.cache.k = c.cache.k.slice(0, 0, 8), c.cache.v = c.cache.v.slice(0, 0, 8); }},
      {"kv_cache.num_blocks.differ", [](Call& c) { c.cache.k = c.cache.k.slice(0, 0, 8); }},
  };
  for (size_t i = 0; i < refusals.size(); ++i) {
    Step step;
    const auto plan = plan_for(step.spec);
    plan->update(step.batch);
    Call call{step.k_view(), step.v_view(), step.cache};
    refusals[i].spoil(call);
    const int64_t last_token = step.cache.k.stride(0) * 8 + step.cache.k.stride(1) * 3;
    const float before = step.cache.k.as<float>()[last_token];
    EXPECT_EQ(error_code([&] { plan->write_kv(call.cache, call.k, call.v); }), refusals[i].code) << "case " << i;
    EXPECT_EQ(step.cache.k.as<float>()[last_token] == before, i > 0) << "case " << i;
  }
  Step step;
  const auto plan = plan_for(step.spec);
  step.batch.slot_mapping = {};
  plan->update(step.batch);
  EXPECT_EQ(error_code([&] { plan->write_kv(step.cache, step.k_view(), step.v_view()); }), "write_kv.slot_mapping");
  EXPECT_EQ(error_code([&] { plan->run(step.in, step.o); }), kFine);
}

TEST(CpuPlan, RaggedKeysCannotBeWritten) {
  AttentionSpec spec = small_spec();
  spec.block_size = 0;
  Step step;
  std::vector<int32_t> rows{5, 25, 25, 125};
  const auto plan = plan_for(spec);
  step.batch.block_table = step.batch.slot_mapping = {};
  step.batch.kv_start_loc = row_of(rows.data(), DType::i32, 4);
  plan->update(step.batch);
  std::vector<float> memory(125 * 2 * 24);
  const KvCache cache{.k = TensorView::contiguous(memory.data(), DType::f32, {125, 2, 16}),
                      .v = TensorView::contiguous(memory.data() + 125 * 32, DType::f32, {125, 2, 8}),
                      .k_scale = {},
                      .v_scale = {}};
  EXPECT_EQ(error_code([&] { plan->write_kv(cache, step.k_view(), step.v_view()); }), "write_kv.ragged");
  step.in.kv = cache;
  EXPECT_EQ(error_code([&] { plan->run(step.in, step.o); }), kFine);
}

TEST(CpuPlan, ARefusedUpdateChangesNothing) {
  Step step;
  const auto plan = plan_for(step.spec, {.limits = {.max_num_reqs = 3, .max_num_tokens = 21, .max_seq_len = 100}, .threads = {}});
  plan->update(step.batch);
  plan->run(step.in, step.o);
  const std::vector<float> expected = step.out;
  const std::string text = plan->str();
  const auto code = [&](const Batch& batch) { return error_code([&] { plan->update(batch); }); };

  std::vector<int32_t> starts{0, 1, 1, 1, 1}, lens{7, 0, 0, 0};
  Batch batch = step.batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  EXPECT_EQ(code(batch), "batch.num_reqs.limit");
  starts = {0, 22};
  lens = {22};
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  EXPECT_EQ(code(batch), "batch.num_tokens.limit");
  starts = {0, 1};
  lens = {101};
  EXPECT_EQ(code(batch), "batch.seq_len.limit");
  batch = step.batch;
  batch.block_table = {};
  EXPECT_EQ(code(batch), "batch.keys.missing");
  batch = step.batch;
  batch.block_table = on_gpu(batch.block_table);
  batch.slot_mapping = on_gpu(batch.slot_mapping);
  EXPECT_EQ(code(batch), "update.device");

  EXPECT_EQ(plan->str(), text);
  std::fill(step.out.begin(), step.out.end(), -7.f);
  plan->run(step.in, step.o);
  EXPECT_EQ(step.out, expected);
}

TEST(CpuPlan, PaddedRequestsNeedNoArrays) {
  std::vector<int32_t> starts{0, 0, 0, 0}, lens{0, 0, 0};
  Batch batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  for (const int block_size : {kBlockSize, 0}) {
    AttentionSpec spec = small_spec();
    spec.block_size = block_size;
    const auto plan = plan_for(spec);
    for (const Batch& b : {batch, Batch{}}) {
      plan->update(b);
      Step step;
      std::vector<float> memory(16 * 2);
      if (block_size == 0) {
        step.in.kv.k = TensorView::contiguous(memory.data(), DType::f32, {1, 2, 16});
        step.in.kv.v = TensorView::contiguous(memory.data(), DType::f32, {1, 2, 8});
      }
      plan->run(step.in, step.o);
      EXPECT_EQ(step.out, std::vector<float>(step.out.size()));
    }
  }
}

TEST(CpuPlan, StrCountsTheWork) {
  Step step;
  const auto plan = plan_for(step.spec);
  EXPECT_EQ(plan->str(), "cpu_generic (generic): 0 work items x 2 kv heads, 0 merges");
  plan->update(step.batch);
  EXPECT_EQ(plan->str(), "cpu_generic (generic): 2 work items x 2 kv heads, 0 merges");
}

TEST(CpuPlan, OnlyPresentDevicesThatRunTheSpecGetPlans) {
  const Backend& generic = *find_backend("cpu_generic");
  const auto code = [&](const Backend& backend, const AttentionSpec& spec, const DeviceInfo& device) {
    return error_code([&] { backend.plan(spec, device, {}); });
  };
  EXPECT_EQ(code(generic, small_spec(), lowest_cpu()), kFine);
  EXPECT_EQ(code(generic, small_spec(), describe_device("avx512,32 threads")), "backend.device_absent");
  EXPECT_EQ(code(generic, small_spec(), describe_device("h200")), "backend.unsupported");
  EXPECT_EQ(code(*find_backend("cpu_avx512"), small_spec(), lowest_cpu()), "backend.unsupported");
  AttentionSpec packed = small_spec();
  packed.kv_dtype = DType::bf16;
  packed.kv_format = KvFormat::amx_packed;
  EXPECT_EQ(code(generic, packed, lowest_cpu()), "backend.unsupported");
  AttentionSpec bad = small_spec();
  bad.num_kv_heads = 3;
  EXPECT_EQ(code(generic, bad, lowest_cpu()), "spec.num_kv_heads.divides");
}

#if !defined(__x86_64__)
// Whoever says that a CPU of another architecture is here is told, instead of being given other kernels.
TEST(CpuPlan, ADeviceOfAnotherArchitectureIsRefused) {
  DeviceInfo device = probe_cpu();
  device.isa = CpuIsa::amx;
  const PlanOptions options{.limits = {1, 1, 1}, .threads = {}};
  for (const char* name : {"cpu_avx512", "cpu_amx"}) {
    AttentionSpec spec = small_spec();
    spec.q_dtype = spec.kv_dtype = DType::bf16;
    EXPECT_EQ(error_code([&] { find_backend(name)->plan(spec, device, options); }), "device.cpu_isa.absent") << name;
    device.present = false;
    EXPECT_EQ(error_code([&] { find_backend(name)->plan(spec, device, options); }), "backend.device_absent") << name;
    device.present = true;
  }
  const ShortConvSpec spec{.dim = 64};
  EXPECT_EQ(error_code([&] { find_backend<ShortConvFamily>("cpu_avx512")->plan(spec, device, options); }), "device.cpu_isa.absent");
}
#endif

}  // namespace
}  // namespace imbrex

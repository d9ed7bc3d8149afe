// The reference backend against results worked out by hand: the law itself needs a witness.
#include "attention/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "conformance/attention/case_runner.h"
#include "expect_error.h"

namespace imbrex::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// One head of 8; q = (q0, 0, ...), key j = (j, 0, ...), value j = (10 + j, 1, 0, ...), scale 1: logits are q0 * j.
CaseInputs counting(int q_len, int seq_len, float q0) {
  Case c;
  c.spec.num_q_heads = c.spec.num_kv_heads = 1;
  c.spec.head_dim_qk = c.spec.head_dim_v = 8;
  c.spec.q_dtype = c.spec.kv_dtype = DType::f32;
  c.spec.score.scale = 1.f;
  c.requests = {{q_len, seq_len, 0}};
  CaseInputs in = make_inputs(c);
  for (HostTensor* t : {&in.q, &in.k, &in.v}) std::fill(t->bytes.begin(), t->bytes.end(), 0);
  for (int i = 0; i < q_len; ++i) in.q.set(i * 8, q0);
  for (int j = 0; j < seq_len; ++j) {
    in.k.set(j * 8, j);
    in.v.set(j * 8, 10 + j);
    in.v.set(j * 8 + 1, 1);
  }
  return in;
}

HostTensor one_float(float value) {
  HostTensor t = HostTensor::make(DType::f32, {1});
  t.set(0, value);
  return t;
}

RunResult run(const CaseInputs& in) {
  RunOptions options;
  options.check_cache = false;
  RunResult result = run_case(reference_backend(), probe_cpu(), in, options);
  EXPECT_TRUE(result.violations.empty());
  return result;
}

// Softmax of the logits given, over values 10 + key.
void expect_row(const CaseInputs& in, std::vector<std::pair<int, double>> key_logits, double sink_term = 0) {
  const RunResult result = run(in);
  double denominator = sink_term, sum = 0, ones = 0;
  for (const auto& [key, logit] : key_logits) {
    denominator += std::exp(logit);
    sum += std::exp(logit) * (10 + key);
    ones += std::exp(logit);
  }
  const size_t last = result.lse.size() - 1;
  EXPECT_NEAR(result.out[last * 8], sum / denominator, 1e-5);
  EXPECT_NEAR(result.out[last * 8 + 1], ones / denominator, 1e-6);
  EXPECT_EQ(result.out[last * 8 + 2], 0.f);
  EXPECT_NEAR(result.lse[last], std::log(denominator), 1e-6);
}

TEST(Reference, Softmax) { expect_row(counting(1, 3, 0.5f), {{0, 0.0}, {1, 0.5}, {2, 1.0}}); }

TEST(Reference, MasksAreBottomRightAligned) {
  CaseInputs in = counting(2, 5, 0.5f);  // queries at positions 3 and 4
  const RunResult result = run(in);
  EXPECT_NEAR(result.lse[0], std::log(1 + std::exp(0.5) + std::exp(1.0) + std::exp(1.5)), 1e-6);
  in.spec.mask.window_left = 1;
  expect_row(in, {{3, 1.5}, {4, 2.0}});
  in.spec.mask = {.causal = true, .chunk = 3};
  expect_row(in, {{3, 1.5}, {4, 2.0}});
  in.spec.mask.chunk = 4;
  expect_row(in, {{4, 2.0}});
  in = counting(1, 8, 0.5f);
  in.spec.mask = {.chunk = 3, .chunk_lookback = 1};  // the query at 7 is in chunk 2: it sees chunks 1 and 2
  expect_row(in, {{3, 1.5}, {4, 2.0}, {5, 2.5}, {6, 3.0}, {7, 3.5}});
  in = counting(1, 1, 1.f);
  in.spec.mask = {.causal = false, .window_left = 0, .window_right = 0};
  expect_row(in, {{0, 0.0}});
}

// Logits are (3 * 0.5) * (j * 0.25).
TEST(Reference, Fp8QueriesHaveAScale) {
  CaseInputs in = counting(1, 3, 3.f);
  in.spec.q_dtype = in.spec.kv_dtype = DType::fp8_e4m3;
  for (HostTensor* t : {&in.q, &in.k, &in.v}) *t = as_cached(*t, DType::fp8_e4m3, {});  // small whole numbers: nothing is rounded
  in.q_scale = one_float(0.5f), in.k_scale = one_float(0.25f);
  expect_row(in, {{0, 0.0}, {1, 0.375}, {2, 0.75}});
}

TEST(Reference, ScoreModifiersInTheirOrder) {
  CaseInputs in = counting(1, 3, 2.f);
  in.spec.score.head_scales = true;
  in.spec.score.soft_cap = 3.f;
  in.spec.score.alibi = true;
  in.head_scales = one_float(0.5f);
  in.alibi_slopes = one_float(0.25f);
  const auto logit = [](int j) { return 3 * std::tanh(0.5 * 2 * j / 3) + 0.25 * (j - 2); };
  expect_row(in, {{0, logit(0)}, {1, logit(1)}, {2, logit(2)}});
}

TEST(Reference, SinkJoinsTheDenominatorOnly) {
  CaseInputs in = counting(1, 2, 1.f);
  in.spec.score.sinks = true;
  in.sinks = one_float(2.f);
  expect_row(in, {{0, 0.0}, {1, 1.0}}, std::exp(2.0));
}

TEST(Reference, RelativeBiasByBucket) {
  CaseInputs in = counting(1, 3, 0.f);
  in.spec.score.relative_buckets = 4;
  in.spec.score.relative_max_distance = 8;
  in.relative_bias = HostTensor::make(DType::f32, {4, 1});
  for (int b = 0; b < 4; ++b) in.relative_bias.set(b, b * 0.5);
  expect_row(in, {{0, 1.0}, {1, 0.5}, {2, 0.0}});  // distances 2, 1, 0: 2 is the first logarithmic bucket
}

TEST(Reference, RowsWithoutKeysAreZeroWithOrWithoutASink) {
  for (bool sink : {false, true}) {
    CaseInputs in = counting(2, 2, 1.f);
    in.spec.mask.custom = true;
    in.custom_mask = HostTensor::make(DType::u8, {4});
    in.custom_mask.set(3, 1);  // the first query sees nothing, the second itself
    in.spec.score.sinks = sink;
    if (sink) in.sinks = one_float(1.f);
    const RunResult result = run(in);
    for (int d = 0; d < 8; ++d) EXPECT_EQ(result.out[size_t(d)], 0.f);
    EXPECT_EQ(result.lse[0], -kInf);
    EXPECT_NEAR(result.lse[1], sink ? std::log(2 * std::exp(1.0)) : 1.0, 1e-6);
  }
}

TEST(Reference, NonFiniteKeysReachOnlyTheRowsThatSeeThem) {
  CaseInputs in = counting(3, 3, 1.f);
  in.k.set(2 * 8, NAN);
  const RunResult result = run(in);
  EXPECT_TRUE(std::isfinite(result.out[0]) && std::isfinite(result.out[8]));
  EXPECT_TRUE(std::isnan(result.out[16]));
  EXPECT_TRUE(std::isnan(result.lse[2]));
}

TEST(Reference, Fp8ElementsStandForThemselvesTimesTheScale) {
  CaseInputs in = counting(1, 3, 0.5f);
  in.spec.kv_dtype = DType::fp8_e4m3;
  in.k_scale = one_float(0.25f);  // 0, 4, 8 are stored
  in.v_scale = one_float(0.01f);  // 10, 11, 12 saturate at 4.48; 1 is stored as 96, half way between 96 and 104: to even
  const RunResult result = run(in);
  EXPECT_NEAR(result.lse[0], std::log(1 + std::exp(0.5) + std::exp(1.0)), 1e-6);
  EXPECT_NEAR(result.out[0], 4.48, 1e-6);
  EXPECT_NEAR(result.out[1], 0.96, 1e-6);
}

TEST(Reference, RefusesWhatItDoesNotRun) {
  CaseInputs in = counting(1, 3, 1.f);
  const auto plan = reference_backend().plan(in.spec, probe_cpu(), {});
  AttentionInputs inputs;
  const std::vector<int32_t> starts{0, 1}, lens{1};
  std::vector<int32_t> table{0};
  Batch batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  batch.block_table = TensorView::contiguous(table.data(), DType::i32, {1, 1});
  plan->update(batch);
  EXPECT_EQ(error_code([&] { plan->run({}, {}); }), "run.q");
  inputs.q = in.q.view();
  EXPECT_EQ(error_code([&] { plan->run(inputs, {}); }), "run.out");
  std::vector<float> out(8);
  AttentionOutputs outputs{.out = TensorView::contiguous(out.data(), DType::f32, {1, 1, 8}), .lse = {}};
  EXPECT_EQ(error_code([&] { plan->run(inputs, outputs); }), "kv_cache.k.missing");
  const KvAllocation cache(in.spec, 1, 1);
  EXPECT_EQ(error_code([&] { plan->write_kv(cache.layer(0), in.k.view(), in.v.view()); }), "write_kv.slot_mapping");
  EXPECT_EQ(error_code([&] { plan->write_kv(cache.layer(0), {}, in.v.view()); }), "write_kv.k");
  inputs.kv = cache.layer(0);
  inputs.sinks = one_float(1.f).view();
  EXPECT_EQ(error_code([&] { plan->run(inputs, outputs); }), "run.sinks");
  inputs.sinks = {};
  table[0] = 7;
  plan->update(batch);
  EXPECT_EQ(error_code([&] { plan->run(inputs, outputs); }), "run.block_id");
  EXPECT_EQ(error_code([&] { reference_backend().plan(in.spec, describe_device("avx512,32 threads"), {}); }), "backend.device_absent");
}

TensorView on_gpu(TensorView t) {
  t.device = {DeviceType::cuda, 0};
  return t;
}

TEST(Reference, RefusesMemoryOfOtherDevices) {
  CaseInputs in = counting(1, 3, 1.f);
  in.spec.score.sinks = true;
  const KvAllocation memory(in.spec, 1, 1);
  const HostTensor sinks = one_float(1.f), q = HostTensor::make(DType::f32, {1, 1, 8});
  const std::vector<int32_t> starts{0, 1}, lens{1};
  std::vector<int32_t> table{0};
  std::vector<int64_t> slots{0};
  std::vector<float> out(8), lse(1);
  Batch batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  batch.block_table = TensorView::contiguous(table.data(), DType::i32, {1, 1});
  batch.slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {1});
  const auto plan = reference_backend().plan(in.spec, probe_cpu(), {});
  plan->update(batch);

  const KvCache cache = memory.layer(0);
  KvCache far = cache;
  far.k = on_gpu(far.k);
  far.v = on_gpu(far.v);
  const AttentionInputs inputs{
      .q = q.view(), .q_scale = {}, .kv = cache, .sinks = sinks.view(), .alibi_slopes = {}, .head_scales = {}, .relative_bias = {}};
  const AttentionOutputs outputs{.out = TensorView::contiguous(out.data(), DType::f32, {1, 1, 8}),
                                 .lse = TensorView::contiguous(lse.data(), DType::f32, {1, 1})};
  const auto run = [&](auto spoil) {
    AttentionInputs i = inputs;
    AttentionOutputs o = outputs;
    spoil(i, o);
    return error_code([&] { plan->run(i, o); });
  };
  EXPECT_EQ(run([](AttentionInputs&, AttentionOutputs&) {}), "nothing thrown");
  EXPECT_EQ(run([](AttentionInputs& i, AttentionOutputs&) { i.q = on_gpu(i.q); }), "run.q");
  EXPECT_EQ(run([](AttentionInputs& i, AttentionOutputs&) { i.sinks = on_gpu(i.sinks); }), "run.sinks");
  EXPECT_EQ(run([](AttentionInputs& i, AttentionOutputs&) { i.q_scale = i.sinks; }), "run.q_scale");
  EXPECT_EQ(run([&](AttentionInputs& i, AttentionOutputs&) { i.kv = far; }), "run.device");
  EXPECT_EQ(run([](AttentionInputs&, AttentionOutputs& o) { o.out = on_gpu(o.out); }), "run.out");
  EXPECT_EQ(run([](AttentionInputs&, AttentionOutputs& o) { o.lse = on_gpu(o.lse); }), "run.lse");
  EXPECT_EQ(error_code([&] { plan->write_kv(far, q.view(), q.view()); }), "write_kv.device");
  EXPECT_EQ(error_code([&] { plan->write_kv(cache, on_gpu(q.view()), q.view()); }), "write_kv.k");
  batch.block_table = on_gpu(batch.block_table);
  batch.slot_mapping = on_gpu(batch.slot_mapping);
  EXPECT_EQ(error_code([&] { plan->update(batch); }), "update.device");
}

// Nothing is written when some slot or block is wrong, and nothing outside the cache is read: batches may come unvalidated.
TEST(Reference, ChecksBlocksAndSlotsBeforeItWrites) {
  CaseInputs in = counting(2, 2, 1.f);
  in.spec.block_size = 1;
  const KvAllocation memory(in.spec, 1, 3);
  const KvCache cache = memory.layer(0);
  const std::vector<int32_t> starts{0, 2}, lens{2};
  for (bool validated : {true, false}) {
    PlanOptions options;
    options.limits = {.max_num_reqs = 1, .max_num_tokens = 2, .max_seq_len = 2};
    options.validate = validated;
    const auto plan = reference_backend().plan(in.spec, probe_cpu(), options);
    const auto codes = [&](std::vector<int32_t> table, std::vector<int64_t> slots) {
      Batch batch;
      batch.query_start_loc = starts;
      batch.seq_lens = lens;
      batch.block_table = TensorView::contiguous(table.data(), DType::i32, {1, 2});
      batch.slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {2});
      plan->update(batch);
      std::vector<float> out(16, -7.f);
      const AttentionOutputs outputs{.out = TensorView::contiguous(out.data(), DType::f32, {2, 1, 8}), .lse = {}};
      AttentionInputs inputs;
      inputs.q = in.q.view();
      inputs.kv = cache;
      cache.k.as<float>()[0] = -7.f;
      const std::string run = error_code([&] { plan->run(inputs, outputs); });
      const std::string write = error_code([&] { plan->write_kv(cache, in.k.view(), in.v.view()); });
      EXPECT_EQ(out[0] == -7.f, run != "nothing thrown");
      EXPECT_EQ(cache.k.as<float>()[0] == -7.f, write != "nothing thrown");
      return std::pair(run, write);
    };
    const std::pair<std::string, std::string> wrong("run.block_id", "write_kv.slot");
    EXPECT_EQ(codes({2, 0}, {0, 2}), std::pair(std::string("nothing thrown"), std::string("nothing thrown")));
    EXPECT_EQ(codes({2, 3}, {0, 3}), wrong);
    if (validated) continue;  // update refuses those below
    EXPECT_EQ(codes({2, -1}, {0, -2}), wrong);
    EXPECT_EQ(codes({2, INT32_MAX}, {0, INT64_MAX}), wrong);
  }
}

}  // namespace
}  // namespace imbrex::test

// What a CUDA plan refuses, with the codes of every plan; what it launches for a batch and for a graph. On the fake driver.
#include <gtest/gtest.h>

#include "count_allocations.h"
#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "expect_error.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::error_code;
constexpr const char* kFine = "nothing thrown";

constexpr Device kGpu{DeviceType::cuda, 0};
constexpr int kBlocks = 12, kBlockSize = 16;

AttentionSpec small_spec() {
  return {.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 8, .q_dtype = DType::f32, .kv_dtype = DType::f32};
}

TensorView on_host(TensorView t) {
  t.device = {};
  return t;
}
TensorView row_of(void* data, DType dtype, int64_t n, Device device = {}) {
  TensorView t = TensorView::contiguous(data, dtype, {n}, device);
  return t;
}

// A step with all that a plan is called with: prefill of 20, a padded request, a decode at 100 keys. Every test spoils a copy.
struct Step {
  AttentionSpec spec;
  std::vector<int32_t> starts{0, 20, 20, 21}, lens{20, 0, 100},
      table{3, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 7, 1, 2, 9, 4, 11, 8};
  std::vector<int64_t> slots;
  ContextPtr context = Context::of_device(0);
  DeviceBuffer memory{context, 1 << 20};
  Batch batch;
  Inputs in;
  Outputs o;
  TensorView k, v, heads, bias;

  explicit Step(const AttentionSpec& s = small_spec()) : spec(s) {
    const CurrentContext current(*context);
    fill_bytes(memory.address(), 0, memory.bytes(), nullptr);
    for (int t = 0; t < 20; ++t) slots.push_back(table[size_t(t / kBlockSize)] * kBlockSize + t % kBlockSize);
    slots.push_back(8 * kBlockSize + 3);
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {3, 7});
    batch.slot_mapping = row_of(slots.data(), DType::i64, 21);
    char* const m = memory.as<char>();
    in.q = TensorView::contiguous(m, DType::f32, {21, 4, 16}, kGpu);
    in.kv.k = TensorView::contiguous(m + (1 << 16), DType::f32, {kBlocks, kBlockSize, 2, 16}, kGpu);
    in.kv.v = TensorView::contiguous(m + (2 << 16), DType::f32, {kBlocks, kBlockSize, 2, 8}, kGpu);
    o.out = TensorView::contiguous(m + (3 << 16), DType::f32, {21, 4, 8}, kGpu);
    o.lse = TensorView::contiguous(m + (4 << 16), DType::f32, {21, 4}, kGpu);
    k = TensorView::contiguous(m + (5 << 16), DType::f32, {21, 2, 16}, kGpu);
    v = TensorView::contiguous(m + (6 << 16), DType::f32, {21, 2, 8}, kGpu);
    heads = row_of(m + (7 << 16), DType::f32, 4, kGpu);
    bias = TensorView::contiguous(m + (8 << 16), DType::f32, {8, 4}, kGpu);
  }
  Step(const Step&) = delete;
};

class PlanRefusals : public testing::Test {
 protected:
  ~PlanRefusals() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
  std::unique_ptr<imbrex::Plan> plan_for(const AttentionSpec& spec, const PlanOptions& options = {.limits = kLimits, .threads = {}}) {
    fake::run_on_host(spec);
    return find_backend("cuda_sm80")->plan(spec, probe_cuda().at(0), options);
  }
  static constexpr PlanLimits kLimits{.max_num_reqs = 4, .max_num_tokens = 64, .max_seq_len = 2000};
};

TEST_F(PlanRefusals, Run) {
  const std::pair<const char*, void (*)(Step&)> refusals[] = {
      {kFine, [](Step&) {}},
      {kFine, [](Step& s) { s.o.lse = {}; }},
      {"run.q", [](Step& s) { s.in.q = {}; }},
      {"run.q", [](Step& s) { s.in.q.sizes[0] = 20; }},
      {"run.q", [](Step& s) { s.in.q = on_host(s.in.q); }},
      {"run.q", [](Step& s) { s.in.q.device.index = 1; }},
      {"run.out", [](Step& s) { s.o.out.dtype = DType::f16; }},
      {"run.out", [](Step& s) { s.o.out = on_host(s.o.out); }},
      {"run.stride", [](Step& s) { s.in.q.strides[2] = 2; }},
      {"run.lse", [](Step& s) { s.o.lse = on_host(s.o.lse); }},
      {"run.lse", [](Step& s) { s.o.lse.sizes[0] = 20; }},
      {"run.sinks", [](Step& s) { s.in.sinks = s.heads; }},
      {"run.relative_bias", [](Step& s) { s.in.relative_bias = s.bias; }},
      {"run.q_scale", [](Step& s) { s.in.q_scale = s.heads.slice(0, 0, 1); }},
      {"run.device", [](Step& s) { s.in.kv.k = on_host(s.in.kv.k), s.in.kv.v = on_host(s.in.kv.v); }},
      {"run.block_id", [](Step& s) { s.in.kv.k = s.in.kv.k.slice(0, 0, 11), s.in.kv.v = s.in.kv.v.slice(0, 0, 11); }},
      {"kv_cache.k.missing", [](Step& s) { s.in.kv = {}; }},
  };
  for (const auto& [code, spoil] : refusals) {
    Step step;
    const auto plan = plan_for(step.spec);
    plan->update(step.batch);
    spoil(step);
    fake::state().launches.clear();
    EXPECT_EQ(error_code([&] { plan->run(step.in, step.o); }), code);
    EXPECT_EQ(fake::state().launches.empty(), std::string(code) != kFine) << code;
  }
}

TEST_F(PlanRefusals, ScalesOfFp8Queries) {
  AttentionSpec spec = small_spec();
  spec.q_dtype = spec.kv_dtype = DType::fp8_e4m3;
  Step step(spec);
  step.in.q.dtype = step.in.kv.k.dtype = step.in.kv.v.dtype = DType::fp8_e4m3;
  const auto plan = plan_for(spec);
  plan->update(step.batch);
  float ones[2] = {1.f, 1.f}, none[1] = {0.f};
  const auto code = [&](TensorView scale) {
    step.in.q_scale = scale;
    return error_code([&] { plan->run(step.in, step.o); });
  };
  const TensorView two = step.heads.slice(0, 0, 2);
  EXPECT_EQ(code({}), kFine);
  EXPECT_EQ(code(two), kFine);
  EXPECT_EQ(code(step.heads.slice(0, 0, 1)), kFine);
  EXPECT_EQ(code(row_of(ones, DType::f32, 1, {})), kFine);
  EXPECT_EQ(code(row_of(ones, DType::f32, 2, {})), "cuda.scales");
  EXPECT_EQ(code(row_of(none, DType::f32, 1, {})), "run.q_scale");
  EXPECT_EQ(code(step.heads), "run.q_scale");
  step.in.q_scale = {};
  for (const DType type : {DType::f16, DType::bf16, DType::f32}) {
    step.o.out.dtype = type;
    EXPECT_EQ(error_code([&] { plan->run(step.in, step.o); }), kFine);
  }
  step.o.out.dtype = DType::fp8_e4m3;
  EXPECT_EQ(error_code([&] { plan->run(step.in, step.o); }), "run.out");
}

TEST_F(PlanRefusals, VectorsOfHeadsAndTheBiasMustBeOnTheDevice) {
  AttentionSpec spec = small_spec();
  spec.score = {.head_scales = true, .alibi = true, .sinks = true};
  Step step(spec);
  const auto plan = plan_for(spec);
  plan->update(step.batch);
  const auto code = [&](TensorView Inputs::*member, TensorView t) {
    step.in.head_scales = step.in.alibi_slopes = step.in.sinks = step.heads;
    step.in.*member = t;
    return error_code([&] { plan->run(step.in, step.o); });
  };
  EXPECT_EQ(code(&Inputs::sinks, step.heads), kFine);
  EXPECT_EQ(code(&Inputs::sinks, {}), "run.sinks");
  EXPECT_EQ(code(&Inputs::sinks, on_host(step.heads)), "run.sinks");
  EXPECT_EQ(code(&Inputs::alibi_slopes, on_host(step.heads)), "run.alibi_slopes");
  EXPECT_EQ(code(&Inputs::head_scales, on_host(step.heads)), "run.head_scales");

  AttentionSpec relative = small_spec();
  relative.score.relative_buckets = 8;
  relative.score.relative_max_distance = 64;
  Step t5(relative);
  const auto with_bias = plan_for(relative);
  with_bias->update(t5.batch);
  const auto bias_code = [&](TensorView t) {
    t5.in.relative_bias = t;
    return error_code([&] { with_bias->run(t5.in, t5.o); });
  };
  EXPECT_EQ(bias_code(t5.bias), kFine);
  EXPECT_EQ(bias_code({}), "run.relative_bias");
  EXPECT_EQ(bias_code(on_host(t5.bias)), "run.relative_bias");
  EXPECT_EQ(bias_code(t5.bias.slice(0, 0, 7)), "run.relative_bias");
}

TEST_F(PlanRefusals, WriteKv) {
  const std::pair<const char*, void (*)(Step&)> refusals[] = {
      {kFine, [](Step&) {}},
      {"write_kv.k", [](Step& s) { s.k = on_host(s.k); }},
      {"write_kv.k", [](Step& s) { s.k.sizes[0] = 20; }},
      {"write_kv.v", [](Step& s) { s.v.dtype = DType::bf16; }},
      {"write_kv.device", [](Step& s) { s.in.kv.k = on_host(s.in.kv.k), s.in.kv.v = on_host(s.in.kv.v); }},
      {"write_kv.slot", [](Step& s) { s.in.kv.k = s.in.kv.k.slice(0, 0, 8), s.in.kv.v = s.in.kv.v.slice(0, 0, 8); }},
  };
  for (const auto& [code, spoil] : refusals) {
    Step step;
    const auto plan = plan_for(step.spec);
    plan->update(step.batch);
    spoil(step);
    EXPECT_EQ(error_code([&] { plan->write_kv(step.in.kv, step.k, step.v); }), code);
  }
  Step step;
  const auto plan = plan_for(step.spec);
  step.batch.slot_mapping = {};
  plan->update(step.batch);
  EXPECT_EQ(error_code([&] { plan->write_kv(step.in.kv, step.k, step.v); }), "write_kv.slot_mapping");
  AttentionSpec ragged = small_spec();
  ragged.block_size = 0;
  EXPECT_EQ(error_code([&] { plan_for(ragged)->write_kv(step.in.kv, step.k, step.v); }), "write_kv.ragged");
}

TEST_F(PlanRefusals, ARefusedUpdateChangesNothing) {
  Step step;
  const auto plan = plan_for(step.spec);
  plan->update(step.batch);
  const std::string text = plan->str();
  const auto code = [&](const Batch& batch) { return error_code([&] { plan->update(batch); }); };
  Batch batch = step.batch;
  for (TensorView* t : {&batch.block_table, &batch.slot_mapping}) t->device = {DeviceType::cuda, 1};
  EXPECT_EQ(code(batch), "update.device");
  batch = step.batch;
  batch.block_table = {};
  EXPECT_EQ(code(batch), "batch.keys.missing");
  std::vector<int32_t> starts{0, 65}, lens{65};
  batch = step.batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  EXPECT_EQ(code(batch), "batch.num_tokens.limit");
  EXPECT_EQ(plan->str(), text);
  fake::state().launches.clear();
  plan->run(step.in, step.o);
  EXPECT_EQ(fake::state().launches.size(), 2u);  // the 20 tokens, the other in two pieces, which its kernel joins
}

TEST_F(PlanRefusals, WithoutValidationTheLimitsHold) {
  Step step;
  const auto plan =
      plan_for(step.spec, {.limits = {.max_num_reqs = 1, .max_num_tokens = 1, .max_seq_len = 2000}, .threads = {}, .validate = false});
  EXPECT_EQ(error_code([&] { plan->update(step.batch); }), "update.limits");
}

// A graph reads a custom mask in the form that it was captured with.
TEST_F(PlanRefusals, CapturedMasks) {
  const DriverApi& cu = need_driver();
  Step step;
  step.spec.mask.custom = true;
  const CurrentContext current(*step.context);
  const OwnedStream stream(step.context);
  const auto plan = plan_for(step.spec);
  std::vector<uint8_t> bytes(400 + 100, 1), bits(50 + 13, 0xff);
  Batch of_bytes = step.batch, of_bits = step.batch;
  of_bytes.custom_mask = row_of(bytes.data(), DType::u8, int64_t(bytes.size()));
  of_bits.packed_mask = row_of(bits.data(), DType::u8, int64_t(bits.size()));
  plan->update(of_bits, stream.get());
  EXPECT_EQ(error_code([&] { plan->update(of_bytes, stream.get()); }), kFine);
  plan->update(of_bits, stream.get());
  CUgraph graph = nullptr;
  cu.cuStreamBeginCapture_v2(stream.get(), kCaptureThreadLocal);
  plan->run(step.in, step.o, stream.get());
  cu.cuStreamEndCapture(stream.get(), &graph);
  cu.cuGraphDestroy(graph);
  EXPECT_EQ(error_code([&] { plan->update(of_bits, stream.get()); }), kFine);
  EXPECT_EQ(error_code([&] { plan->update(of_bytes, stream.get()); }), "update.moved");
  of_bits.packed_mask.sizes[0] -= 1;
  EXPECT_EQ(error_code([&] { plan->update(of_bits, stream.get()); }), "batch.packed_mask.size");
}

// What mask_indptr leaves between requests takes no room: a mask may be longer than a plan's limits ask for.
TEST_F(PlanRefusals, AMaskOnTheHostMayHaveGaps) {
  Step step;
  step.spec.mask.custom = true;
  const auto plan = plan_for(step.spec, {.limits = {.max_num_reqs = 3, .max_num_tokens = 21, .max_seq_len = 100}, .threads = {}});
  std::vector<uint8_t> bits(50 + 13), apart(9000, 0xff);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = uint8_t(1 + 37 * i);
  const std::vector<int32_t> indptr{2500, 4000, 4000, 8013};
  std::copy_n(bits.begin(), 50, apart.begin() + indptr[0]);
  std::copy_n(bits.begin() + 50, 13, apart.begin() + indptr[2]);
  std::vector<float> values(step.memory.bytes() / sizeof(float));
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(i * 2654435761u % 1000) / 500 - 1;
  const auto outputs_of = [&](std::vector<uint8_t>& mask, std::span<const int32_t> starts) {
    copy_to_device(step.memory.address(), values.data(), step.memory.bytes(), nullptr);
    Batch batch = step.batch;
    batch.packed_mask = row_of(mask.data(), DType::u8, int64_t(mask.size())), batch.mask_indptr = starts;
    plan->update(batch);
    plan->run(step.in, step.o);
    std::vector<float> out(21 * 4 * 8);
    copy_to_host(out.data(), step.memory.address() + (3 << 16), out.size() * sizeof(float), nullptr);
    return out;
  };
  const std::vector<float> expected = outputs_of(bits, {});
  EXPECT_EQ(outputs_of(apart, indptr), expected);
  bits[49] ^= 1;  // of a key that causality shows
  EXPECT_NE(outputs_of(bits, {}), expected);
}

// Device arrays are read where they were when the graph was captured.
TEST_F(PlanRefusals, Captures) {
  const DriverApi& cu = need_driver();
  Step step;
  const CurrentContext current(*step.context);
  const OwnedStream stream(step.context);
  const auto plan = plan_for(step.spec);
  DeviceBuffer table(step.context, step.table.size() * 4), slots(step.context, step.slots.size() * 8);
  copy_to_device(table.address(), step.table.data(), table.bytes(), nullptr);
  copy_to_device(slots.address(), step.slots.data(), slots.bytes(), nullptr);
  Batch batch = step.batch;
  batch.block_table = TensorView::contiguous(table.as<void>(), DType::i32, {3, 7}, kGpu);
  batch.slot_mapping = row_of(slots.as<void>(), DType::i64, 21, kGpu);
  plan->update(batch, stream.get());
  CUgraph graph = nullptr;
  cu.cuStreamBeginCapture_v2(stream.get(), kCaptureThreadLocal);
  EXPECT_EQ(error_code([&] { plan->update(batch, stream.get()); }), "update.captured");
  plan->write_kv(step.in.kv, step.k, step.v, stream.get());
  plan->run(step.in, step.o, stream.get());
  cu.cuStreamEndCapture(stream.get(), &graph);
  cu.cuGraphDestroy(graph);
  EXPECT_EQ(error_code([&] { plan->update(batch, stream.get()); }), kFine);
  EXPECT_EQ(error_code([&] { plan->update(step.batch, stream.get()); }), "update.moved");
  batch.slot_mapping.data = slots.as<char>() + 8;
  batch.slot_mapping.sizes[0] = 20;
  EXPECT_EQ(error_code([&] { plan->update(batch, stream.get()); }), "batch.slot_mapping.size");

  const auto on_demand = plan_for(step.spec, {.limits = kLimits, .threads = {}, .load_on_demand = true});
  on_demand->update(step.batch, stream.get());
  cu.cuStreamBeginCapture_v2(stream.get(), kCaptureThreadLocal);
  EXPECT_EQ(error_code([&] { on_demand->run(step.in, step.o, stream.get()); }), "run.on_demand");
  cu.cuStreamEndCapture(stream.get(), &graph);
  cu.cuGraphDestroy(graph);
}

TEST_F(PlanRefusals, ATableThatDoesNotFitMayBeOnTheDevice) {
  AttentionSpec spec = small_spec();
  spec.block_size = 1;
  const PlanLimits limits{.max_num_reqs = 5, .max_num_tokens = 5, .max_seq_len = 1 << 20};
  const auto plan = plan_for(spec, {.limits = limits, .threads = {}});
  std::vector<int32_t> starts{0, 1, 2, 3, 4, 5}, lens(5, 1 << 20), table(1 << 20);
  Batch batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  batch.block_table = TensorView::contiguous(table.data(), DType::i32, {5, 1 << 20});
  batch.block_table.strides[0] = 0;
  EXPECT_EQ(error_code([&] { plan->update(batch); }), "update.block_ids");
  batch.block_table.device = kGpu;
  EXPECT_EQ(error_code([&] { plan->update(batch); }), kFine);
}

// What a batch does not need is not launched; a graph holds all that a later batch may need, with grids of their own.
TEST_F(PlanRefusals, LaunchesFollowTheBatchUnlessTheyAreCaptured) {
  Step step;
  step.starts = {0, 0, 0, 1};
  step.lens = {20, 0, 60};
  step.batch.slot_mapping = {};
  const CurrentContext current(*step.context);
  const OwnedStream stream(step.context);
  const auto entries = [](const std::vector<fake::Launch>& launches) {
    std::string text;
    for (const fake::Launch& l : launches) text += l.entry + " ";
    return text;
  };
  const auto plan = plan_for(step.spec);
  plan->update(step.batch, stream.get());
  fake::state().launches.clear();
  plan->run(step.in, step.o, stream.get());
  stream.synchronize();
  EXPECT_EQ(entries(fake::state().launches), "attention_sm80 ");
  EXPECT_EQ(fake::state().launches[0].grid_x, 2u);  // an item for each kv head
  EXPECT_TRUE(fake::state().launches[0].programmatic);

  std::vector<unsigned> grids;
  for (const int decode_keys : {60, 100}) {
    step.lens[2] = decode_keys;
    plan->update(step.batch, stream.get());
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    need_driver().cuStreamBeginCapture_v2(stream.get(), kCaptureThreadLocal);
    plan->run(step.in, step.o, stream.get());
    need_driver().cuStreamEndCapture(stream.get(), &graph);
    need_driver().cuGraphInstantiateWithFlags(&exec, graph, 0);
    std::vector<unsigned> seen;
    const auto on_launch = std::exchange(fake::state().on_launch, [&](const fake::Launch& l) { seen.push_back(l.grid_x); });
    need_driver().cuGraphLaunch(exec, stream.get());
    stream.synchronize();
    fake::state().on_launch = on_launch;
    need_driver().cuGraphExecDestroy(exec);
    need_driver().cuGraphDestroy(graph);
    EXPECT_EQ(seen.size(), 4u);  // a kernel for each regime, and one that joins pieces of what is not decode
    if (!grids.empty()) {
      EXPECT_EQ(seen, grids);
    }
    grids = seen;
  }
}

TEST_F(PlanRefusals, WarmUpdatesAllocateNothing) {
  Step step;
  const auto plan = plan_for(step.spec);
  for (int i = 0; i < 4; ++i) plan->update(step.batch);
  EXPECT_EQ(imbrex::test::count_allocations([&] {
              for (int i = 0; i < 5; ++i) plan->update(step.batch);
            }),
            0);
}

TEST_F(PlanRefusals, OnlyPresentDevicesGetPlans) {
  const Backend& backend = *find_backend("cuda_sm80");
  EXPECT_EQ(error_code([&] { backend.plan(small_spec(), describe_device("h200"), {}); }), "backend.device_absent");
  EXPECT_EQ(error_code([&] { backend.plan(small_spec(), probe_cpu(), {}); }), "backend.unsupported");
  EXPECT_EQ(plan_for(small_spec())->str(), "cuda_sm80 (sm_90a): 0 + 0 + 0 work items (decode + verify + prefill) x 2 kv heads, 0 merges");
}

}  // namespace
}  // namespace imbrex::cuda

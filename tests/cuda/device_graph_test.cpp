// One captured graph serves every batch within the limits, on a real driver; and what a plan costs its host.
#include <chrono>
#include <cstdio>

#include "cuda/gpu.h"
#include "cuda/graph_batches.h"
#include "imbrex/select.h"

namespace imbrex::cuda {
namespace {

class DeviceGraph : public test::Gpu, public testing::WithParamInterface<const char*> {
 protected:
  void run(const test::GraphProblem& problem) {
    const Backend& backend = *find_backend(GetParam());
    if (const auto reasons = backend.unsupported(problem.spec, device); !reasons.empty()) GTEST_SKIP() << reasons[0].str();
    test::GraphAgainstEager(backend, device, context, problem).run();
  }
};

TEST_P(DeviceGraph, HostArrays) { run({.spec = test::graph_spec(), .batches = 300, .seed = 1}); }

TEST_P(DeviceGraph, DeviceArrays) { run({.spec = test::graph_spec(), .device_arrays = true, .batches = 300, .seed = 2}); }

TEST_P(DeviceGraph, Fp8CacheWindowAndSinks) {
  AttentionSpec spec = test::graph_spec(DType::fp8_e4m3);
  spec.mask.window_left = 1500;
  spec.score.sinks = true;
  run({.spec = spec, .batches = 200, .seed = 3});
}

// Requests that begin with the same blocks share items, in some steps of a graph and not in others, and have the bits that they have when
// a plan cannot know that they do.
TEST_P(DeviceGraph, SharedBlocks) {
  struct Shape {
    int group, block_size;
    DType q, kv;
  };
  for (const Shape& shape : {Shape{4, 16, DType::bf16, DType::bf16},
                             {1, 64, DType::f16, DType::f16},
                             {8, 16, DType::bf16, DType::fp8_e4m3},
                             {4, 1, DType::bf16, DType::bf16},
                             {2, 1, DType::f16, DType::fp8_e4m3},
                             {3, 48, DType::bf16, DType::f16},
                             {5, 16, DType::f32, DType::f32},
                             {12, 16, DType::bf16, DType::bf16},
                             {16, 64, DType::bf16, DType::fp8_e4m3},
                             {9, 1, DType::f16, DType::f16}})
    for (const int dim : {64, 128}) {
      AttentionSpec spec = test::graph_spec(shape.kv);
      spec.num_q_heads = 2 * shape.group, spec.block_size = shape.block_size, spec.q_dtype = shape.q;
      spec.head_dim_qk = spec.head_dim_v = dim, spec.score.sinks = dim == 64;
      const Backend& backend = *find_backend(GetParam());
      if (!backend.unsupported(spec, device).empty()) continue;
      // In steps as short as these, items of so many heads are rarely worth sharing there.
      if (shape.group > 8 && GetParam() == std::string_view("cuda_sm80")) continue;
      SCOPED_TRACE(spec.str());
      run({.spec = spec,
           .limits = {.max_num_reqs = 40, .max_num_tokens = 120, .max_seq_len = 3000, .max_query_len = 6},
           .shared_blocks = true,
           .apart = true,
           .batches = 60,
           .seed = 20u + unsigned(shape.group)});
    }
}

// In balanced lists, whose cuts depend on the step: neighbours' common keys in a kernel with rows for many of them.
TEST_P(DeviceGraph, SharedPrefixes) {
  struct Shape {
    int group, block_size;
    DType kv = DType::bf16;
    bool latent = true;
    float soft_cap = 0;
  };
  for (const Shape& shape : {Shape{4, 16, DType::bf16, false},
                             {16, 64, DType::fp8_e4m3, false},
                             {8, 64},
                             {16, 16},
                             {16, 1},
                             {32, 64},
                             {12, 16, DType::bf16, true, 30.f},
                             {16, 64, DType::fp8_e4m3}})
    for (const int longest : {1, 6}) {
      AttentionSpec spec = test::graph_spec(shape.kv);
      spec.num_q_heads = 2 * shape.group, spec.block_size = shape.block_size, spec.head_dim_qk = spec.head_dim_v = 128;
      if (shape.latent) {
        spec.num_q_heads = shape.group, spec.num_kv_heads = 1, spec.head_dim_qk = 576, spec.head_dim_v = 512;
        spec.kv_format = KvFormat::latent, spec.score.soft_cap = shape.soft_cap;
      }
      const Backend& backend = *find_backend(GetParam());
      if (GetParam() != std::string_view("cuda_sm90") || !backend.unsupported(spec, device).empty()) continue;
      if (longest > 1 && shape.latent && shape.kv != DType::bf16) continue;  // items have two tokens there, which drafts seldom share
      SCOPED_TRACE(spec.str());
      run({.spec = spec,
           .limits = {.max_num_reqs = 40, .max_num_tokens = 120, .max_seq_len = 3000, .max_query_len = longest},
           .shared_blocks = true,
           .balanced = true,
           .batches = 60,
           .seed = 40u + unsigned(shape.group)});
    }
}

// Trees of drafts, which may begin with the same blocks, planned here or on the device.
TEST_P(DeviceGraph, Trees) {
  AttentionSpec spec = test::graph_spec();
  spec.mask.tree = true, spec.num_q_heads = 16, spec.head_dim_qk = spec.head_dim_v = 128;
  AttentionSpec latent = spec;
  latent.num_kv_heads = 1, latent.head_dim_qk = 576, latent.head_dim_v = 512, latent.kv_format = KvFormat::latent;
  const PlanLimits limits{.max_num_reqs = 40, .max_num_tokens = 200, .max_seq_len = 3000, .max_query_len = 8};
  for (const AttentionSpec& s : {spec, latent}) {
    SCOPED_TRACE(s.str());
    run({.spec = s, .limits = limits, .beside = true, .batches = 60, .seed = 51});
    run({.spec = s, .limits = limits, .device_arrays = true, .device_lengths = true, .batches = 60, .seed = 52});
    if (GetParam() != std::string_view("cuda_sm90")) continue;
    for (const int heads : {8, 16})
      for (const int longest : {4, 8}) {
        AttentionSpec shared = s;
        shared.num_q_heads = heads;
        PlanLimits shorter = limits;
        shorter.max_query_len = longest;
        run({.spec = shared,
             .limits = shorter,
             .shared_blocks = true,
             .balanced = true,
             .beside = true,
             .batches = 60,
             .seed = 53u + unsigned(heads + longest)});
      }
  }
}

// Two plans at the same time, on streams of their own, one of them in a graph.
TEST_P(DeviceGraph, Beside) {
  const PlanLimits limits{.max_num_reqs = 40, .max_num_tokens = 120, .max_seq_len = 3000, .max_query_len = 6};
  for (const DType kv : {DType::bf16, DType::fp8_e4m3})
    for (const int heads : {4, 16, 32, 64, 128}) {
      if (heads == 128 && kv != DType::bf16) continue;  // nothing is cut in steps as short as these
      AttentionSpec latent = test::graph_spec(kv);
      latent.num_q_heads = heads, latent.num_kv_heads = 1, latent.head_dim_qk = 576, latent.head_dim_v = 512;
      latent.kv_format = KvFormat::latent;
      run({.spec = latent, .limits = limits, .beside = true, .batches = 60, .seed = 60u + unsigned(heads)});
    }
  AttentionSpec spec = test::graph_spec();
  spec.head_dim_qk = spec.head_dim_v = 128;
  run({.spec = spec, .beside = true, .batches = 100, .seed = 71});
  for (const bool balanced : {false, true})
    if (!balanced || GetParam() == std::string_view("cuda_sm90"))
      run({.spec = spec, .limits = limits, .shared_blocks = true, .balanced = balanced, .beside = true, .batches = 100, .seed = 72});
}

TEST_P(DeviceGraph, CustomMask) {
  AttentionSpec spec = test::graph_spec();
  spec.mask.custom = true;
  for (const bool device_arrays : {false, true})
    for (const bool packed : {false, true})
      run({.spec = spec,
           .limits = {.max_num_reqs = 6, .max_num_tokens = 80, .max_seq_len = 1500},
           .device_arrays = device_arrays,
           .packed_mask = packed,
           .batches = 60,
           .seed = 4});
}

// What a mask_mod shows is computed in each update, and a graph finds that of its step.
TEST_P(DeviceGraph, Expressions) {
  AttentionSpec spec = test::graph_spec();
  spec.mask_mod = parse_expression("q // 300 == kv // 300 | kv < batch");
  run({.spec = spec, .batches = 150, .seed = 31});
  spec.score_mod = parse_expression("score - 0.01 * (q - kv)");
  run({.spec = spec, .device_arrays = true, .batches = 150, .seed = 32});
  // Every tile is seen, so that pieces on the device are those of the host.
  spec.mask_mod = parse_expression("(q + kv) % 3 != 0 | q == kv");
  run({.spec = spec, .device_arrays = true, .device_lengths = true, .batches = 150, .seed = 33});
}

TEST_P(DeviceGraph, DecodeOnly) {
  AttentionSpec spec = test::graph_spec();
  spec.head_dim_qk = spec.head_dim_v = 128;
  run({.spec = spec,
       .limits = {.max_num_reqs = 64, .max_num_tokens = 64, .max_seq_len = 3000, .max_query_len = 1},
       .device_arrays = true,
       .batches = 200,
       .seed = 5});
}

TEST_P(DeviceGraph, LengthsOnTheDevice) {
  AttentionSpec spec = test::graph_spec();
  run({.spec = spec, .device_arrays = true, .device_lengths = true, .batches = 300, .seed = 6});
  spec.mask.window_left = 700;
  spec.score.sinks = true;
  run({.spec = spec, .device_arrays = true, .device_lengths = true, .batches = 100, .seed = 7});
  run({.spec = test::graph_spec(),
       .limits = {.max_num_reqs = 64, .max_num_tokens = 64, .max_seq_len = 3000, .max_query_len = 1},
       .device_arrays = true,
       .device_lengths = true,
       .batches = 100,
       .seed = 8});
}

TEST_P(DeviceGraph, SharedScratch) {
  for (const DType kv : {DType::bf16, DType::fp8_e4m3}) run({.spec = test::graph_spec(kv), .shared_scratch = true, .seed = 10});
}

// Some steps have prefill over flat keys, others over the cache.
TEST_P(DeviceGraph, FlatKeys) {
  for (const DType kv : {DType::bf16, DType::fp8_e4m3}) {
    AttentionSpec spec = test::graph_spec(kv);
    spec.num_q_heads = 16, spec.num_kv_heads = 2, spec.head_dim_qk = spec.head_dim_v = 128, spec.block_size = 1;
    run({.spec = spec, .batches = 150, .seed = 11});
    run({.spec = spec, .device_arrays = true, .device_lengths = true, .batches = 50, .seed = 12});
  }
}

TEST_P(DeviceGraph, LengthsAndMaskOnTheDevice) {
  AttentionSpec spec = test::graph_spec();
  spec.mask.custom = true;
  for (const bool packed : {false, true})
    run({.spec = spec,
         .limits = {.max_num_reqs = 6, .max_num_tokens = 80, .max_seq_len = 1500},
         .device_arrays = true,
         .device_lengths = true,
         .packed_mask = packed,
         .batches = 60,
         .seed = 9});
}

double microseconds_of(int calls, const auto& call) {
  double best = 1e30;
  for (int round = 0; round < 5; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    best = std::min(best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / calls);
  }
  return best;
}

// 256 decode requests of 4096 keys each, tables in device memory: what an engine does for every step and layer.
TEST_P(DeviceGraph, HostCost) {
  if (!find_backend(GetParam())->unsupported(test::graph_spec(), device).empty()) GTEST_SKIP() << "not for sm_" << device.sm;
  constexpr int kReqs = 256, kKeys = 4096, kPages = kKeys / 16;
  const AttentionSpec spec{.num_q_heads = 32, .num_kv_heads = 8, .head_dim_qk = 128, .head_dim_v = 128};
  const auto plan =
      find_backend(GetParam())
          ->plan(spec, device,
                 {.limits = {.max_num_reqs = kReqs, .max_num_tokens = kReqs, .max_seq_len = kKeys, .max_query_len = 1}, .threads = {}});
  std::vector<int32_t> starts(kReqs + 1), lens(kReqs, kKeys), table(size_t(kReqs) * kPages);
  for (int r = 0; r <= kReqs; ++r) starts[size_t(r)] = r;
  for (size_t i = 0; i < table.size(); ++i) table[i] = int32_t(i % 512);
  const DeviceBuffer ids = upload(table), q(context, size_t(kReqs) * 32 * 128 * 2), out(context, q.bytes()),
                     kv(context, size_t(512) * 16 * 8 * 128 * 2);
  fill_bytes(q.address(), 0, q.bytes(), stream.get());
  fill_bytes(kv.address(), 0, kv.bytes(), stream.get());
  const Device gpu{DeviceType::cuda, 0};
  Batch batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  batch.block_table = TensorView::contiguous(ids.as(), DType::i32, {kReqs, kPages}, gpu);
  const TensorView pages = TensorView::contiguous(kv.as(), DType::bf16, {512, 16, 8, 128}, gpu);
  const Inputs in{.q = TensorView::contiguous(q.as(), DType::bf16, {kReqs, 32, 128}, gpu),
                  .kv = {.k = pages, .v = pages, .k_scale = {}, .v_scale = {}}};
  const Outputs outputs{.out = TensorView::contiguous(out.as(), DType::bf16, {kReqs, 32, 128}, gpu), .lse = {}};
  plan->update(batch, stream.get());
  plan->run(in, outputs, stream.get());
  stream.synchronize();
  const double update_us = microseconds_of(3, [&] { plan->update(batch, stream.get()); });
  stream.synchronize();
  const double run_us = microseconds_of(20, [&] { plan->run(in, outputs, stream.get()); });
  stream.synchronize();
  std::printf("256 decode requests of 4096 keys: update %.1f us, run %.1f us a layer on the host\n", update_us, run_us);
  RecordProperty("update_ns", int(update_us * 1e3));
  RecordProperty("run_ns", int(run_us * 1e3));
  EXPECT_LT(update_us, 60);
  EXPECT_LT(run_us, 20);
}

INSTANTIATE_TEST_SUITE_P(Backends, DeviceGraph, testing::Values("cuda_sm80", "cuda_sm90"), [](const auto& info) { return info.param; });

}  // namespace
}  // namespace imbrex::cuda

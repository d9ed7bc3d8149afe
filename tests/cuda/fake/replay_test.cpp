// The replay on a GPU: caches, queries and outputs in device memory, decode steps from graphs, every output checked. On the fake driver,
// which does nothing before somebody waits and poisons what is fresh, so that a copy or a wait that is missing shows.
#include "serve/replay.h"

#include <gtest/gtest.h>

#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "expect_error.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

namespace fake = cuda::fake;

class GpuReplay : public testing::Test {
 protected:
  GpuReplay() {
    options.device = "cuda:0";
    options.select.forced = "cuda_sm80";
    options.max_num_batched_tokens = 64;
    options.max_num_seqs = 8;
    options.block_size = 16;
    options.num_threads = 1;
    options.pacing = Pacing::saturate;
    options.verify_fraction = 1;
  }
  ~GpuReplay() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }

  // The kernels that run on the host know one spec at a time, apart from what they are given: windows may differ.
  ReplayResult run(const ModelSpec& model) {
    for (const ModelLayer& layer : model.layers) {
      AttentionSpec spec = layer.attention();
      spec.kv_dtype = options.kv_dtype;
      spec.block_size = options.block_size;
      fake::run_on_host(spec);
    }
    fake::state().launches.clear();
    return replay(model, trace, options);
  }
  ReplayResult on_cpu(const ModelSpec& model) {
    ReplayOptions cpu = options;
    cpu.device = "cpu";
    cpu.select.forced = "reference";
    return replay(model, trace, cpu);
  }
  int launches(std::string_view entry) const {
    int count = 0;
    for (const fake::Launch& launch : fake::state().launches) count += launch.entry == entry;
    return count;
  }

  Trace trace = tree_trace(10, 16, 60, 12, 1);
  ReplayOptions options;
};

TEST_F(GpuReplay, EveryOutputIsThatOfTheReference) {
  const ModelSpec model = tiny_model({full_mask(), window_mask(24), window_mask(24), full_mask()}, 16);
  const ReplayResult r = run(model), cpu = on_cpu(model);
  EXPECT_TRUE(r.complete);
  EXPECT_GT(r.prefix_hit_tokens, 0);
  EXPECT_EQ(r.verified_outputs, (r.prefill_tokens + r.decode_tokens) * 4 * 2);  // 4 layers, 2 q heads of a kv head
  EXPECT_LE(r.verify_max_ratio, 1);
  EXPECT_EQ(r.digest, cpu.digest) << "both round a double once";
  EXPECT_EQ(r.decode_digest, cpu.decode_digest);
  EXPECT_EQ(r.kinds[0].backend, "cuda_sm80");
  EXPECT_TRUE(r.device.starts_with("Fake GPU 0 (cuda:0")) << r.device;
}

TEST_F(GpuReplay, TimesAreThoseOfTheStream) {
  const ModelSpec model = tiny_model({full_mask(), full_mask(), window_mask(24)}, 16);
  const ReplayResult r = run(model);
  constexpr double kBetweenMarks = double(1.5f) * 1e-3;  // on this driver
  EXPECT_NEAR(r.times.plan_s, double(r.steps) * 2 * kBetweenMarks, 1e-9);
  EXPECT_NEAR(r.times.attention_s, double(r.steps) * 2 * kBetweenMarks, 1e-9) << "one stretch for both layers of a kind";
  EXPECT_EQ(r.times.kv_write_s, 0);
  EXPECT_NEAR(r.decode_steps.run_s, double(r.decode_steps.steps) * 2 * kBetweenMarks, 1e-9);
}

// Decode steps are captured once; after that no launch of attention is seen but those of steps with prefill.
TEST_F(GpuReplay, DecodeStepsAreReplayed) {
  options.verify_fraction = 0;
  const ReplayResult r = run(tiny_model({full_mask(), full_mask()}, 16));
  EXPECT_GT(r.decode_steps.steps, 5);
  const int64_t most = r.prefill_steps.steps * 2 * 3;  // layers, regimes
  EXPECT_LE(launches("attention_sm80"), most);
  EXPECT_EQ(launches("copy_kv"), r.prefill_steps.steps * 2);
}

TEST_F(GpuReplay, WaitsDoNotGrowWithTheLayers) {
  options.verify_fraction = 0;
  const auto waits_a_step = [&](size_t layers) {
    const int before = fake::state().waits;
    const ReplayResult r = run(tiny_model(std::vector<Mask>(layers, full_mask()), 16));
    return double(fake::state().waits - before) / double(r.steps);
  };
  EXPECT_NEAR(waits_a_step(2), waits_a_step(8), 1);
}

TEST_F(GpuReplay, LayersThatDoNotFitTakeTurns) {
  const ModelSpec model = tiny_model({full_mask(), full_mask(), window_mask(24), full_mask(), full_mask()}, 16);
  const ReplayResult whole = run(model);
  const size_t layer = 64 * (4 + 2 + 2 + 4) * 16 * 2;  // tokens, heads, dimension, bytes
  fake::state().free_bytes = 4 * 2 * layer;            // two layers have a quarter of it
  options.num_blocks = whole.groups[0].num_blocks;
  const ReplayResult parts = run(model);
  fake::state().free_bytes = size_t(100) << 20;
  EXPECT_EQ(parts.digest, whole.digest);
  EXPECT_EQ(parts.verified_outputs, whole.verified_outputs);
}

TEST_F(GpuReplay, EveryCacheTypeAndScoreModificationIsVerified) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::fp8_e4m3}) {
    options.kv_dtype = dtype;
    EXPECT_TRUE(run(tiny_model({full_mask()}, 16)).complete) << to_string(dtype);
  }
  options.kv_dtype = DType::bf16;
  for (const int which : {0, 1, 2}) {
    ModelSpec model = tiny_model({full_mask(), full_mask()}, 16);
    for (ModelLayer& layer : model.layers) {
      layer.attention().score.sinks = which == 0;
      layer.attention().score.alibi = which == 1;
      layer.attention().score.head_scales = which == 2;
    }
    EXPECT_TRUE(run(model).complete) << which;
  }
}

TEST_F(GpuReplay, MemoryIsWhatTheGpuHasLeft) {
  const ModelSpec model = tiny_model({full_mask(), full_mask()}, 16);
  const int64_t block = 2 * model.layers[0].attention().kv_bytes_per_token() * 16;
  fake::state().free_bytes = size_t(20 * block);
  options.max_num_batched_tokens = 8;
  const ReplayResult r = run(model);
  fake::state().free_bytes = size_t(100) << 20;
  EXPECT_EQ(r.groups[0].num_blocks, 18);  // nine tenths
  EXPECT_TRUE(r.complete);
}

// The replay's own check has to be worth something: it notices a kernel that leaves out a layer's last key.
TEST_F(GpuReplay, AWrongKernelIsNoticed) {
  const ModelSpec model = tiny_model({full_mask()}, 16);
  fake::run_on_host(model.layers[0].attention());
  const auto kernel = fake::state().on_launch;
  int written = 0;
  fake::state().on_launch = [&](const fake::Launch& launch) {
    if (launch.entry != "copy_kv" || ++written % 3 != 0) kernel(launch);
  };
  EXPECT_EQ(test::error_code([&] { replay(model, trace, options); }), "replay.verify");
}

TEST_F(GpuReplay, OnlyDevicesThatAreThere) {
  options.device = "h200";
  EXPECT_EQ(test::error_code([&] { replay(tiny_model({full_mask()}, 16), trace, options); }), "backend.device_absent");
  options.device = "cuda:7";
  EXPECT_EQ(test::error_code([&] { replay(tiny_model({full_mask()}, 16), trace, options); }), "device.absent");
}

// Positions of images are sent with each step, to graphs of decode too.
TEST_F(GpuReplay, ImagesInPrompts) {
  add_images(trace, 20, 13);
  ModelSpec model = tiny_model({full_mask(), window_mask(24)}, 16);
  const ReplayResult cpu = on_cpu(model);
  for (ModelLayer& layer : model.layers) layer.attention().mask.positions = true;
  const ReplayResult r = run(model);
  EXPECT_EQ(r.digest, cpu.digest);
  EXPECT_EQ(r.verified_outputs, cpu.verified_outputs);
  EXPECT_GT(r.decode_steps.steps, 0);
}

}  // namespace
}  // namespace imbrex::serve

// The replay end to end on small models: same bits however it is batched, every output checked, and a damaged cache noticed.
#include "serve/replay.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "expect_error.h"
#include "imbrex/error.h"
#include "serve/tiny_model.h"
#include "serve/trace_gen.h"

namespace imbrex::serve {
namespace {

std::string code_of(const ModelSpec& model, const Trace& trace, const ReplayOptions& options) {
  return test::error_code([&] { replay(model, trace, options); });
}

int64_t outputs_of(const Trace& trace) {
  int64_t sum = 0;
  for (const TraceRequest& r : trace.requests) sum += r.output_length;
  return sum;
}

TEST(Replay, RunsATraceToItsEndAndChecksEveryOutput) {
  const Trace trace = tree_trace(12, 16, 60, 12, 1);
  const ModelSpec model = tiny_model({full_mask(), window_mask(24), full_mask()}, 16);
  const ReplayResult r = replay(model, trace, small_options());
  EXPECT_TRUE(r.complete);
  EXPECT_EQ(r.stopped, "");
  EXPECT_EQ(r.requests, 12);
  EXPECT_EQ(r.finished_requests, 12);
  EXPECT_EQ(r.num_layers, 3);
  EXPECT_EQ(r.output_tokens, outputs_of(trace));
  EXPECT_GT(r.prefix_hit_tokens, 0);
  EXPECT_EQ(r.verified_outputs, (r.prefill_tokens + r.decode_tokens) * 3 * 2);  // 3 layers, 2 q heads of one kv head
  EXPECT_LE(r.verify_max_ratio, 1);
  EXPECT_GT(r.verify_max_ratio, 0);  // bf16 rounds
  ASSERT_EQ(r.kinds.size(), 2u);
  EXPECT_EQ(r.kinds[0].layers, (std::vector<int>{0, 2}));
  EXPECT_EQ(r.kinds[0].group, "full");
  EXPECT_EQ(r.kinds[1].group, "window 24");
  EXPECT_FALSE(r.kinds[0].rule.empty());
  EXPECT_EQ(r.ttft.count, 12);
  EXPECT_EQ(r.steps, r.decode_steps.steps + r.prefill_steps.steps);
  EXPECT_EQ(r.steps, r.step.count);
  EXPECT_EQ(r.decode_steps.tokens + r.prefill_steps.tokens, r.prefill_tokens + r.decode_tokens);
  EXPECT_NEAR(r.times.step_s(), r.busy_s(), 1e-9);
  EXPECT_NE(r.digest, 0u);
  EXPECT_NE(r.decode_digest, r.digest);
  int64_t series_steps = 0;
  for (const ReplayPoint& p : r.series) series_steps += p.steps;
  EXPECT_EQ(series_steps, r.steps);
  EXPECT_EQ(r.series.front().occupancy.size(), 2u);
}

TEST(Replay, SameBitsHoweverItIsBatched) {
  const Trace trace = tree_trace(14, 16, 90, 40, 2, 0.5);
  const ModelSpec model = tiny_model({full_mask(), window_mask(20), chunk_mask(32)}, 16);
  ReplayOptions options = small_options();
  options.verify_fraction = 0;
  const ReplayResult first = replay(model, trace, options);
  const auto same = [&](auto change) { return expect_same_digests(model, trace, options, first, change); };
  same([](auto& o) { o.max_num_batched_tokens = 17; });
  same([](auto& o) { o.max_num_batched_tokens = 512; });
  same([](auto& o) { o.max_num_seqs = 1; });
  same([](auto& o) { o.num_threads = 3; });
  same([](auto& o) { o.prefix_sharing = false; });
  same([](auto& o) { o.block_size = 8; });
  same([](auto& o) { o.pacing = Pacing::arrival, o.fixed_step_s = 0.3; });
  const ReplayResult storm = same([](auto& o) { o.num_blocks = 10; });
  EXPECT_GT(storm.preemptions, 0);
  EXPECT_GT(storm.recomputed_tokens, 0);
  options.seed = 2;
  EXPECT_NE(replay(model, trace, options).digest, first.digest);
}

TEST(Replay, EveryCacheTypeIsVerified) {
  const Trace trace = tree_trace(6, 16, 50, 6, 3);
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::fp8_e4m3, DType::fp8_e5m2}) {
    SCOPED_TRACE(to_string(dtype));
    ReplayOptions options = small_options();
    options.kv_dtype = dtype;
    const ReplayResult r = replay(tiny_model({full_mask()}, 16), trace, options);
    EXPECT_TRUE(r.complete);
    EXPECT_GT(r.verified_values, 0);
    EXPECT_EQ(r.kv_dtype, to_string(dtype));
  }
}

// A latent cache stores a value as a part of its key. Where both have as many dims these are half of the bytes, so that the same memory
// holds twice as many blocks.
TEST(Replay, LatentCachesAreVerified) {
  const Trace trace = tree_trace(6, 16, 50, 6, 3);
  ReplayOptions options = small_options();
  options.kv_bytes = 1 << 20;
  const ReplayResult strided = replay(tiny_model({full_mask(), window_mask(16)}, 16), trace, options);
  options.kv_format = "latent";
  for (const DType dtype : {DType::bf16, DType::fp8_e4m3}) {
    options.kv_dtype = dtype;
    const ReplayResult r = replay(tiny_model({full_mask(), window_mask(16)}, 16), trace, options);
    EXPECT_TRUE(r.complete);
    EXPECT_GT(r.verified_values, 0);
    EXPECT_EQ(r.kv_format, "latent");
    EXPECT_NE(r.digest, strided.digest);
  }
}

TEST(Replay, EveryScoreModificationIsVerified) {
  const Trace trace = tree_trace(6, 16, 50, 6, 4);
  for (const int which : {0, 1, 2, 3}) {
    ModelSpec model = tiny_model({full_mask(), window_mask(16)}, 16);
    for (ModelLayer& layer : model.layers) {
      layer.attention().score.soft_cap = which == 0 ? 20.f : 0.f;
      layer.attention().score.sinks = which == 1;
      layer.attention().score.alibi = which == 2;
      layer.attention().score.head_scales = which == 3;
    }
    SCOPED_TRACE(which);
    EXPECT_TRUE(replay(model, trace, small_options()).complete);
  }
}

// Runs like the reference, but does not write the key and value of every 40th token.
class Careless final : public BackendOf<AttentionFamily> {
 public:
  std::string_view name() const override { return "careless"; }
  std::string_view description() const override { return "loses a key now and then"; }
  std::vector<Reason> unsupported(const AttentionSpec&, const DeviceInfo&) const override { return {}; }
  std::unique_ptr<AttentionPlan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    struct CarelessPlan final : AttentionPlan {
      std::unique_ptr<AttentionPlan> inner;
      std::vector<int64_t> slots;
      int64_t written = 0;
      void update(const Batch& batch, Stream stream) override {
        const auto* given = batch.slot_mapping.as<int64_t>();
        slots.assign(given, given + batch.num_tokens());
        for (int64_t& slot : slots) {
          if (++written % 40 == 0) slot = -1;
        }
        Batch changed = batch;
        changed.slot_mapping.data = slots.data();
        inner->update(changed, stream);
      }
      void write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream stream) const override {
        inner->write_kv(cache, k, v, stream);
      }
      void run(const AttentionInputs& in, const AttentionOutputs& out, Stream stream) const override { inner->run(in, out, stream); }
      std::string str() const override { return "careless"; }
    };
    auto result = std::make_unique<CarelessPlan>();
    result->inner = find_backend("reference")->plan(spec, device, options);
    return result;
  }
};

TEST(Replay, VerificationNoticesALostKey) {
  register_backend(std::make_shared<Careless>());
  Trace trace;
  trace.requests = {{.arrival_s = 0, .input_length = 600, .output_length = 3, .prefix_ids = {}}};
  ReplayOptions options = small_options();
  options.max_num_batched_tokens = 256;
  options.select.forced = "careless";
  options.verify_fraction = 0.2;
  const std::string code = code_of(tiny_model({full_mask()}, 16, 4, 2, 64), trace, options);
  options.select.forced = "reference";
  const std::string right = code_of(tiny_model({full_mask()}, 16, 4, 2, 64), trace, options);
  unregister_backend("careless");
  EXPECT_EQ(code, "replay.verify");
  EXPECT_EQ(right, "nothing thrown");
}

TEST(Replay, PhasesMayHaveDifferentBackends) {
  register_backend(std::make_shared<Careless>());
  ReplayOptions options = small_options();
  options.verify_fraction = 0;
  options.select.forced_prefill = "careless";
  options.select.forced_decode = "reference";
  const ReplayResult r = replay(tiny_model({full_mask()}, 16), tree_trace(3, 16, 30, 4, 1), options);
  unregister_backend("careless");
  EXPECT_EQ(r.kinds[0].backend, "careless + reference");
  EXPECT_TRUE(r.complete);
}

TEST(Replay, ClockFollowsArrivals) {
  Trace trace;
  for (int i = 0; i < 3; ++i)
    trace.requests.push_back({.arrival_s = 50 + 10.0 * i, .input_length = 5, .output_length = 3, .prefix_ids = {}});
  ReplayOptions options = small_options();
  options.pacing = Pacing::arrival;
  options.fixed_step_s = 1;
  const ReplayResult r = replay(tiny_model({full_mask()}, 16), trace, options);
  EXPECT_DOUBLE_EQ(r.clock_s, 23);
  EXPECT_DOUBLE_EQ(r.idle_s, 14);
  EXPECT_DOUBLE_EQ(r.ttft.max, 1);
  EXPECT_DOUBLE_EQ(r.tpot.max, 1);
  EXPECT_DOUBLE_EQ(r.e2e.max, 3);
  EXPECT_DOUBLE_EQ(r.queue.max, 0);
  options.rate_scale = 10;
  EXPECT_DOUBLE_EQ(replay(tiny_model({full_mask()}, 16), trace, options).clock_s, 5);
}

TEST(Replay, UsefulWorkIsCounted) {
  Trace trace;
  trace.requests = {{.arrival_s = 0, .input_length = 10, .output_length = 3, .prefix_ids = {}}};
  const ReplayResult r = replay(tiny_model({full_mask(), window_mask(4)}, 16, 4, 2, 16), trace, small_options());
  const double pair = 2.0 * 4 * 32, key = 2 * 32 * 2;         // flops of a (query, key) pair of all heads; bytes of a key and value
  EXPECT_DOUBLE_EQ(r.prefill_steps.flops, pair * (55 + 34));  // 1 + 2 + .. + 10; 1 + 2 + 3 + 7 * 4
  EXPECT_DOUBLE_EQ(r.prefill_steps.bytes, key * (10 + 10));
  EXPECT_DOUBLE_EQ(r.decode_steps.flops, pair * (11 + 12 + 4 + 4));
  EXPECT_DOUBLE_EQ(r.decode_steps.bytes, key * (11 + 12 + 4 + 4));
  EXPECT_DOUBLE_EQ(r.kv_written_bytes, key * 12 * 2);
  EXPECT_DOUBLE_EQ(r.kinds[0].flops, pair * (55 + 23));
}

TEST(Replay, ProgressCanStopIt) {
  ReplayOptions options = small_options();
  options.progress_interval_s = 0;
  int calls = 0;
  ReplayProgress last;
  options.progress = [&](const ReplayProgress& p) {
    EXPECT_GE(p.finished_tokens, last.finished_tokens);
    EXPECT_LE(p.finished_tokens, p.total_tokens);
    last = p;
    return ++calls < 5;
  };
  const ReplayResult r = replay(tiny_model({full_mask()}, 16), tree_trace(20, 16, 60, 12, 1), options);
  EXPECT_EQ(r.stopped, "cancelled");
  EXPECT_FALSE(r.complete);
  EXPECT_EQ(r.steps, 4);
  options.progress = nullptr;
  options.time_limit_s = 1e-9;
  EXPECT_EQ(replay(tiny_model({full_mask()}, 16), tree_trace(20, 16, 60, 12, 1), options).stopped, "time limit");
}

TEST(Replay, MemoryIsSharedOutByNeed) {
  const Trace trace = tree_trace(10, 16, 60, 12, 1);
  ReplayOptions options = small_options();
  options.verify_fraction = 0;
  const ModelSpec model = tiny_model({full_mask(), full_mask(), window_mask(24)}, 16);
  const int64_t block = model.layers[0].attention().kv_bytes_per_token() * 16;
  options.kv_bytes = 30 * block;
  const ReplayResult r = replay(model, trace, options);
  EXPECT_EQ(r.groups[0].num_blocks, 10);  // two layers and one
  EXPECT_EQ(r.groups[1].num_blocks, 10);
  EXPECT_TRUE(r.complete);
  options.kv_bytes = 3 * block - 1;
  EXPECT_EQ(code_of(model, trace, options), "replay.kv_bytes.small");
  options.kv_bytes = 3 * block;
  EXPECT_EQ(code_of(model, trace, options), "replay.request.too_long");
  options.skip_too_long = true;
  const ReplayResult skipped = replay(model, trace, options);
  EXPECT_TRUE(skipped.complete);
  EXPECT_GT(skipped.skipped_requests, 0);
  EXPECT_EQ(skipped.requests + skipped.skipped_requests, 10);
}

TEST(Replay, OnlyDecodersAreDriven) {
  const Trace trace = tree_trace(3, 16, 30, 4, 1);
  const auto with_kind = [&](AttentionKind kind) {
    ModelSpec model = tiny_model({full_mask(), full_mask()}, 16);
    model.layers[1].attention().kind = kind;
    return code_of(model, trace, small_options());
  };
  EXPECT_EQ(with_kind(AttentionKind::encoder), "replay.model.encoder_decoder");
  EXPECT_EQ(with_kind(AttentionKind::encoder_decoder), "replay.model.encoder_decoder");
  EXPECT_EQ(with_kind(AttentionKind::encoder_only), "replay.model.encoder_only");
  EXPECT_EQ(code_of(tiny_model({Mask{.causal = false}}, 16), trace, small_options()), "replay.model.mask");
  EXPECT_EQ(code_of(ModelSpec{}, trace, small_options()), "replay.model.layers");
}

TEST(Replay, RefusesOptionsOutOfRange) {
  const Trace trace = tree_trace(3, 16, 30, 4, 1);
  const auto with = [&](auto change) {
    ReplayOptions options = small_options();
    change(options);
    return code_of(tiny_model({full_mask()}, 16), trace, options);
  };
  EXPECT_EQ(with([](auto&) {}), "nothing thrown");
  EXPECT_EQ(with([](auto& o) { o.num_layers = -1; }), "replay.num_layers");
  EXPECT_EQ(with([](auto& o) { o.num_layers = 2; }), "replay.num_layers.model");
  EXPECT_EQ(with([](auto& o) { o.max_num_batched_tokens = 0; }), "replay.max_num_batched_tokens");
  EXPECT_EQ(with([](auto& o) { o.max_num_seqs = 0; }), "replay.max_num_seqs");
  EXPECT_EQ(with([](auto& o) { o.rate_scale = 0; }), "replay.rate_scale");
  EXPECT_EQ(with([](auto& o) { o.fixed_step_s = -1; }), "replay.fixed_step_s");
  EXPECT_EQ(with([](auto& o) { o.kv_bytes = -1; }), "replay.kv_bytes");
  EXPECT_EQ(with([](auto& o) { o.num_blocks = -1; }), "replay.num_blocks");
  EXPECT_EQ(with([](auto& o) { o.block_size = 0; }), "replay.block_size");
  EXPECT_EQ(with([](auto& o) { o.q_dtype = DType::f16; }), "replay.q_dtype");
  EXPECT_EQ(with([](auto& o) { o.kv_dtype = DType::i32; }), "replay.kv_dtype");
  EXPECT_EQ(with([](auto& o) { o.kv_format = "zigzag"; }), "replay.kv_format");
  EXPECT_EQ(with([](auto& o) { o.num_threads = -1; }), "replay.num_threads");
  EXPECT_EQ(with([](auto& o) { o.verify_fraction = 1.5; }), "replay.verify_fraction");
  EXPECT_EQ(with([](auto& o) { o.time_limit_s = std::numeric_limits<double>::infinity(); }), "replay.time_limit_s");
  EXPECT_EQ(with([](auto& o) { o.max_series_points = 1; }), "replay.max_series_points");
  EXPECT_EQ(with([](auto& o) { o.select.forced = "nobody"; }), "select.forced");
  EXPECT_EQ(code_of(tiny_model({full_mask()}, 16), Trace{}, small_options()), "replay.trace.empty");
}

TEST(Replay, SeriesHasNoMorePointsThanAsked) {
  ReplayOptions options = small_options();
  options.verify_fraction = 0;
  options.max_num_seqs = 2;
  options.max_series_points = 8;
  const ReplayResult r = replay(tiny_model({full_mask()}, 16), tree_trace(30, 16, 30, 12, 1), options);
  EXPECT_GT(r.steps, 50);
  EXPECT_LE(r.series.size(), 8u);
  EXPECT_GE(r.series.size(), 4u);
  int64_t steps = 0;
  for (const ReplayPoint& p : r.series) {
    steps += p.steps;
    EXPECT_LE(p.running, 2);
    EXPECT_GE(p.occupancy[0], 0);
    EXPECT_LE(p.occupancy[0], 1);
  }
  EXPECT_EQ(steps, r.steps);
  EXPECT_DOUBLE_EQ(r.series.back().clock_s, r.clock_s);
}

}  // namespace
}  // namespace imbrex::serve

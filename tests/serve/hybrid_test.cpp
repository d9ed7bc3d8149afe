// The replay of models whose layers are of several families: states beside pages, same bits however it is batched, and mistakes noticed.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "serve/mistaken_states.h"
#include "serve/replay.h"
#include "serve/report.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

TEST(Hybrid, RunsATraceToItsEndAndChecksEveryOutput) {
  const Trace trace = tree_trace(12, 16, 60, 12, 1);
  const ReplayResult r = replay(tiny_hybrid_model("ccabw", 16), trace, small_options());
  EXPECT_TRUE(r.complete);
  EXPECT_EQ(r.finished_requests, 12);
  EXPECT_EQ(r.verified_outputs, (r.prefill_tokens + r.decode_tokens) * (2 * 2 + 3));  // 2 q heads a kv head of 2 layers, 3 convolutions
  EXPECT_EQ(r.verified_values, (r.prefill_tokens + r.decode_tokens) * (2 * 2 * 16 + 3 * 48));
  EXPECT_LE(r.verify_max_ratio, 1);
  ASSERT_EQ(r.kinds.size(), 4u);
  EXPECT_EQ(r.kinds[0].family, "short_conv");
  EXPECT_EQ(r.kinds[0].layers, (std::vector<int>{0, 1}));
  EXPECT_EQ(r.kinds[0].kv_write_s, 0);
  EXPECT_GT(r.kinds[0].run_s, 0);
  EXPECT_EQ(r.kinds[1].family, "attention");
  EXPECT_EQ(r.kinds[2].spec, "short_conv d48 w3 bf16 bias");
  ASSERT_EQ(r.groups.size(), 3u);
  EXPECT_EQ(r.groups[0].name, "short_conv");
  EXPECT_EQ(r.groups[0].num_layers, 3);
  EXPECT_EQ(r.groups[0].num_slots, 16) << "for 8 requests that run, and as many states of prefixes";
  EXPECT_EQ(r.groups[0].num_blocks, 0);
  EXPECT_EQ(r.groups[0].bytes, 16 * 3 * 2 * 48 * 2);
  EXPECT_GE(r.groups[0].peak_occupancy, 0.5);
  EXPECT_EQ(r.groups[1].num_slots, 0);
  EXPECT_EQ(r.kv_bytes, r.groups[0].bytes + r.groups[1].bytes + r.groups[2].bytes);
  EXPECT_NEAR(r.times.step_s(), r.busy_s(), 1e-9);
  EXPECT_GT(r.times.state_s, 0);
  EXPECT_EQ(r.state_layers.steps, r.steps);
  EXPECT_EQ(r.state_layers.tokens, r.prefill_tokens + r.decode_tokens);
  const std::string text = report_text(r, {});
  EXPECT_NE(text.find("16 state slots, one a running request"), std::string::npos) << text;
  EXPECT_NE(text.find("(same seed, same bits: whatever the batch size and the number of threads)"), std::string::npos) << text;
}

TEST(Hybrid, SameBitsHoweverItIsBatched) {
  const Trace trace = tree_trace(14, 16, 90, 40, 2, 0.5);
  const ModelSpec model = tiny_hybrid_model("cabcw", 16, 80, 4);
  ReplayOptions options = small_options();
  options.verify_fraction = 0;
  const ReplayResult first = replay(model, trace, options);
  const auto same = [&](auto change) { return expect_same_digests(model, trace, options, first, change); };
  same([](auto& o) { o.max_num_batched_tokens = 1; });
  same([](auto& o) { o.max_num_batched_tokens = 17; });
  same([](auto& o) { o.max_num_batched_tokens = 512; });
  same([](auto& o) { o.max_num_seqs = 1; });
  same([](auto& o) { o.num_threads = 3; });
  same([](auto& o) { o.block_size = 8; });
  same([](auto& o) { o.pacing = Pacing::arrival, o.fixed_step_s = 0.3; });
  const ReplayResult storm = same([](auto& o) { o.num_blocks = 10, o.verify_fraction = 1; });
  EXPECT_GT(storm.preemptions, 0);
  EXPECT_GT(storm.recomputed_tokens, 0);
  options.seed = 2;
  EXPECT_NE(replay(model, trace, options).digest, first.digest);
}

TEST(Hybrid, LayersOfThePlainFormRunAndAreVerified) {
  const Trace trace = tree_trace(12, 16, 60, 12, 1);
  const ReplayResult r = replay(tiny_hybrid_model("pca", 16), trace, small_options());
  EXPECT_TRUE(r.complete);
  EXPECT_EQ(r.verified_outputs, (r.prefill_tokens + r.decode_tokens) * (2 + 2));
  EXPECT_LE(r.verify_max_ratio, 1);
  ASSERT_EQ(r.kinds.size(), 3u);
  EXPECT_EQ(r.kinds[0].spec, "short_conv d48 w3 bf16 plain silu");
  EXPECT_EQ(r.groups[0].num_layers, 2) << "of both forms, whose states have the same shape";
  EXPECT_NE(r.digest, replay(tiny_hybrid_model("cca", 16), trace, small_options()).digest);
}

// The digest is of the layers of both families: it changes with the weights of either.
TEST(Hybrid, OutputsOfBothFamiliesAreInTheDigest) {
  const Trace trace = tree_trace(4, 16, 90, 6, 1);
  const auto digest = [&](const char* layers, int width) {
    return replay(tiny_hybrid_model(layers, 16, 48, width), trace, small_options()).digest;
  };
  EXPECT_NE(digest("ca", 3), digest("ca", 2));
  EXPECT_NE(digest("ca", 3), digest("ba", 3));
  EXPECT_NE(digest("ca", 3), digest("cw", 3));
}

TEST(Hybrid, AModelMayKeepStatesAlone) {
  const Trace trace = tree_trace(12, 16, 60, 12, 1);
  const ReplayResult r = replay(tiny_hybrid_model("cb", 16), trace, small_options());
  EXPECT_TRUE(r.complete);
  ASSERT_EQ(r.groups.size(), 1u);
  EXPECT_EQ(r.kv_bytes, 16 * 2 * 2 * 48 * 2);
  EXPECT_EQ(r.verified_outputs, (r.prefill_tokens + r.decode_tokens) * 2);
  EXPECT_EQ(r.times.attention_s, 0);
  EXPECT_EQ(r.kv_written_bytes, 0);
}

// States have at most half of the memory; with fewer slots than requests the others wait for one.
TEST(Hybrid, SlotsAndPagesShareTheMemory) {
  const Trace trace = tree_trace(10, 16, 60, 12, 1);
  const ModelSpec model = tiny_hybrid_model("cca", 16, 512);
  const int64_t slot = 2 * 2 * 512 * 2, block = 16 * 2 * 32 * 2;
  ReplayOptions options = small_options();
  options.verify_fraction = 0;
  options.kv_bytes = 6 * slot + 100;
  const ReplayResult r = replay(model, trace, options);
  EXPECT_TRUE(r.complete);
  EXPECT_EQ(r.groups[0].num_slots, 3);
  EXPECT_EQ(r.groups[1].num_blocks, (3 * slot + 100) / block);
  EXPECT_EQ(r.groups[0].bytes, 3 * slot);
  EXPECT_EQ(r.batch.max, 3);
  EXPECT_EQ(r.preemptions, 0);
  options.kv_bytes = slot + block - 1;
  EXPECT_EQ(test::error_code([&] { replay(model, trace, options); }), "replay.kv_bytes.small");
  options.kv_bytes = int64_t(64) << 20;
  EXPECT_EQ(replay(model, trace, options).groups[0].num_slots, 2 * 8) << "not more than twice the requests of a step";
  options.max_num_seqs = 100;
  EXPECT_EQ(replay(model, trace, options).groups[0].num_slots, 2 * 10) << "nor of the trace";
  options.prefix_sharing = false;
  EXPECT_EQ(replay(model, trace, options).groups[0].num_slots, 10) << "no state is kept for others";
}

TEST(Hybrid, UsefulWorkIsCounted) {
  Trace trace;
  trace.requests = {{.arrival_s = 0, .input_length = 10, .output_length = 3, .prefix_ids = {}}};
  const ReplayResult r = replay(tiny_hybrid_model("cba", 16), trace, small_options());
  const double state = 2 * 48 * 2;  // bytes
  EXPECT_DOUBLE_EQ(r.state_layers.flops, 12 * 48.0 * (7 + 8));
  EXPECT_DOUBLE_EQ(r.state_layers.bytes, 2 * (12 * 4 * 48 * 2 + (1 + 2 + 2) * state));  // the first step reads none
  EXPECT_DOUBLE_EQ(r.kinds[1].flops, 12 * 48.0 * 8);
  EXPECT_DOUBLE_EQ(r.kv_written_bytes, 12 * 2 * 32 * 2);
  EXPECT_DOUBLE_EQ(r.decode_steps.flops, 2.0 * 4 * 32 * (11 + 12)) << "of attention alone";
}

TEST(Hybrid, VerificationNoticesWrongStates) {
  const auto backend = std::make_shared<MistakenStates<ShortConvFamily, ShortConvInputs, ShortConvOutputs>>();
  register_backend<ShortConvFamily>(backend);
  const Trace trace = tree_trace(12, 16, 60, 12, 1);
  ReplayOptions options = small_options();
  options.select.forced = "mistaken";
  const auto code = [&](StateMistake mistake) {
    backend->mistake = mistake;
    return test::error_code([&] { replay(tiny_hybrid_model("cac", 16), trace, options); });
  };
  EXPECT_EQ(code(StateMistake::none), "nothing thrown");
  EXPECT_EQ(code(StateMistake::forgets), "replay.verify");
  EXPECT_EQ(code(StateMistake::shares), "replay.verify");
  EXPECT_EQ(code(StateMistake::stale), "replay.verify");
  backend->mistake = StateMistake::none;
  const ReplayResult r = replay(tiny_hybrid_model("cac", 16), trace, options);
  unregister_backend<ShortConvFamily>("mistaken");
  EXPECT_EQ(r.kinds[0].rule, "forced");
  EXPECT_NE(r.kinds[1].rule.find("mistaken, forced, is of the family short_conv"), std::string::npos) << r.kinds[1].rule;
}

// Prompts that make one token each: nobody reads their states again. Some are shorter than the convolution.
TEST(Hybrid, VerificationNoticesWrongFinalStates) {
  const auto backend = std::make_shared<MistakenStates<ShortConvFamily, ShortConvInputs, ShortConvOutputs>>();
  register_backend<ShortConvFamily>(backend);
  Trace trace = tree_trace(6, 16, 60, 1, 1);
  trace.requests[0].input_length = 1, trace.requests[0].prefix_ids.resize(1);
  trace.requests[1].input_length = 2, trace.requests[1].prefix_ids.resize(1);
  ReplayOptions options = small_options();
  options.max_num_batched_tokens = 512;  // a prompt is not cut, nor for a state of its prefix
  options.prefix_sharing = false;
  options.select.forced = "mistaken";
  for (const char* layers : {"c", "p"}) {
    backend->mistake = StateMistake::none;
    EXPECT_EQ(replay(tiny_hybrid_model(layers, 16, 48, 4), trace, options).verified_states, 6) << layers;
    backend->mistake = StateMistake::spoils;
    try {
      replay(tiny_hybrid_model(layers, 16, 48, 4), trace, options);
      ADD_FAILURE() << layers << ": nothing thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), "replay.verify");
      EXPECT_NE(std::string(error.what()).find("layer decoder.0, number of the state"), std::string::npos) << error.what();
    }
  }
  unregister_backend<ShortConvFamily>("mistaken");
}

TEST(Hybrid, PhasesOfStatesHaveOneBackend) {
  ReplayOptions options = small_options();
  options.select.forced_prefill = "cpu_generic";
  options.select.forced_decode = "reference";
  const ReplayResult r = replay(tiny_hybrid_model("ca", 16), tree_trace(3, 16, 30, 4, 1), options);
  EXPECT_EQ(r.kinds[0].backend, "cpu_generic");
  EXPECT_NE(r.kinds[0].rule.find("runs decode too"), std::string::npos) << r.kinds[0].rule;
  EXPECT_EQ(r.kinds[1].backend, "cpu_generic + reference");
  options.select.forced_decode = "no_such";
  EXPECT_EQ(test::error_code([&] { replay(tiny_hybrid_model("c", 16), tree_trace(3, 16, 30, 4, 1), options); }), "select.forced");
}

}  // namespace
}  // namespace imbrex::serve

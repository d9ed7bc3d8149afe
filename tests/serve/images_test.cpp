// Images in prompts: tokens that see each other within a causal prompt, and steps that do not cut them. Also system prompts that all
// requests share.
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "expect_error.h"
#include "imbrex/select.h"
#include "serve/replay.h"
#include "serve/scheduler.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

Trace with_images(Trace trace, int every, int tokens) {
  add_images(trace, every, tokens);
  return trace;
}

TEST(Images, AreTheLastTokensOfEachStretchOfAPrompt) {
  Trace trace;
  trace.requests = {{.input_length = 20, .output_length = 9, .prefix_ids = {}}, {.input_length = 9, .output_length = 1, .prefix_ids = {}}};
  add_images(trace, 10, 4);
  const TraceRequest& r = trace.requests[0];
  EXPECT_EQ(r.images, (std::vector<TokenSpan>{{6, 10}, {16, 20}}));
  EXPECT_TRUE(trace.requests[1].images.empty());
  EXPECT_TRUE(has_images(trace));
  EXPECT_NE(trace.source.find("with an image of 4 tokens in every 10"), std::string::npos);
  for (const auto& [position, last] : {std::pair(0, 0), {5, 5}, {6, 9}, {9, 9}, {10, 10}, {16, 19}, {19, 19}, {20, 20}, {28, 28}})
    EXPECT_EQ(last_seen(r, position), last) << position;
  EXPECT_EQ(test::error_code([&] { add_images(trace, 4, 5); }), "trace.images");
  EXPECT_EQ(test::error_code([&] { add_images(trace, 0, 1); }), "trace.images");
  EXPECT_EQ(test::error_code([&] { add_images(trace, 4, 0); }), "trace.images");
  EXPECT_EQ(test::error_code([&] { add_system_prompt(trace, -1); }), "trace.system_prompt");
}

// A token of an image that is whole is another one than that of a prompt which ends within it: their keys are not the same.
TEST(Images, TokensOfAnImageAreItsOwn) {
  const Trace trace = with_images(tree_trace(1, 16, 64, 4, 1), 1000, 8);
  TraceRequest whole{.input_length = 32, .output_length = 1, .prefix_ids = {5, 6}}, cut = whole;
  whole.images = {{20, 32}};
  for (int p = 0; p < 32; ++p) EXPECT_EQ(token_id(1, whole, 16, 0, p) == token_id(1, cut, 16, 1, p), p < 20) << p;
  cut.images = {{20, 31}};
  EXPECT_NE(token_id(1, whole, 16, 0, 21), token_id(1, cut, 16, 1, 21));
  EXPECT_FALSE(has_images(trace));
}

TEST(Images, StepsDoNotEndWithinThem) {
  const Trace trace = with_images(tree_trace(12, 16, 200, 20, 3), 24, 17);
  for (const bool sharing : {false, true})
    for (const int budget : {17, 19, 40, 512}) {
      SchedulerOptions options{.max_num_batched_tokens = budget, .max_num_seqs = 5, .max_seq_len = 256, .num_blocks = {0, 30}};
      options.num_slots = 10, options.state_unit = 16;
      options.prefix_block = trace.prefix_block, options.prefix_sharing = sharing, options.images = true;
      Scheduler scheduler(tiny_hybrid_model("ca", 16), options);
      for (size_t i = 0; i < trace.requests.size(); ++i) scheduler.add(trace.requests[i], int(i), 0);
      StepPlan plan;
      int seen = 0;
      for (double now = 0; scheduler.step(now, plan); ++now) {
        ASSERT_EQ(int(plan.positions.size()), plan.num_tokens());
        ASSERT_GT(plan.num_tokens(), 0);
        EXPECT_TRUE(plan.batch(0).positions.empty()) << "of states";
        EXPECT_EQ(plan.batch(1).positions.size(), plan.positions.size());
        for (int r = 0; r < plan.num_reqs(); ++r) {
          const TraceRequest& request = trace.requests[size_t(plan.request_ids[size_t(r)])];
          for (int p = plan.first_positions[size_t(r)]; p < plan.seq_lens[size_t(r)]; ++p) {
            const int position = plan.positions[size_t(plan.query_start_loc[size_t(r)] + p - plan.first_positions[size_t(r)])];
            ASSERT_EQ(position, last_seen(request, p));
            ASSERT_LT(position, plan.seq_lens[size_t(r)]) << "an image is in one step";
            seen += position > p;
          }
        }
        scheduler.finish_step(now + 1);
        scheduler.check();
      }
      EXPECT_EQ(scheduler.finished().size(), trace.requests.size()) << budget;
      EXPECT_GT(seen, 100);
    }
}

TEST(Images, EveryOutputIsVerifiedAndHasTheSameBitsHoweverItIsBatched) {
  const Trace plain = tree_trace(12, 16, 150, 20, 3), trace = with_images(plain, 24, 17);
  for (const char* layers : {"aw", "caw"}) {
    SCOPED_TRACE(layers);
    const ModelSpec model = tiny_hybrid_model(layers, 16);
    ReplayOptions options = small_options();
    const ReplayResult first = replay(model, trace, options);
    EXPECT_TRUE(first.complete);
    EXPECT_LE(first.verify_max_ratio, 1);
    EXPECT_GT(first.verified_outputs, (first.prefill_tokens + first.decode_tokens) * 4 - 1);
    EXPECT_GT(first.prefix_hit_tokens, 0);
    EXPECT_NE(first.kinds.back().spec.find("positions"), std::string::npos) << first.kinds.back().spec;
    EXPECT_NE(first.digest, replay(model, plain, options).digest);
    options.verify_fraction = 0;
    const auto same = [&](auto change) { return expect_same_digests(model, trace, options, first, change); };
    same([](auto& o) { o.max_num_batched_tokens = 17; });
    same([](auto& o) { o.max_num_batched_tokens = 512; });
    same([](auto& o) { o.max_num_seqs = 1; });
    same([](auto& o) { o.prefix_sharing = false; });
    same([](auto& o) { o.drafts.tokens = 3; });
    const ReplayResult storm = same([](auto& o) { o.num_blocks = 12, o.verify_fraction = 1; });
    EXPECT_GT(storm.preemptions, 0);
  }
}

TEST(Images, LatentLayersSeeThemToo) {
  ModelSpec model = tiny_hybrid_model("", 16);
  ModelLayer& layer = model.layers.emplace_back();
  layer.name = "decoder.0", layer.number = model.num_layers++;
  layer.spec = MlaSpec{.num_heads = 2, .kv_lora_rank = 32, .qk_nope_dim = 16, .qk_rope_dim = 8, .v_dim = 16};
  model = model.with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16);
  const ReplayResult r = replay(model, with_images(tree_trace(8, 16, 150, 20, 3), 24, 17), small_options());
  EXPECT_TRUE(r.complete);
  EXPECT_EQ(r.verified_outputs, r.prefill_tokens + r.decode_tokens);
}

TEST(Images, UsefulWorkIsCounted) {
  Trace trace;
  trace.requests = {{.input_length = 10, .output_length = 1, .prefix_ids = {}}};
  trace.requests[0].images = {{4, 8}};
  const ReplayResult r = replay(tiny_model({full_mask()}, 16), trace, small_options());
  EXPECT_DOUBLE_EQ(r.prefill_steps.flops, 4.0 * 4 * 16 * (55 + 3 + 2 + 1));
}

TEST(Images, AreRefused) {
  const Trace trace = with_images(tree_trace(4, 16, 150, 20, 3), 100, 65);
  ReplayOptions options = small_options();
  const ModelSpec model = tiny_model({full_mask()}, 16);
  EXPECT_EQ(test::error_code([&] { replay(model, trace, options); }), "scheduler.request.images") << "more than a step has";
  options.max_num_batched_tokens = 65;
  EXPECT_EQ(test::error_code([&] { replay(model, trace, options); }), "nothing thrown");
  options.drafts = {.tokens = 2, .tree = true};
  EXPECT_EQ(test::error_code([&] { replay(model, trace, options); }), "replay.drafts.tree");
}

// A system prompt is computed once, whatever the prompts behind it are, and whether the trace has prefixes or not.
TEST(SystemPrompt, IsFoundInTheCache) {
  for (const int prefix_block : {0, 16})
    for (const char* layers : {"aw", "caw"}) {
      SCOPED_TRACE(testing::Message() << prefix_block << " " << layers);
      Trace trace = tree_trace(12, 16, 60, 12, 4, 0.5);
      if (prefix_block == 0) {
        trace.prefix_block = 0;
        for (TraceRequest& r : trace.requests) r.prefix_ids.clear();
      }
      ReplayOptions options = small_options();
      options.pacing = Pacing::arrival, options.fixed_step_s = 0.01;
      const ReplayResult before = replay(tiny_hybrid_model(layers, 16), trace, options);
      add_system_prompt(trace, 100);
      EXPECT_NE(trace.source.find("behind a system prompt of 100 tokens"), std::string::npos);
      const ReplayResult r = replay(tiny_hybrid_model(layers, 16), trace, options);
      EXPECT_TRUE(r.complete);
      EXPECT_EQ(r.prompt_tokens, before.prompt_tokens + 12 * 100);
      EXPECT_GE(r.prefix_hit_tokens - before.prefix_hit_tokens, layers[0] == 'a' ? 11 * 96 : 9 * 96);
      EXPECT_GT(r.verified_outputs, 0);
      EXPECT_EQ(r.kept_states > 0, layers[0] == 'c');
      expect_same_digests(tiny_hybrid_model(layers, 16), trace, options, r, [](ReplayOptions& o) { o.prefix_sharing = false; });
      options.drafts = {.tokens = 4, .tree = true};
      expect_same_digests(tiny_hybrid_model(layers, 16), trace, options, r, [](ReplayOptions&) {});
    }
}

// Requests that decode behind one have its keys in the same blocks, which plans read once for all of them.
TEST(SystemPrompt, ItsKeysAreReadOnceForAllRequests) {
  Trace trace;
  for (int i = 0; i < 4; ++i) trace.requests.push_back({.input_length = 5 + i, .output_length = 12, .prefix_ids = {}});
  ReplayOptions options = small_options();
  options.verify_fraction = 0.02, options.max_num_batched_tokens = 512;
  const auto plan = [&] {
    const ReplayResult r = replay(tiny_model({full_mask()}, 16), trace, options);
    EXPECT_TRUE(r.complete);
    EXPECT_GT(r.verified_outputs, 0);
    return r.kinds[0].plan;
  };
  EXPECT_EQ(plan().find("shared by requests"), std::string::npos);
  add_system_prompt(trace, 4200);  // more than the 4096 keys of a piece
  const std::string shared = plan();
  EXPECT_NE(shared.find("shared by requests"), std::string::npos) << shared;
}

}  // namespace
}  // namespace imbrex::serve

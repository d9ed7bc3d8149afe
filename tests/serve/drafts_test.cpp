// Drafts in a replay: which are made and kept, that the tokens that come of them are those of a replay without any, bit for bit, and that
// wrong states are noticed.
#include "serve/drafts.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "conformance/recurrent/cases.h"
#include "expect_error.h"
#include "serve/mistaken_states.h"
#include "serve/report.h"
#include "serve/scheduler.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

// Layers of states as models have them, with drafts of a few tokens; "a": attention.
ModelSpec drafting_model(std::string_view layers) {
  ModelSpec model = tiny_hybrid_model("", 16);
  model.name = model.family = "drafting";
  for (const char kind : layers) {
    ModelLayer& layer = model.layers.emplace_back();
    layer.name = "decoder." + std::to_string(model.layers.size() - 1);
    layer.number = model.num_layers++;
    if (kind == 'a' || kind == 'c') {
      layer.spec = tiny_hybrid_model(std::string_view(&kind, 1), 16).layers[0].spec;
      continue;
    }
    RecurrentSpec spec = recurrent_layer(kind == 'g' ? "gdn" : kind == 'm' ? "mamba2" : "mamba1");
    if (spec.head_dim_v > 1) spec.head_dim_k = 32, spec.head_dim_v = 8;  // of so few dimensions that prompts do not come in chunks
    if (kind == 'g') spec.conv = RecurrentConv::qkv, spec.out_gate = OutputGate::silu, spec.out_norm = OutputNorm::before_gate;
    if (kind == 'm') spec.conv = RecurrentConv::vkq, spec.conv_bias = true;
    layer.spec = spec;
  }
  return model.with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16);
}

TEST(Drafts, FollowTheirKeyAndTheirLimits) {
  int kept = 0, branched = 0;
  for (const bool tree : {false, true})
    for (uint64_t key = 0; key < 400; ++key) {
      const DraftOptions options{.tokens = 6, .tree = tree, .acceptance = 0.7};
      const Drafts drafts = make_drafts(options, 6, 1 + int(key % 5), key);
      ASSERT_EQ(drafts.count(), tree ? 6 : 1 + int(key % 5));
      for (int i = 0; i < drafts.count(); ++i) {
        const int parent = drafts.parents[size_t(i)];
        ASSERT_TRUE(parent >= -1 && parent < i && (tree || parent == i - 1));
        ASSERT_EQ(drafts.depths[size_t(i)], parent < 0 ? 1 : drafts.depths[size_t(parent)] + 1);
        ASSERT_LE(drafts.depths[size_t(i)], 1 + int(key % 5));
        branched += tree && parent != i - 1;
      }
      int at = -1;
      for (const int i : drafts.kept) {
        ASSERT_EQ(drafts.parents[size_t(i)], at) << "a path";
        at = i;
      }
      EXPECT_EQ(drafts.last_kept(), at + 1);
      EXPECT_EQ(make_drafts(options, 6, 1 + int(key % 5), key).kept, drafts.kept);
      kept += !drafts.kept.empty();
    }
  EXPECT_NEAR(kept / 800., 0.7, 0.06);
  EXPECT_GT(branched, 400);
  EXPECT_EQ(make_drafts({.tokens = 3, .acceptance = 1}, 3, 9, 1).kept, (std::vector<int>{0, 1, 2}));
  EXPECT_TRUE(make_drafts({.tokens = 3, .acceptance = 0}, 3, 9, 1).kept.empty());
}

// Every output and every state that a step leaves is checked too, of drafts that are not kept as well.
TEST(Drafts, TheTokensAreThoseWithoutDrafts) {
  const Trace trace = tree_trace(6, 16, 40, 20, 3);
  for (const char* layers : {"gma", "gm1", "ca", "c1g"}) {
    SCOPED_TRACE(layers);
    const ModelSpec model = drafting_model(layers);
    const bool has_pages = std::string_view(layers).find('a') != std::string_view::npos;
    ReplayOptions options = small_options();
    const ReplayResult plain = replay(model, trace, options);
    EXPECT_EQ(plain.drafts, 0);
    for (const int tokens : {2, 6})
      for (const bool tree : {false, true}) {
        if (tree && has_pages) continue;
        SCOPED_TRACE(testing::Message() << tokens << (tree ? " as trees" : ""));
        const auto drafting = [&](ReplayOptions& o) { o.drafts = {.tokens = tokens, .tree = tree}; };
        const ReplayResult r = expect_same_digests(model, trace, options, plain, drafting);
        EXPECT_EQ(r.output_tokens, plain.output_tokens);
        EXPECT_EQ(r.decode_tokens + r.prefill_tokens - r.recomputed_tokens,
                  plain.decode_tokens + plain.prefill_tokens - plain.recomputed_tokens);
        EXPECT_GT(r.kept_drafts, r.drafts / 20);
        EXPECT_LT(r.kept_drafts, r.drafts);
        EXPECT_LT(r.steps, plain.steps);
        EXPECT_GT(r.verified_outputs, plain.verified_outputs) << "what is not kept is verified too";
        EXPECT_GT(r.verified_states, plain.verified_states);
        EXPECT_NE(report_text(r, {}).find("drafts that were kept"), std::string::npos);
      }
  }
}

// With little memory: requests begin again, drafts are left out, and prefixes are found.
TEST(Drafts, InAStorm) {
  const Trace trace = tree_trace(14, 16, 90, 40, 2, 0.5);
  const ModelSpec model = drafting_model("gma");
  ReplayOptions options = small_options();
  options.verify_fraction = 0;
  const ReplayResult plain = replay(model, trace, options);
  const auto same = [&](auto change) {
    return expect_same_digests(model, trace, options, plain, [&](ReplayOptions& o) {
      o.drafts = {.tokens = 5};
      change(o);
    });
  };
  same([](auto& o) { o.max_num_batched_tokens = 9; });
  same([](auto& o) { o.max_num_batched_tokens = 1; });
  same([](auto& o) { o.drafts.acceptance = 1; });
  same([](auto& o) { o.drafts.acceptance = 0; });
  const ReplayResult storm = same([](auto& o) { o.num_blocks = 10, o.verify_fraction = 1; });
  EXPECT_GT(storm.preemptions, 0);
  EXPECT_GT(storm.kept_drafts, 0);
  EXPECT_GT(storm.kept_states, 0);
}

TEST(Drafts, StepsOfAScheduler) {
  Trace trace;
  trace.requests = {{.input_length = 5, .output_length = 30, .prefix_ids = {}}};
  SchedulerOptions options{.max_num_batched_tokens = 64, .max_num_seqs = 2, .max_seq_len = 64, .num_blocks = {0}, .num_slots = 2};
  options.drafts = {.tokens = 4, .tree = true};
  options.prefix_sharing = false;
  Scheduler scheduler(drafting_model("g"), options);
  scheduler.add(trace.requests[0], 0, 0);
  StepPlan plan;
  int accepted = 0, computed = 0;
  for (double now = 0; scheduler.step(now, plan); ++now) {
    const Batch batch = plan.batch(0);
    ASSERT_EQ(batch.num_drafts.size(), 1u);
    const Drafts& drafts = plan.drafts[0];
    EXPECT_EQ(batch.num_drafts[0], drafts.count());
    EXPECT_EQ(batch.accepted_drafts[0], accepted) << "the last that was kept of the step before";
    EXPECT_EQ(plan.first_positions[0], computed);
    EXPECT_EQ(batch.seq_lens[0], computed + plan.num_tokens());
    ASSERT_EQ(int(batch.draft_parents.size()), plan.num_tokens());
    const int certain = plan.certain_tokens(0);
    EXPECT_EQ(certain, computed == 0 ? 5 : 1);
    EXPECT_EQ(plan.decodes_only(), computed > 0);
    for (int i = 0; i < drafts.count(); ++i) EXPECT_EQ(batch.draft_parents[size_t(certain + i)], certain + drafts.parents[size_t(i)]);
    accepted = drafts.last_kept();
    computed += certain + int(drafts.kept.size());
    scheduler.finish_step(now + 1);
    scheduler.check();
  }
  EXPECT_EQ(computed, 34);
  EXPECT_GT(scheduler.stats().kept_drafts, 0);
  EXPECT_EQ(scheduler.stats().output_tokens, 30);
  options.num_blocks = {0, 8}, options.state_unit = 16;
  EXPECT_EQ(test::error_code([&] { Scheduler(drafting_model("ga"), options); }), "scheduler.drafts.tree");
}

TEST(Drafts, VerificationNoticesWrongStates) {
  const auto backend = std::make_shared<MistakenStates<RecurrentFamily, RecurrentInputs, RecurrentOutputs>>();
  register_backend<RecurrentFamily>(backend);
  const Trace trace = tree_trace(6, 16, 30, 25, 1);
  ReplayOptions options = small_options();
  options.select.forced = "mistaken";
  options.drafts = {.tokens = 4, .tree = true};
  const auto code = [&](StateMistake mistake) {
    backend->mistake = mistake;
    return test::error_code([&] { replay(drafting_model("gm"), trace, options); });
  };
  EXPECT_EQ(code(StateMistake::none), "nothing thrown");
  EXPECT_EQ(code(StateMistake::chains), "replay.verify") << "a tree that is computed as a chain";
  EXPECT_EQ(code(StateMistake::forgets_drafts), "replay.verify") << "a step that goes on behind the certain token, whatever was kept";
  unregister_backend<RecurrentFamily>("mistaken");
}

TEST(Drafts, AreRefused) {
  const auto code = [](const char* layers, DraftOptions drafts) {
    ReplayOptions options = small_options();
    options.drafts = drafts;
    return test::error_code([&] { replay(drafting_model(layers), tree_trace(2, 16, 30, 4, 1), options); });
  };
  EXPECT_EQ(code("g", {.tokens = 65}), "replay.drafts");
  EXPECT_EQ(code("g", {.tokens = -1}), "replay.drafts");
  EXPECT_EQ(code("g", {.tokens = 2, .acceptance = 1.5}), "replay.drafts");
  EXPECT_EQ(code("g", {.tokens = 0, .tree = true}), "replay.drafts");
  EXPECT_EQ(code("ga", {.tokens = 2, .tree = true}), "replay.drafts.tree");
}

}  // namespace
}  // namespace imbrex::serve

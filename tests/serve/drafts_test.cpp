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

// Layers of states as models have them, with drafts of a few tokens; "a", "w" and "k": attention.
ModelSpec drafting_model(std::string_view layers) {
  ModelSpec model = tiny_hybrid_model("", 16);
  model.name = model.family = "drafting";
  for (const char kind : layers) {
    ModelLayer& layer = model.layers.emplace_back();
    layer.name = "decoder." + std::to_string(model.layers.size() - 1);
    layer.number = model.num_layers++;
    if (kind == 'k') {  // of chunks, with a bias by positions
      AttentionSpec spec{.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 16};
      spec.mask.chunk = 24, spec.score.alibi = true;
      layer.spec = spec;
      continue;
    }
    if (kind == 'l') {
      layer.spec = MlaSpec{.num_heads = 2, .kv_lora_rank = 32, .qk_nope_dim = 16, .qk_rope_dim = 8, .v_dim = 16};
      continue;
    }
    if (kind == 'a' || kind == 'w' || kind == 'c') {
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
  for (const char* layers : {"gma", "gm1", "ca", "c1g", "awk", "gla"}) {
    SCOPED_TRACE(layers);
    const ModelSpec model = drafting_model(layers);
    ReplayOptions options = small_options();
    const ReplayResult plain = replay(model, trace, options);
    EXPECT_EQ(plain.drafts, 0);
    for (const int tokens : {2, 6})
      for (const bool tree : {false, true}) {
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
        EXPECT_TRUE(r.verified_states > plain.verified_states || std::string_view(layers) == "awk");
        EXPECT_NE(report_text(r, {}).find("drafts that were kept"), std::string::npos);
      }
  }
}

// Keys are moved in caches of every form.
TEST(Drafts, TreesInOtherCaches) {
  const Trace trace = tree_trace(6, 16, 40, 20, 3);
  for (const char* format : {"strided", "amx_packed"})
    for (const DType dtype : {DType::f32, DType::bf16, DType::fp8_e4m3}) {
      if (dtype == DType::f32 && std::string_view(format) != "strided") continue;
      SCOPED_TRACE(testing::Message() << format << " " << to_string(dtype));
      ReplayOptions options = small_options();
      options.kv_format = format, options.kv_dtype = dtype;
      options.verify_fraction = 0;
      const ModelSpec model = drafting_model(std::string_view(format) == "strided" ? "awl" : "aw");
      const ReplayResult plain = replay(model, trace, options);
      const ReplayResult r = expect_same_digests(model, trace, options, plain,
                                                 [](ReplayOptions& o) { o.drafts = {.tokens = 6, .tree = true}, o.verify_fraction = 1; });
      EXPECT_GT(r.kept_drafts, 0);
    }
}

// With little memory: requests begin again, drafts are left out, and prefixes are found.
class DraftStorm : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Drafts, DraftStorm, testing::Bool(), [](const auto& info) { return info.param ? "trees" : "chains"; });
TEST_P(DraftStorm, TheTokensAreThoseWithoutDrafts) {
  const Trace trace = tree_trace(14, 16, 90, 40, 2, 0.5);
  const ModelSpec model = drafting_model("gmaw");
  ReplayOptions options = small_options();
  options.verify_fraction = 0;
  const ReplayResult plain = replay(model, trace, options);
  const auto same = [&](auto change) {
    return expect_same_digests(model, trace, options, plain, [&](ReplayOptions& o) {
      o.drafts = {.tokens = 5, .tree = GetParam()};
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
}

// The keys of a path that is kept go to the slots that follow those of certain tokens, in its order; and in a chain stay where they are.
TEST(Drafts, KeysOfAPathAreMovedTogether) {
  Trace trace;
  trace.requests = {{.input_length = 5, .output_length = 30, .prefix_ids = {}}, {.input_length = 9, .output_length = 30, .prefix_ids = {}}};
  int moved = 0;
  for (const bool tree : {false, true}) {
    SchedulerOptions options{.max_num_batched_tokens = 64, .max_num_seqs = 2, .max_seq_len = 39, .num_blocks = {8}};
    options.drafts = {.tokens = 6, .tree = tree, .acceptance = 0.9};
    Scheduler scheduler(drafting_model("a"), options);
    for (int id = 0; id < 2; ++id) scheduler.add(trace.requests[size_t(id)], id, 0);
    StepPlan plan;
    for (double now = 0; scheduler.step(now, plan); ++now) {
      const StepPlan::Group& group = plan.groups[0];
      bool moves = false;
      for (int r = 0; r < plan.num_reqs(); ++r) {
        const Drafts& drafts = plan.drafts[size_t(r)];
        const size_t first_draft = size_t(plan.query_start_loc[size_t(r)] + plan.certain_tokens(r));
        std::vector<int64_t> expected(size_t(drafts.count()), -1);
        for (size_t depth = 0; depth < drafts.kept.size(); ++depth) {
          if (drafts.kept[depth] == int(depth)) continue;
          expected[size_t(drafts.kept[depth])] = group.slot_mapping[first_draft + depth];
          moves = true;
        }
        for (size_t i = 0; tree && i < expected.size(); ++i) EXPECT_EQ(group.kept_slots[first_draft + i], expected[i]);
        for (int t = plan.query_start_loc[size_t(r)]; tree && t < int(first_draft); ++t) EXPECT_EQ(group.kept_slots[size_t(t)], -1);
      }
      EXPECT_EQ(plan.moves, moves);
      EXPECT_TRUE(tree || !moves);
      moved += moves;
      scheduler.finish_step(now + 1);
      scheduler.check();
    }
    EXPECT_EQ(scheduler.finished().size(), 2u);
  }
  EXPECT_GT(moved, 5);
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
  EXPECT_EQ(code("ga", {.tokens = 64, .tree = true}), "replay.drafts.tree") << "and a token in front";
  EXPECT_EQ(code("l", {.tokens = 64, .tree = true}), "replay.drafts.tree");
  EXPECT_EQ(code("l", {.tokens = 63, .tree = true}), "nothing thrown");
}

}  // namespace
}  // namespace imbrex::serve

// States in slots beside pages: each request finds its own, or the one that was kept of a prefix that it shares.
#include <gtest/gtest.h>

#include <set>

#include "attention/mask.h"
#include "expect_error.h"
#include "serve/replay.h"
#include "serve/report.h"
#include "serve/scheduler.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

struct StateRun {
  SchedulerStats stats;
  double peak = 0;            // of the slots in use
  int64_t other_sources = 0;  // how often a request read another slot than it wrote
  std::vector<RequestRecord> finished;
};

// Runs a trace with steps of one second. What a slot or a page's place holds is a hash of the token and of all before it: a request that
// continues must find in its slot the state behind its own tokens, and under every key the key of its own token.
StateRun simulate_states(const ModelSpec& model, const Trace& trace, SchedulerOptions options) {
  options.prefix_block = trace.prefix_block;
  Scheduler scheduler(model, options);
  std::vector<std::vector<uint64_t>> chains(trace.requests.size());
  for (size_t i = 0; i < chains.size(); ++i) {
    const TraceRequest& r = trace.requests[i];
    scheduler.add(r, int(i), r.arrival_s);
    uint64_t chain = 0;
    for (int p = 0; p < r.input_length + r.output_length; ++p) {
      const uint64_t id = token_id(options.seed, r, trace.prefix_block, int(i), p);
      chains[i].push_back(chain = hash_block(chain, {&id, 1}));
    }
  }
  int states = -1;  // the group
  std::vector<uint64_t> slots(size_t(options.num_slots), 0);
  std::vector<std::vector<uint64_t>> places(model.cache_groups.size());  // of each group of pages
  for (size_t g = 0; g < model.cache_groups.size(); ++g) {
    if (model.cache_groups[g].holds_states()) {
      states = int(g);
    } else {
      places[g].resize(size_t(options.num_blocks[g] * model.layers[size_t(model.cache_groups[g].layers[0])].attention().block_size));
    }
  }

  StateRun run;
  StepPlan plan;
  double now = 0;
  while (!scheduler.done()) {
    if (!scheduler.step(now, plan)) {
      now = *scheduler.next_arrival();
      continue;
    }
    EXPECT_NO_THROW(scheduler.check());
    const Batch batch = plan.batch(states);
    EXPECT_EQ(int(batch.state_slots.size()), plan.num_reqs());
    EXPECT_TRUE(batch.block_table.empty() && batch.slot_mapping.empty());
    EXPECT_EQ(int(batch.source_slots.size()), plan.num_reqs());
    const std::vector<uint64_t> before = slots;
    std::set<int32_t> taken;
    for (const int32_t slot : batch.state_slots) EXPECT_TRUE(taken.insert(slot).second) << "a slot has two requests";
    for (int r = 0; r < plan.num_reqs(); ++r) {
      const int32_t source = batch.source_slots[size_t(r)];
      const bool reads_another = batch.context_len(r) > 0 && source != batch.state_slots[size_t(r)];
      EXPECT_FALSE(reads_another && taken.contains(source)) << "a state that is read is written too";
      run.other_sources += reads_another;
      const auto& chain = chains[size_t(plan.request_ids[size_t(r)])];
      const int32_t slot = batch.state_slots[size_t(r)];
      if (batch.context_len(r) > 0) {
        EXPECT_EQ(before.at(size_t(source)), chain[size_t(batch.context_len(r) - 1)]) << "request " << plan.request_ids[size_t(r)];
      }
      slots.at(size_t(slot)) = chain[size_t(batch.seq_lens[size_t(r)] - 1)];
      for (size_t g = 0; g < places.size(); ++g) {
        if (places[g].empty()) continue;
        const AttentionSpec& spec = model.layers[size_t(model.cache_groups[g].layers[0])].attention();
        const Batch pages = plan.batch(int(g));
        EXPECT_TRUE(pages.state_slots.empty());
        const auto* table = pages.block_table.as<int32_t>() + r * pages.block_table.stride(0);
        for (int p = int(first_visible_key(spec.mask, batch.context_len(r))); p < batch.seq_lens[size_t(r)]; ++p) {
          uint64_t& place = places[g][size_t(table[p / spec.block_size] * spec.block_size + p % spec.block_size)];
          if (p >= batch.context_len(r)) place = chain[size_t(p)];
          EXPECT_EQ(place, chain[size_t(p)]) << "request " << plan.request_ids[size_t(r)] << ", key " << p;
        }
      }
    }
    if (testing::Test::HasFailure()) return run;
    EXPECT_LE(scheduler.num_running(), options.num_slots);
    run.peak = std::max(run.peak, scheduler.occupancy(states));
    scheduler.finish_step(now += 1);
    EXPECT_NO_THROW(scheduler.check());
  }
  EXPECT_EQ(scheduler.occupancy(states), 0) << "slots leaked";
  run.stats = scheduler.stats();
  run.finished.assign(scheduler.finished().begin(), scheduler.finished().end());
  EXPECT_EQ(run.finished.size(), trace.requests.size());
  return run;
}

TEST(StatePrefixes, EveryStateIsFoundWhereItWasLeft) {
  int64_t hits = 0, resumed = 0;
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE(seed);
    const Trace trace = tree_trace(60, 8, 70, 50, seed, seed % 2 ? 0 : 1.5);
    const int num_slots = seed % 4 == 0 ? 1 : seed % 4 == 1 ? 5 : seed % 4 == 2 ? 16 : 40;
    const bool sharing = seed % 3 != 0;
    const bool windows = seed > 8;
    const StateRun run = simulate_states(tiny_hybrid_model(windows ? "cawb" : "cab", 4), trace,
                                         {.max_num_batched_tokens = 32,
                                          .max_num_seqs = 16,
                                          .max_seq_len = 128,
                                          .num_blocks = windows ? std::vector<int>{0, 33, 36} : std::vector<int>{0, 33},
                                          .num_slots = num_slots,
                                          .prefix_sharing = sharing,
                                          .state_unit = seed % 2 ? 4 : 8,
                                          .seed = seed});
    ASSERT_FALSE(HasFailure());
    if (num_slots > 5) {
      EXPECT_GT(run.stats.preemptions, 0) << "does not test what it should";
    }
    if (num_slots <= 5) {
      EXPECT_EQ(run.peak, 1);
    }
    if (!sharing) {
      EXPECT_EQ(run.stats.kept_states + run.stats.prefix_hit_tokens + run.stats.resumed_hit_tokens, 0);
    } else if (num_slots > 5) {
      EXPECT_GT(run.stats.kept_states, 0);
      EXPECT_GE(run.other_sources, run.stats.kept_states) << "who leaves a state goes on from it";
    }
    hits += run.stats.prefix_hit_tokens, resumed += run.stats.resumed_hit_tokens;
    int64_t tokens = 0;
    for (const TraceRequest& r : trace.requests) tokens += r.input_length + r.output_length - 1;
    EXPECT_EQ(run.stats.prefill_tokens + run.stats.decode_tokens - run.stats.recomputed_tokens + run.stats.prefix_hit_tokens, tokens);
  }
  EXPECT_GT(hits, 0);
  EXPECT_GT(resumed, 0) << "a preempted request may begin from a state that it left itself";
}

// Prompts of 40 tokens whose first 32 are the same, one after another.
Trace parting_trace(int requests) {
  Trace trace;
  trace.prefix_block = 16;
  for (int i = 0; i < requests; ++i)
    trace.requests.push_back({.arrival_s = 100.0 * i, .input_length = 40, .output_length = 2, .prefix_ids = {1, 2, uint64_t(10 + i)}});
  return trace;
}

// The first prompt leaves a state behind 32 of its 40 tokens with units of 16, where the others part from it.
TEST(StatePrefixes, APromptLeavesAStateBehindItsLastUnit) {
  SchedulerOptions options{.max_num_batched_tokens = 64, .max_num_seqs = 4, .max_seq_len = 64, .num_blocks = {0, 64}, .num_slots = 8};
  options.state_unit = 16;
  const StateRun run = simulate_states(tiny_hybrid_model("ca", 8), parting_trace(5), options);
  EXPECT_EQ(run.stats.prefix_hit_tokens, 4 * 32);
  EXPECT_EQ(run.stats.prefill_tokens, 40 + 4 * 8);
  EXPECT_EQ(run.stats.kept_states, 1);
  EXPECT_EQ(run.stats.steps, 2 + 1 + 4 * 2) << "the first prompt takes two steps";
}

// With units of 8 it leaves one behind 32 tokens too; a prompt that is longer by a block leaves it behind 40, where nobody else comes by.
// The second prompt finds pages as far as 32: prompts part there, and it leaves a state for the third.
TEST(StatePrefixes, AStateIsKeptWherePromptsPart) {
  Trace trace = parting_trace(4);
  trace.requests[0].input_length = 48;
  SchedulerOptions options{.max_num_batched_tokens = 64, .max_num_seqs = 4, .max_seq_len = 64, .num_blocks = {0, 64}, .num_slots = 8};
  options.state_unit = 8;
  const StateRun run = simulate_states(tiny_hybrid_model("ca", 8), trace, options);
  ASSERT_EQ(run.finished.size(), 4u);
  EXPECT_EQ(run.finished[0].hit_tokens, 0);
  EXPECT_EQ(run.finished[1].hit_tokens, 0) << "pages alone are not enough";
  EXPECT_EQ(run.finished[2].hit_tokens, 32);
  EXPECT_EQ(run.finished[3].hit_tokens, 32);
  EXPECT_EQ(run.stats.kept_states, 2) << "behind 40 and 32 tokens";
}

// A state that is kept gives its slot to a request that runs, and where it is the only one, itself.
TEST(StatePrefixes, KeptStatesMakeRoom) {
  SchedulerOptions options{.max_num_batched_tokens = 64, .max_num_seqs = 4, .max_seq_len = 64, .num_blocks = {0, 64}, .num_slots = 1};
  options.state_unit = 16;
  const StateRun one = simulate_states(tiny_hybrid_model("ca", 8), parting_trace(3), options);
  EXPECT_EQ(one.stats.kept_states, 0) << "no slot is free for it";
  options.num_slots = 2;
  const StateRun two = simulate_states(tiny_hybrid_model("ca", 8), parting_trace(3), options);
  EXPECT_EQ(two.stats.prefix_hit_tokens, 2 * 32);
  Trace together = parting_trace(4);
  for (TraceRequest& r : together.requests) r.arrival_s = r.arrival_s > 0 ? 100 : 0;
  const StateRun crowd = simulate_states(tiny_hybrid_model("ca", 8), together, options);
  EXPECT_EQ(crowd.stats.prefix_hit_tokens, 2 * 32) << "the second of the three takes the kept state's slot";
}

TEST(StatePrefixes, ModelsWithoutPagesShareWholePrompts) {
  Trace trace = parting_trace(3);
  SchedulerOptions options{.max_num_batched_tokens = 64, .max_num_seqs = 4, .max_seq_len = 64, .num_blocks = {0}, .num_slots = 8};
  options.state_unit = 16;
  const StateRun run = simulate_states(tiny_hybrid_model("cb", 8), trace, options);
  EXPECT_EQ(run.stats.prefix_hit_tokens, 2 * 32);
}

TEST(StatePrefixes, UnitsAreMultiplesOfBlocks) {
  const auto code = [](int unit) {
    SchedulerOptions options{.num_blocks = {0, 64}, .num_slots = 8};
    options.state_unit = unit;
    return test::error_code([&] { Scheduler s(tiny_hybrid_model("ca", 8), options); });
  };
  EXPECT_EQ(code(24), "nothing thrown");
  EXPECT_EQ(code(12), "scheduler.state_unit");
  EXPECT_EQ(code(0), "scheduler.state_unit");
}

// Kernels begin from states that others left: same bits as without, and everything is verified. The last model has gated delta nets, with
// so few values that they are computed token by token: chunks have the same bits only where they are cut alike.
TEST(StatePrefixes, ReplaysComputeTheSameFromKeptStates) {
  const Trace trace = tree_trace(24, 16, 200, 12, 3);
  for (const std::string layers : {"ca", "pwac", "cb", "qwen3_next"}) {
    SCOPED_TRACE(layers);
    const ModelSpec model = layers != "qwen3_next" ? tiny_hybrid_model(layers, 16) : parse_model_config(R"({"model_type": "qwen3_next",
        "dtype": "bfloat16", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8})");
    ReplayOptions options = small_options();
    const ReplayResult shared = replay(model, trace, options);
    EXPECT_TRUE(shared.prefix_sharing);
    EXPECT_GT(shared.prefix_hit_tokens, 0);
    EXPECT_GT(shared.kept_states, 0);
    EXPECT_LE(shared.verify_max_ratio, 1);
    EXPECT_NE(report_text(shared, {}).find(" states were kept behind prefixes"), std::string::npos);
    options.prefix_sharing = false;
    const ReplayResult alone = expect_same_digests(model, trace, options, shared, [](auto&) {});
    EXPECT_EQ(alone.prefix_hit_tokens, 0);
    EXPECT_EQ(alone.kept_states, 0);
    options.prefix_sharing = true;
    expect_same_digests(model, trace, options, shared, [](auto& o) { o.max_num_seqs = 1; });
    expect_same_digests(model, trace, options, shared, [](auto& o) { o.max_num_batched_tokens = 17; });
    const ReplayResult storm = expect_same_digests(model, trace, options, shared, [](auto& o) { o.num_blocks = 16; });
    if (layers != "cb") {
      EXPECT_GT(storm.preemptions, 0);
    }
  }
}

TEST(StatePrefixes, WithoutPrefixesInATraceNoneIsKept) {
  Trace trace;
  trace.requests = {{.arrival_s = 0, .input_length = 40, .output_length = 3, .prefix_ids = {}}};
  const ReplayResult r = replay(tiny_hybrid_model("ca", 16), trace, small_options());
  EXPECT_EQ(r.kept_states, 0);
  EXPECT_FALSE(r.prefix_sharing);
  EXPECT_EQ(r.groups[0].num_slots, 1);
  EXPECT_EQ(r.steps, 3) << "the prompt is not cut";
  EXPECT_NE(report_text(r, {}).find("note: no state is kept behind a prefix"), std::string::npos);
}

}  // namespace
}  // namespace imbrex::serve

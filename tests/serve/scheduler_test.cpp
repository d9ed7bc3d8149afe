// The scheduler against a memory of what every slot holds: whatever happens, each query finds its own tokens where its table says.
#include "serve/scheduler.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <set>

#include "expect_error.h"
#include "imbrex/error.h"
#include "sanitizers.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

struct Simulation {
  SchedulerStats stats;
  std::vector<RequestRecord> finished;
  std::vector<double> peak_occupancy;  // per group
  uint64_t schedule_hash = 0;          // of every array of every step
  int max_tokens_seen = 0, max_seqs_seen = 0;
};

// Runs a trace to its end with steps of one second, and checks every step: limits, slots, and that every visible key of every
// query lies in its slot, written by the request itself or by one with the same prefix.
Simulation simulate(const ModelSpec& model, const Trace& trace, SchedulerOptions options) {
  Simulation run;
  options.prefix_block = trace.prefix_block;
  Scheduler scheduler(model, options);
  for (size_t i = 0; i < trace.requests.size(); ++i) scheduler.add(trace.requests[i], int(i), trace.requests[i].arrival_s);
  const int block_size = model.layers[0].attention().block_size;
  const size_t num_groups = model.cache_groups.size();
  // What a slot holds: a hash of the token and of all before it, so that a wrong prefix shows too.
  std::vector<std::vector<uint64_t>> memory;
  for (const int blocks : options.num_blocks) memory.emplace_back(size_t(blocks) * size_t(block_size), 0);
  std::vector<std::vector<uint64_t>> chains(trace.requests.size());
  for (size_t i = 0; i < chains.size(); ++i) {
    const TraceRequest& r = trace.requests[i];
    uint64_t chain = 0;
    for (int p = 0; p < r.input_length + r.output_length; ++p) {
      const uint64_t id = token_id(options.seed, r, trace.prefix_block, int(i), p);
      chains[i].push_back(chain = hash_block(chain, {&id, 1}));
    }
  }
  run.peak_occupancy.assign(num_groups, 0);
  std::vector<int> computed_to(trace.requests.size(), 0);  // tokens each request has had computed, or found, so far
  std::vector<int> outputs(trace.requests.size(), 0);

  double now = 0;
  StepPlan plan;
  while (!scheduler.done()) {
    if (!scheduler.step(now, plan)) {
      EXPECT_TRUE(scheduler.next_arrival().has_value());
      if (!scheduler.next_arrival()) return run;
      now = *scheduler.next_arrival();
      continue;
    }
    EXPECT_NO_THROW(scheduler.check());
    const int num_reqs = plan.num_reqs();
    EXPECT_LE(plan.num_tokens(), options.max_num_batched_tokens);
    EXPECT_LE(num_reqs, options.max_num_seqs);
    EXPECT_GT(plan.num_tokens(), 0);
    run.max_tokens_seen = std::max(run.max_tokens_seen, plan.num_tokens());
    run.max_seqs_seen = std::max(run.max_seqs_seen, num_reqs);
    for (size_t g = 0; g < num_groups; ++g) {
      const Batch batch = plan.batch(int(g));
      const Mask& mask = model.layers[size_t(model.cache_groups[g].layers[0])].attention().mask;
      EXPECT_EQ(int(batch.slot_mapping.size(0)), plan.num_tokens());
      const auto* slots = batch.slot_mapping.as<int64_t>();
      for (int r = 0; r < num_reqs; ++r) {
        for (int i = 0; i < batch.query_len(r); ++i) {
          memory[g][size_t(slots[batch.query_start_loc[size_t(r)] + i])] =
              chains[size_t(plan.request_ids[size_t(r)])][size_t(batch.context_len(r) + i)];
        }
      }
      for (int r = 0; r < num_reqs; ++r) {
        const auto& chain = chains[size_t(plan.request_ids[size_t(r)])];
        const auto* table = batch.block_table.as<int32_t>() + r * batch.block_table.stride(0);
        for (int b = 0; b < (batch.seq_lens[size_t(r)] + block_size - 1) / block_size; ++b) {
          EXPECT_GE(table[b], 0);
          EXPECT_LT(table[b], options.num_blocks[g]);
        }
        for (int p = batch.context_len(r); p < batch.seq_lens[size_t(r)]; ++p) {
          int first = 0;
          if (mask.window_left >= 0) first = std::max(first, p - mask.window_left);
          if (mask.chunk > 0) first = std::max(first, p / mask.chunk * mask.chunk);
          for (int j = first; j <= p; ++j) {
            const uint64_t found = memory[g][size_t(table[j / block_size]) * size_t(block_size) + size_t(j % block_size)];
            if (found != chain[size_t(j)]) {
              ADD_FAILURE() << "request " << plan.request_ids[size_t(r)] << " query " << p << " key " << j << " group " << g;
              return run;
            }
          }
        }
        run.schedule_hash = hash_block(run.schedule_hash + uint64_t(slots[batch.query_start_loc[size_t(r)]]), {});
      }
      run.peak_occupancy[g] = std::max(run.peak_occupancy[g], scheduler.occupancy(int(g)));
    }
    bool prompts = false;  // rows with more than the last token to compute have begun
    for (int r = 0; r < num_reqs; ++r) {
      const size_t id = size_t(plan.request_ids[size_t(r)]);
      const int first = plan.first_positions[size_t(r)], end = plan.seq_lens[size_t(r)];
      EXPECT_EQ(plan.fresh_from[size_t(r)], computed_to[id]);
      computed_to[id] = std::max(computed_to[id], end);
      const bool last_token = plan.makes_token[size_t(r)] && end - first == 1;
      EXPECT_FALSE(prompts && last_token) << "decodes must come first";
      prompts |= !last_token;
      if (plan.makes_token[size_t(r)]) {
        ++outputs[id];
        EXPECT_EQ(end, trace.requests[id].input_length + outputs[id] - 1);  // exactly once each, in order
      }
    }
    now += 1;
    scheduler.finish_step(now);
    EXPECT_NO_THROW(scheduler.check());
    if (testing::Test::HasFailure()) return run;
    if (scheduler.stats().steps > 2'000'000) {
      ADD_FAILURE() << "does not end";
      return run;
    }
  }
  for (size_t g = 0; g < num_groups; ++g) EXPECT_EQ(scheduler.occupancy(int(g)), 0) << "blocks leaked in group " << g;
  for (size_t i = 0; i < outputs.size(); ++i) EXPECT_EQ(outputs[i], trace.requests[i].output_length);
  run.stats = scheduler.stats();
  run.finished.assign(scheduler.finished().begin(), scheduler.finished().end());
  EXPECT_EQ(run.finished.size(), trace.requests.size());
  return run;
}

Trace plain_trace(std::vector<std::pair<int, int>> lengths, double gap_s = 0) {
  Trace trace;
  for (const auto& [input, output] : lengths) {
    trace.requests.push_back(
        {.arrival_s = gap_s * double(trace.requests.size()), .input_length = input, .output_length = output, .prefix_ids = {}});
  }
  return trace;
}

TEST(TokenId, IsSharedWithinAPrefixOnly) {
  const TraceRequest a{.arrival_s = 0, .input_length = 10, .output_length = 5, .prefix_ids = {7, 8, 9}};
  const TraceRequest b{.arrival_s = 0, .input_length = 9, .output_length = 5, .prefix_ids = {7, 8, 4}};
  for (int p = 0; p < 8; ++p) EXPECT_EQ(token_id(1, a, 4, 0, p), token_id(1, b, 4, 1, p));
  EXPECT_NE(token_id(1, a, 4, 0, 8), token_id(1, b, 4, 1, 8));
  EXPECT_NE(token_id(1, a, 4, 0, 9), token_id(1, b, 4, 1, 9));  // b's first output
  EXPECT_NE(token_id(1, a, 4, 0, 0), token_id(1, a, 4, 0, 4));
  EXPECT_NE(token_id(1, a, 4, 0, 0), token_id(2, a, 4, 0, 0));
  EXPECT_NE(token_id(1, a, 0, 0, 3), token_id(1, b, 0, 1, 3));  // without prefixes nothing is shared
}

TEST(Scheduler, OneRequestByHand) {
  const ModelSpec model = tiny_model({full_mask()}, 4);
  const Trace trace = plain_trace({{10, 3}});
  const Simulation run = simulate(model, trace, {.max_num_batched_tokens = 4, .max_num_seqs = 2, .max_seq_len = 64, .num_blocks = {8}});
  EXPECT_EQ(run.stats.steps, 5);  // 4 + 4 + 2 prompt tokens, then two decodes
  EXPECT_EQ(run.stats.prefill_tokens, 10);
  EXPECT_EQ(run.stats.decode_tokens, 2);
  EXPECT_EQ(run.stats.output_tokens, 3);
  EXPECT_EQ(run.finished[0].first_token_s, 3);
  EXPECT_EQ(run.finished[0].last_token_s, 5);
  EXPECT_EQ(run.finished[0].first_scheduled_s, 0);
}

TEST(Scheduler, DecodesComeBeforePromptsAndPromptsFillTheStep) {
  const ModelSpec model = tiny_model({full_mask()}, 4);
  const Trace trace = plain_trace({{4, 20}, {100, 2}});
  Scheduler scheduler(model, {.max_num_batched_tokens = 16, .max_num_seqs = 4, .max_seq_len = 128, .num_blocks = {64}});
  scheduler.add(trace.requests[0], 0, 0);
  scheduler.add(trace.requests[1], 1, 0);
  StepPlan plan;
  ASSERT_TRUE(scheduler.step(0, plan));
  EXPECT_EQ(plan.query_start_loc, (std::vector<int32_t>{0, 4, 16}));
  scheduler.finish_step(1);
  ASSERT_TRUE(scheduler.step(1, plan));
  EXPECT_EQ(plan.request_ids, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(plan.query_start_loc, (std::vector<int32_t>{0, 1, 16}));
  EXPECT_EQ(plan.seq_lens, (std::vector<int32_t>{5, 27}));
  EXPECT_EQ(plan.makes_token, (std::vector<uint8_t>{1, 0}));
  EXPECT_EQ(plan.groups[0].slot_mapping.size(), 16u);
}

TEST(Scheduler, ArrivalsAreWaitedFor) {
  const ModelSpec model = tiny_model({full_mask()}, 4);
  const Simulation run = simulate(model, plain_trace({{5, 2}, {5, 2}}, 100),
                                  {.max_num_batched_tokens = 64, .max_num_seqs = 4, .max_seq_len = 64, .num_blocks = {64}});
  EXPECT_EQ(run.finished[0].last_token_s, 2);
  EXPECT_EQ(run.finished[1].first_scheduled_s, 100);
  EXPECT_EQ(run.finished[1].last_token_s, 102);
}

struct Shape {
  std::vector<Mask> masks;
  std::vector<int> num_blocks;
  int block_size, max_tokens, max_seqs;
};

// Pools that hold little more than the longest request: storms of preemption must end, with nothing lost.
TEST(Scheduler, StormsOfPreemptionEnd) {
  const std::vector<Shape> shapes = {{{full_mask()}, {33}, 4, 32, 16},
                                     {{full_mask()}, {130}, 1, 17, 8},
                                     {{full_mask(), window_mask(10)}, {34, 26}, 4, 32, 16},
                                     {{window_mask(7), chunk_mask(12)}, {20, 20}, 4, 16, 8},
                                     {{full_mask(), chunk_mask(8)}, {20, 16}, 8, 64, 16}};
  for (size_t s = 0; s < shapes.size(); ++s) {
    const Shape& shape = shapes[s];
    int64_t preemptions = 0, hits = 0;
    for (uint64_t seed = 1; seed <= (test::kAddressSanitizer ? 3 : 8); ++seed) {
      SCOPED_TRACE(testing::Message() << "shape " << s << " seed " << seed);
      const Trace trace = tree_trace(60, 8, 70, 50, seed, seed % 2 ? 0 : 1.5);
      const Simulation run = simulate(tiny_model(shape.masks, shape.block_size), trace,
                                      {.max_num_batched_tokens = shape.max_tokens,
                                       .max_num_seqs = shape.max_seqs,
                                       .max_seq_len = 128,
                                       .num_blocks = shape.num_blocks,
                                       .prefix_sharing = seed % 3 != 0});
      ASSERT_FALSE(HasFailure());
      preemptions += run.stats.preemptions;
      hits += run.stats.prefix_hit_tokens;
      // Every token is computed once, but for those found in the cache and those computed again.
      int64_t tokens = 0;
      for (const TraceRequest& r : trace.requests) tokens += r.input_length + r.output_length - 1;
      EXPECT_EQ(run.stats.prefill_tokens + run.stats.decode_tokens - run.stats.recomputed_tokens + run.stats.prefix_hit_tokens, tokens);
    }
    // With windows everywhere, what a request can ever need is known at its admission.
    EXPECT_EQ(preemptions > 0, s != 3) << "shape " << s << " does not test what it should";
    EXPECT_GT(hits, 0) << "shape " << s;
  }
}

TEST(Scheduler, SharedPrefixesAreComputedOnce) {
  Trace trace;
  trace.prefix_block = 16;
  for (int i = 0; i < 5; ++i) {
    trace.requests.push_back({.arrival_s = 100.0 * i, .input_length = 40, .output_length = 2, .prefix_ids = {1, 2, uint64_t(10 + i)}});
  }
  SchedulerOptions options{.max_num_batched_tokens = 64, .max_num_seqs = 4, .max_seq_len = 64, .num_blocks = {64}};
  const ModelSpec model = tiny_model({full_mask()}, 8);
  const Simulation shared = simulate(model, trace, options);
  EXPECT_EQ(shared.stats.prefix_hit_tokens, 4 * 32);
  EXPECT_EQ(shared.stats.prefill_tokens + shared.stats.prefix_hit_tokens, 5 * 40);
  options.prefix_sharing = false;
  const Simulation alone = simulate(model, trace, options);
  EXPECT_EQ(alone.stats.prefix_hit_tokens, 0);
  EXPECT_EQ(alone.stats.prefill_tokens, 5 * 40);
}

TEST(Scheduler, AFullyCachedPromptComputesItsLastBlock) {
  Trace trace;
  trace.prefix_block = 16;
  for (int i = 0; i < 2; ++i)
    trace.requests.push_back({.arrival_s = 100.0 * i, .input_length = 32, .output_length = 3, .prefix_ids = {1, 2}});
  const Simulation run = simulate(tiny_model({full_mask()}, 8), trace,
                                  {.max_num_batched_tokens = 64, .max_num_seqs = 4, .max_seq_len = 64, .num_blocks = {64}});
  EXPECT_EQ(run.stats.prefix_hit_tokens, 24);  // 31 tokens may be found, three blocks are full
}

TEST(Scheduler, WindowsNeedBoundedMemory) {
  const Trace trace = plain_trace({{500, 500}});
  const Simulation run = simulate(tiny_model({full_mask(), window_mask(32)}, 4), trace,
                                  {.max_num_batched_tokens = 16, .max_num_seqs = 1, .max_seq_len = 1000, .num_blocks = {250, 100}});
  EXPECT_EQ(run.peak_occupancy[0], 1.0);
  EXPECT_LE(run.peak_occupancy[1] * 100, (31 + 16 - 1) / 4 + 2);
  // The same cache is far too small without the window.
  const ModelSpec full = tiny_model({full_mask()}, 4);
  const Scheduler scheduler(full, {.max_num_batched_tokens = 16, .max_num_seqs = 1, .max_seq_len = 1000, .num_blocks = {100}});
  EXPECT_NE(scheduler.too_long(trace.requests[0]), "");
}

TEST(Scheduler, WindowGroupsShareOnlyWhatTheyStillNeed) {
  Trace trace;
  trace.prefix_block = 64;
  for (int i = 0; i < 2; ++i) {
    trace.requests.push_back({.arrival_s = 1000.0 * i, .input_length = 130, .output_length = 2, .prefix_ids = {1, 2, uint64_t(10 + i)}});
  }
  const Simulation run = simulate(tiny_model({full_mask(), window_mask(16)}, 8), trace,
                                  {.max_num_batched_tokens = 32, .max_num_seqs = 1, .max_seq_len = 256, .num_blocks = {64, 64}});
  EXPECT_EQ(run.stats.prefix_hit_tokens, 128);
}

TEST(Scheduler, SameInputSameSchedule) {
  const Trace trace = tree_trace(80, 8, 60, 40, 5, 0.7);
  const ModelSpec model = tiny_model({full_mask(), window_mask(9)}, 4);
  const SchedulerOptions options{.max_num_batched_tokens = 48, .max_num_seqs = 12, .max_seq_len = 128, .num_blocks = {40, 30}};
  const Simulation a = simulate(model, trace, options), b = simulate(model, trace, options);
  EXPECT_EQ(a.schedule_hash, b.schedule_hash);
  EXPECT_NE(a.schedule_hash, 0u);
  EXPECT_EQ(a.stats.steps, b.stats.steps);
}

TEST(Scheduler, LimitsAreReached) {
  const Simulation run = simulate(tiny_model({full_mask()}, 4), tree_trace(100, 8, 60, 40, 3),
                                  {.max_num_batched_tokens = 40, .max_num_seqs = 7, .max_seq_len = 128, .num_blocks = {400}});
  EXPECT_EQ(run.max_tokens_seen, 40);
  EXPECT_EQ(run.max_seqs_seen, 7);
  EXPECT_EQ(run.stats.preemptions, 0);
}

TEST(Scheduler, APlanMovesBetweenSchedulers) {
  const ModelSpec model = tiny_model({full_mask()}, 4);
  const SchedulerOptions options{.max_num_batched_tokens = 64, .max_num_seqs = 4, .max_seq_len = 64, .num_blocks = {16}};
  const Trace trace = plain_trace({{20, 2}, {12, 2}});
  StepPlan plan, fresh;
  Scheduler a(model, options), b(model, options), c(model, options);
  a.add(trace.requests[0], 0, 0), a.add(trace.requests[1], 1, 0);
  b.add(trace.requests[1], 1, 0), b.add(trace.requests[0], 0, 0);
  c.add(trace.requests[1], 1, 0), c.add(trace.requests[0], 0, 0);
  ASSERT_TRUE(a.step(0, plan));
  ASSERT_TRUE(b.step(0, plan));
  ASSERT_TRUE(c.step(0, fresh));
  EXPECT_EQ(plan.groups[0].block_table, fresh.groups[0].block_table);
}

TEST(Scheduler, RefusesWhatCannotWork) {
  const ModelSpec model = tiny_model({full_mask()}, 4);
  const SchedulerOptions good{.max_num_batched_tokens = 64, .max_num_seqs = 4, .max_seq_len = 64, .num_blocks = {8}};
  const auto with = [&](auto change) {
    return test::error_code([&] {
      SchedulerOptions options = good;
      change(options);
      Scheduler scheduler(model, options);
    });
  };
  EXPECT_EQ(with([](auto&) {}), "nothing thrown");
  EXPECT_EQ(with([](auto& o) { o.max_num_batched_tokens = 0; }), "scheduler.max_num_batched_tokens");
  EXPECT_EQ(with([](auto& o) { o.max_num_seqs = 0; }), "scheduler.max_num_seqs");
  EXPECT_EQ(with([](auto& o) { o.max_seq_len = 0; }), "scheduler.max_seq_len");
  EXPECT_EQ(with([](auto& o) { o.num_blocks = {8, 8}; }), "scheduler.num_blocks");
  EXPECT_EQ(with([](auto& o) { o.num_blocks = {0}; }), "block_pool.size");
  EXPECT_EQ(test::error_code([&] { Scheduler s(ModelSpec{}, good); }), "scheduler.groups");
  EXPECT_EQ(test::error_code([&] { Scheduler s(tiny_model({full_mask()}, 0), good); }), "scheduler.block_size");
  ModelSpec mixed = tiny_model({full_mask(), window_mask(4)}, 4);
  mixed.layers[1].attention().block_size = 8;
  SchedulerOptions two = good;
  two.num_blocks = {8, 8};
  EXPECT_EQ(test::error_code([&] { Scheduler s(mixed, two); }), "scheduler.block_size.mixed");
  EXPECT_EQ(test::error_code([&] { Scheduler s(tiny_hybrid_model("ac", 4), two); }), "scheduler.num_slots");

  Scheduler scheduler(model, good);
  const Trace trace = plain_trace({{31, 2}, {32, 2}, {64, 2}, {5, 1}});
  EXPECT_EQ(test::error_code([&] { scheduler.add(trace.requests[0], 0, 1); }), "nothing thrown");
  EXPECT_EQ(test::error_code([&] { scheduler.add(trace.requests[1], 1, 1); }), "scheduler.request.too_long");
  EXPECT_EQ(test::error_code([&] { scheduler.add(trace.requests[2], 2, 1); }), "scheduler.request.too_long");
  EXPECT_EQ(test::error_code([&] { scheduler.add(trace.requests[3], 3, 0); }), "scheduler.request.order");
  EXPECT_EQ(test::error_code([&] { scheduler.add(TraceRequest{}, 3, 1); }), "scheduler.request.length");
  StepPlan plan;
  EXPECT_EQ(test::error_code([&] { scheduler.finish_step(0); }), "scheduler.step.order");
  EXPECT_FALSE(scheduler.step(0.5, plan));
  EXPECT_TRUE(scheduler.step(1, plan));
  EXPECT_EQ(test::error_code([&] { scheduler.step(1, plan); }), "scheduler.step.order");
}

// 256 decodes take a few microseconds on a quiet machine; the bound only catches something that has become wrong by an order.
TEST(Scheduler, ADecodeStepIsCheap) {
  const ModelSpec model = tiny_model({full_mask()}, 16);
  Scheduler scheduler(model, {.max_num_batched_tokens = 8192, .max_num_seqs = 256, .max_seq_len = 8192, .num_blocks = {40000}});
  const Trace trace = plain_trace(std::vector<std::pair<int, int>>(256, {1000, 400}));
  for (int i = 0; i < 256; ++i) scheduler.add(trace.requests[size_t(i)], i, 0);
  StepPlan plan;
  double best = 1;
  for (double now = 0; scheduler.step(now, plan); now += 1) {
    scheduler.finish_step(now + 1);
    if (plan.num_tokens() != 256) continue;
    const auto begin = std::chrono::steady_clock::now();
    if (!scheduler.step(now, plan)) break;
    scheduler.finish_step(now + 1);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  RecordProperty("microseconds", std::to_string(best * 1e6));
  EXPECT_LT(best, 2e-3);
}

}  // namespace
}  // namespace imbrex::serve

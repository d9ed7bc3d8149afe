// What a replay's caches lose: padding, the rest of their memory, and places of last blocks that no token fills.
#include <gtest/gtest.h>

#include "imbrex/model.h"
#include "serve/replay.h"
#include "serve/replay_account.h"
#include "serve/replay_setup.h"
#include "serve/report.h"
#include "serve/scheduler.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

constexpr int kBlockSize = 16;
constexpr const char* kHybrids[] = {"qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "nemotron-3-nano-30b-a3b", "nemotron-h-8b", "jamba-v0.1"};

// The pool's plan and, through all steps of a trace, what requests hold, for models with states beside pages: no kernel runs.
class Waste {
 public:
  Waste(const char* name, int64_t budget) : model_(load_model(name).with_kv(DType::bf16, DType::bf16, KvFormat::strided, kBlockSize)) {
    trace_.source = name;
    for (int i = 0; i < 400; ++i)  // prompts of 200 to 6000 tokens, answers of up to 300
      trace_.requests.push_back(
          {.arrival_s = 0, .input_length = 200 + 977 * i % 5800, .output_length = 1 + 131 * i % 300, .prefix_ids = {}});
    ReplayOptions options;
    options.kv_bytes = budget;
    options.block_size = kBlockSize;
    options.max_num_seqs = 64;
    sizes_ = cache_sizes(model_, trace_, options, 0);
  }

  const CacheSizes& sizes() const { return sizes_; }
  int64_t needed() const {
    int64_t bytes = 0;
    for (size_t g = 0; g < model_.cache_groups.size(); ++g) bytes += sizes_.needed_bytes(model_.cache_groups[g], g, kBlockSize);
    return bytes;
  }
  int64_t of_states() const {
    int64_t bytes = 0;
    for (const CacheGroup& group : model_.cache_groups) bytes += group.bytes_per_slot;
    return sizes_.num_slots * bytes;
  }

  double unfilled_share() const {
    SchedulerOptions options{.max_num_seqs = 64, .max_seq_len = 8192, .num_blocks = sizes_.num_blocks, .num_slots = sizes_.num_slots};
    options.state_unit = kBlockSize;
    Scheduler scheduler(model_, options);
    for (size_t i = 0; i < trace_.requests.size(); ++i) scheduler.add(trace_.requests[i], int(i), 0);
    StepPlan plan;
    HeldBytes sum;
    for (double now = 0; !scheduler.done(); now += 1) {
      EXPECT_TRUE(scheduler.step(now, plan));
      const HeldBytes held = held_bytes(model_, scheduler, plan, kBlockSize);
      EXPECT_GT(held.all, held.unfilled);
      sum.all += held.all, sum.unfilled += held.unfilled;
      scheduler.finish_step(now);
    }
    return sum.unfilled / sum.all;
  }

 private:
  ModelSpec model_;
  Trace trace_;
  CacheSizes sizes_;
};

// Pages keep their 16 tokens whatever a state takes, so that neither is padded for the other.
TEST(CacheWaste, IsUnderOnePercentForModelsWithStates) {
  for (const char* name : kHybrids) {
    for (const int64_t gib : {2, 8, 64}) {
      SCOPED_TRACE(testing::Message() << name << ", " << gib << " GiB");
      const int64_t budget = (gib << 30) + 12345;  // no power of two, of which many blocks are
      const Waste waste(name, budget);
      EXPECT_GE(waste.sizes().num_slots, 10);
      EXPECT_LE(waste.needed(), budget);
      EXPECT_LE(waste.of_states(), budget / 2);
      if (waste.sizes().rest > 0) {
        EXPECT_EQ(waste.needed() + waste.sizes().rest, budget);
      }
      EXPECT_LT(double(waste.sizes().rest), 0.01 * double(budget));
      if (gib == 2) {
        EXPECT_GT(waste.sizes().rest, 0) << "the trace needs more";
      }
    }
    const Waste waste(name, int64_t(8) << 30);
    const double unfilled = waste.unfilled_share();
    EXPECT_LT(unfilled, 0.01) << name;
    EXPECT_GT(unfilled, 0.0001) << name;
  }
}

TEST(CacheWaste, ReplaysMeasureIt) {
  Trace trace;
  trace.requests = {{.arrival_s = 0, .input_length = 10, .output_length = 3, .prefix_ids = {}}};
  const ModelSpec model = tiny_hybrid_model("caa", 16);
  ReplayOptions options = small_options();
  options.fixed_step_s = 1;
  const ReplayResult r = replay(model, trace, options);
  EXPECT_EQ(r.padding_bytes, 2048) << "keys take 2048 bytes, and values begin at the next page of memory";
  EXPECT_EQ(r.rest_bytes, 0) << "the trace needs no more";
  // Steps with 10, 11 and 12 tokens, all in a block of 16, and one state.
  const double block = 16. * 2 * 2 * 32 * 2, state = 2 * 48 * 2;
  EXPECT_NEAR(r.unfilled_share, (6 + 5 + 4) / 16. / 3 * block / (block + state), 1e-9);
  const std::string text = report_text(r, {});
  EXPECT_NE(text.find("lost: 2.00 KiB to padding, 0 B to a rest that no block fits (32.32 % of all); 29.85 % of"), std::string::npos)
      << text;

  const int64_t slot = int64_t(state), page = int64_t(block);
  trace.requests[0].input_length = 200;
  options.kv_bytes = 14 * page + 2 * slot + 1000;
  const ReplayResult full = replay(model, trace, options);
  EXPECT_EQ(full.groups[1].num_blocks, 13) << "for the whole trace";
  EXPECT_EQ(full.rest_bytes, 0);
  trace.requests.push_back(trace.requests[0]);
  const ReplayResult limited = replay(model, trace, options);
  EXPECT_EQ(limited.groups[0].num_slots, 2);
  EXPECT_EQ(limited.groups[1].num_blocks, 14);
  EXPECT_EQ(limited.rest_bytes, 1000);
  EXPECT_EQ(limited.padding_bytes, limited.kv_bytes - 14 * page - 2 * slot);
  EXPECT_DOUBLE_EQ(limited.wasted_share(), double(limited.padding_bytes + 1000) / double(limited.kv_bytes + 1000));
}

}  // namespace
}  // namespace imbrex::serve

// shorten_runs(): when requests behind a common prompt share items, and with runs of which length.
#include <gtest/gtest.h>

#include <numeric>

#include "allocations.h"
#include "attention/shared_batch.h"

namespace imbrex {
namespace {

using test::expect_same_work, test::kBlock, test::policy_with_runs, test::SharedBatch;

TEST(SharedKeys, RunsOfRequestsWithOneStemEndWhereItDoes) {
  test::Random random(11);
  int shared_items = 0, shared_runs = 0, cheaper = 0;
  ShareScratch scratch;
  for (int round = 0; round < 400; ++round) {
    const SharedBatch b(random, random.between(0, 20), 1500);
    const SchedulePolicy policy = policy_with_runs(random);
    const SharePolicy share{
        .block_size = kBlock, .most_tokens = policy.tile_q, .overhead_keys = round % 2 == 0 ? kShareWherever : 0, .seen_by_all = true};
    Schedule plain, apart, shared;
    schedule(b.batch, {}, policy, plain);
    cut(b.batch, {}, policy, shared);
    if (!shorten_runs(b.batch, b.keys, share, policy, shared, scratch)) {
      ASSERT_EQ(shared.num_work, plain.num_work);
      continue;
    }
    shared.work.resize(size_t(shared.num_work));
    write_work(shared, shared.work.data());
    apart = shared;
    share_keys(b.batch, b.keys, share, shared, scratch);
    expect_same_work(b, apart, shared);

    // The pieces of a request are those of the list without sharing, and a run is a node of their tree.
    ASSERT_EQ(plain.items.size(), apart.items.size());
    for (size_t i = 0; i < plain.items.size(); ++i) {
      const CutItem &before = plain.items[i], &after = apart.items[i];
      const auto piece = [](const CutItem& item) { return item.whole.piece > 0 ? item.whole.piece : item.split; };
      ASSERT_EQ(piece(before), piece(after));
      ASSERT_EQ(std::tie(before.whole.kv_begin, before.whole.kv_end), std::tie(after.whole.kv_begin, after.whole.kv_end));
      if (after.num_splits == 1) continue;
      const int run = after.split / piece(after);
      ASSERT_TRUE(run == 1 || run == 4 || run == 16 || run == 64) << run;
      ASSERT_LE(run, policy.most_in_run);
      ASSERT_EQ(after.whole.piece, run > 1 ? piece(after) : 0);
      ASSERT_EQ(after.num_splits, (after.whole.kv_end - after.whole.kv_begin - 1) / after.split + 1);
    }
    const PlanLimits limits{
        .max_num_reqs = std::max(1, b.batch.num_reqs()), .max_num_tokens = std::max(1, b.batch.num_tokens()), .max_seq_len = 1500};
    const ScheduleBounds bounds = schedule_bounds(policy, limits);
    ASSERT_LE(apart.num_work, bounds.num_work);
    ASSERT_LE(std::ssize(apart.merges), bounds.num_merges);
    ASSERT_LE(apart.num_partial_rows, bounds.num_partial_rows);
    if (policy.most_partial_rows > 0) {
      ASSERT_LE(apart.num_partial_rows, std::max(policy.most_partial_rows, plain.num_partial_rows));
    }
    for (const WorkItem& w : shared.work) {
      if (w.merge >= 0 || w.partial < 0) continue;
      ++shared_items, shared_runs += w.piece > 0;
      for (int i = w.q_begin; i < w.q_end; ++i) {
        const int token = shared.details.tokens[size_t(i)], r = b.request_of(token), from_end = b.batch.query_start_loc[r + 1] - token;
        ASSERT_LE(w.kv_end, b.batch.seq_lens[r] - from_end + 1) << "a query that does not see all keys";
        const MergeItem& merge = shared.merges[size_t(shared.details.merge_of[size_t(i - b.batch.num_tokens())])];
        ASSERT_TRUE(token >= merge.q_begin && token < merge.q_end);
      }
    }
    const auto keys = [](const Schedule& list) {
      return std::accumulate(list.work.begin(), list.work.end(), int64_t(0),
                             [](int64_t n, const WorkItem& w) { return n + w.kv_end - w.kv_begin; });
    };
    ASSERT_LE(keys(shared), keys(plain));
    cheaper += keys(shared) * 5 < keys(plain) * 4;
  }
  EXPECT_GT(shared_items, 500);
  EXPECT_GT(shared_runs, 100);
  EXPECT_GT(cheaper, 10);
}

// The list of decode on an H200 for 32 q heads and 8 kv heads.
constexpr SchedulePolicy kListOfH200{.tile_q = 4,
                                     .tile_kv = 64,
                                     .split_kv = 128,
                                     .split_max_q = 32,
                                     .num_workers = 33,
                                     .max_splits = 32,
                                     .share_splits = 16,
                                     .longest_kv = 4096,
                                     .max_split_rows = 64,
                                     .split_kv_each = 54,
                                     .max_q = 4,
                                     .runs = true,
                                     .most_partial_rows = 528,
                                     .workers_each = 2,
                                     .cost_by_keys = true};

// Requests of one query token and so many keys each, of which the first `common` are the same blocks.
SharedBatch behind_a_prompt(int requests, int keys, int common) {
  test::Random random(13);
  SharedBatch b(random, 0, keys);
  for (int r = 0; r < requests; ++r) {
    b.add(1, keys);
    for (int block = 0; block < b.width; ++block)
      b.table.push_back(block < common / kBlock ? block : common / kBlock + r * b.width + block);
  }
  return b;
}
void find_keys_of(SharedBatch& b) {
  b.batch = b.view();
  b.batch.block_table = TensorView::contiguous(b.table.data(), DType::i32, {b.batch.num_reqs(), b.width});
  find_keys(b.batch, b.keys);
}

TEST(SharedKeys, LongRunsAreCutWhereAPromptIsCommon) {
  SharedBatch b = behind_a_prompt(64, 8292, 8192);
  find_keys_of(b);
  const SharePolicy share{.block_size = kBlock, .most_tokens = 4, .seen_by_all = true};
  Schedule list;
  ShareScratch scratch;
  const auto update = [&] {
    cut(b.batch, {}, kListOfH200, list);
    ASSERT_TRUE(shorten_runs(b.batch, b.keys, share, kListOfH200, list, scratch));
    list.work.resize(size_t(list.num_work));
    write_work(list, list.work.data());
    share_keys(b.batch, b.keys, share, list, scratch);
  };
  update();
  // Runs of four pieces of 576 keys: three within the prompt for each four requests, and the rest of each.
  EXPECT_EQ(list.work.size(), 3 * 16u + 64u);
  EXPECT_EQ(list.num_partial_rows, 4 * 64);
  EXPECT_EQ(list.work.front().kv_end - list.work.front().kv_begin, 4 * 576);
  EXPECT_EQ(test::count_allocations(update), 0);
}

// Steps whose tasks all run at a time gain nothing from a common prompt, and lose what items of several requests cost.
TEST(SharedKeys, ShortStepsShareNothing) {
  struct Step {
    int requests, keys, common;
    bool pays;
  };
  for (const Step& step : {Step{2, 600, 512, false},
                           {4, 1124, 1024, false},
                           {2, 8292, 8192, true},
                           {8, 2148, 2048, true},
                           {16, 1124, 1024, true},
                           {64, 8292, 8192, true}}) {
    SharedBatch b = behind_a_prompt(step.requests, step.keys, step.common);
    find_keys_of(b);
    ShareScratch scratch;
    for (const bool costs : {false, true}) {
      const SharePolicy share{.block_size = kBlock, .most_tokens = 4, .overhead_keys = costs ? 250 : kShareWherever, .seen_by_all = true};
      Schedule list, before;
      cut(b.batch, {}, kListOfH200, list);
      before = list;
      EXPECT_EQ(shorten_runs(b.batch, b.keys, share, kListOfH200, list, scratch), step.pays || !costs)
          << step.requests << " x " << step.keys;
      if (!step.pays && costs) {
        EXPECT_EQ(list.num_work, before.num_work);
      }
    }
  }
}

}  // namespace
}  // namespace imbrex

// Cuts for kernels with lists of a fixed size: pieces and partial rows stay within what schedule_bounds() says, whatever the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "attention/random_lengths.h"
#include "imbrex/schedule.h"

namespace imbrex {
namespace {

using test::Lengths;
using test::Random;

SchedulePolicy random_policy(Random& random) {
  SchedulePolicy p{.tile_q = random.of({1, 4, 16, 32}), .tile_kv = random.of({16, 64})};
  p.split_kv = p.tile_kv * random.of({1, 2, 5});
  p.split_max_q = random.of({1, 4, 40});
  p.balanced = random.between(0, 4) == 0;
  p.num_workers = random.of({1, 17, 132});
  p.max_splits = random.of({0, 1, 2, 3, 17});
  p.max_split_rows = p.max_splits * random.of({1, 4, 16});
  p.split_kv_each = random.of({0, 40});
  p.share_splits = random.of({INT32_MAX, 3, 12});
  p.longest_kv = random.of({INT32_MAX, 700});
  p.min_q = random.of({0, 0, 5});
  p.max_q = random.of({4, 16, INT32_MAX});
  p.first_partial = random.of({0, 100});
  p.runs = random.of({0, 1}) != 0;
  p.most_partial_rows = random.of({0, 0, 20, 150});
  if (p.runs && !p.balanced && random.of({0, 1}) != 0) {
    p.few_splits = true;
    p.longest_kv = INT32_MAX, p.most_in_run = 16, p.max_splits = random.between(1, 16);
    p.items_each = p.tile_q % 2 == 0 ? random.of({1, 2}) : 1;
  }
  return p;
}

PlanLimits random_limits(Random& random) {
  PlanLimits limits{.max_num_reqs = random.between(1, 20),
                    .max_num_tokens = random.between(1, 300),
                    .max_seq_len = random.between(1, 5000),
                    .max_query_len = random.of({0, 0, 1, 6})};
  if (limits.max_query_len != 1) limits.min_query_len = std::min(random.of({0, 0, 2, 6}), limits.max_seq_len);
  return limits;
}

// A random batch within the limits. Half of such batches are as hard on the bounds as the limits allow: every request has the longest
// context and the same number of queries.
Lengths random_batch(Random& random, const PlanLimits& limits) {
  Lengths batch;
  const bool extreme = random.between(0, 1) == 0;
  const int longest = std::min(limits.max_seq_len, limits.max_query_len > 0 ? limits.max_query_len : 60);
  const int same = random.between(1, longest);
  for (int r = 0; r < limits.max_num_reqs; ++r) {
    const int left = limits.max_num_tokens - batch.starts.back();
    int q = std::min(left, extreme ? same : random.between(0, longest));
    if (q < limits.min_query_len) q = 0;
    batch.add(q, extreme ? limits.max_seq_len : random.between(q, limits.max_seq_len));
  }
  return batch;
}

const std::vector<Mask> kMasks = {{}, {.causal = false}, {.window_left = 700}, {.chunk = 1024}};

TEST(ScheduleBounds, HoldForEveryBatchWithinTheLimits) {
  int64_t merges = 0, filtered = 0;
  double tightest = 0;
  for (int seed = 0; seed < 4000; ++seed) {
    Random random(seed);
    const SchedulePolicy policy = random_policy(random);
    const PlanLimits limits = random_limits(random);
    const Lengths lengths = random_batch(random, limits);
    const Batch batch = lengths.view();
    const Mask& mask = kMasks[size_t(seed) % kMasks.size()];
    Schedule s, whole;
    schedule(batch, mask, policy, s);
    SchedulePolicy unsplit = policy;
    unsplit.split_max_q = 0;
    unsplit.min_q = 0, unsplit.max_q = INT32_MAX;
    schedule(batch, mask, unsplit, whole);

    const ScheduleBounds bounds = schedule_bounds(policy, limits);
    ASSERT_LE(int64_t(s.work.size()), bounds.num_work) << "seed " << seed;
    ASSERT_LE(int64_t(s.merges.size()), bounds.num_merges) << "seed " << seed;
    ASSERT_LE(s.num_partial_rows, bounds.num_partial_rows) << "seed " << seed;
    if (bounds.num_partial_rows > 0) tightest = std::max(tightest, double(s.num_partial_rows) / double(bounds.num_partial_rows));
    merges += int64_t(s.merges.size());

    // The pieces of an item are the item, in order; the items are those of the requests that are cut.
    std::map<int, std::vector<WorkItem>> by_token;
    for (const WorkItem& w : s.work) by_token[w.q_begin].push_back(w);
    size_t tiles = 0;
    for (const WorkItem& item : whole.work) {
      const int q_len = batch.query_len(item.table);
      if (q_len < policy.min_q || q_len > policy.max_q) {
        ASSERT_EQ(by_token.count(item.q_begin), 0u);
        ++filtered;
        continue;
      }
      ++tiles;
      std::vector<WorkItem>& pieces = by_token[item.q_begin];
      ASSERT_FALSE(pieces.empty());
      std::sort(pieces.begin(), pieces.end(), [](const WorkItem& a, const WorkItem& b) { return a.kv_begin < b.kv_begin; });
      ASSERT_EQ(pieces.front().kv_begin, item.kv_begin);
      ASSERT_EQ(pieces.back().kv_end, item.kv_end);
      for (size_t i = 0; i + 1 < pieces.size(); ++i) ASSERT_EQ(pieces[i].kv_end, pieces[i + 1].kv_begin);
      if (pieces.size() > 1) {
        ASSERT_GE(pieces.front().partial, policy.first_partial);
        ASSERT_LE(q_len, policy.split_max_q);
      }
      if (policy.balanced) continue;
      if (policy.max_splits > 0) {
        ASSERT_LE(int(pieces.size()), std::clamp(policy.max_split_rows / q_len, 1, policy.max_splits)) << "seed " << seed;
      }
      for (size_t i = 1; i + 1 < pieces.size(); ++i)  // the first and the last may be cut short by the range
        ASSERT_GE(pieces[i].kv_end - pieces[i].kv_begin,
                  std::max(policy.split_kv, std::min(q_len * policy.split_kv_each, policy.longest_kv)) * 5 / 8);
    }
    ASSERT_EQ(by_token.size(), tiles);
  }
  EXPECT_GT(merges, 1000);
  EXPECT_GT(filtered, 1000);
  EXPECT_GT(tightest, 0.99);  // a bound that is never met would waste memory
}

TEST(ScheduleBounds, TwoListsShareThePartialRows) {
  Lengths lengths;
  for (int r = 0; r < 8; ++r) lengths.add(r % 2 == 0 ? 1 : 6, 2000);
  const PlanLimits limits{.max_num_reqs = 8, .max_num_tokens = 64, .max_seq_len = 2000};
  SchedulePolicy few{.tile_q = 4, .tile_kv = 64, .split_kv = 256, .max_splits = 4, .max_split_rows = 16, .max_q = 4};
  SchedulePolicy many{.tile_q = 16, .tile_kv = 64, .split_kv = 256, .max_splits = 4, .max_split_rows = 16, .min_q = 5};
  Schedule a, b;
  schedule(lengths.view(), {}, few, a);
  const int rows = many.first_partial = a.num_partial_rows;
  schedule(lengths.view(), {}, many, b);
  EXPECT_LE(a.num_partial_rows + b.num_partial_rows, partial_rows_bound(std::array{few, many}, limits));
  EXPECT_LT(partial_rows_bound(std::array{few, many}, limits),
            schedule_bounds(few, limits).num_partial_rows + schedule_bounds(many, limits).num_partial_rows);
  EXPECT_EQ(a.num_partial_rows, 4 * 4);
  EXPECT_EQ(b.num_partial_rows, 4 * 6 * 2);
  EXPECT_EQ(a.work.size(), 16u);
  EXPECT_EQ(b.work.size(), 8u);
  for (const WorkItem& w : a.work) EXPECT_LT(w.partial, rows);
  for (const WorkItem& w : b.work) EXPECT_GE(w.partial, rows);
  for (const MergeItem& m : b.merges) EXPECT_GE(m.first_partial, rows);
}

// Three lists share the partial rows of a plan, one after the other: the next may use what one leaves.
TEST(ScheduleBounds, ListsWithALimitOfRowsShareThem) {
  int64_t longer = 0;
  for (int seed = 0; seed < 3000; ++seed) {
    Random random(seed);
    const PlanLimits limits = random_limits(random);
    const Lengths lengths = random_batch(random, limits);
    std::array<SchedulePolicy, 3> policies;
    for (int i = 0; i < 3; ++i) {
      SchedulePolicy& p = policies[size_t(i)] = random_policy(random);
      p.balanced = false, p.runs = true;
      p.most_partial_rows = random.of({1, 20, 60}) * (i + 1);
      p.min_q = std::array{0, 5, 17}[size_t(i)], p.max_q = std::array{4, 16, INT32_MAX}[size_t(i)];
    }
    int rows = 0;
    for (SchedulePolicy& p : policies) {
      Schedule s, unlimited;
      p.first_partial = rows;
      schedule(lengths.view(), {}, p, s);
      const int limit = std::exchange(p.most_partial_rows, 0);
      schedule(lengths.view(), {}, p, unlimited);
      p.most_partial_rows = limit;
      ASSERT_LE(s.num_partial_rows, unlimited.num_partial_rows) << "seed " << seed;
      ASSERT_TRUE(s.num_partial_rows < unlimited.num_partial_rows || s.num_work == unlimited.num_work) << "seed " << seed;
      longer += s.num_partial_rows < unlimited.num_partial_rows;
      rows += s.num_partial_rows;
    }
    ASSERT_LE(rows, partial_rows_bound(policies, limits)) << "seed " << seed;
  }
  EXPECT_GT(longer, 200);
}

TEST(ScheduleBounds, NothingFitsNoLimits) {
  const ScheduleBounds none = schedule_bounds({}, {.max_num_reqs = 0, .max_num_tokens = 0, .max_seq_len = 0});
  EXPECT_EQ(none.num_work, 0);
  const ScheduleBounds other =
      schedule_bounds({.min_q = 5}, {.max_num_reqs = 9, .max_num_tokens = 9, .max_seq_len = 9, .max_query_len = 1});
  EXPECT_EQ(other.num_work, 0);
  PlanLimits verify{.max_num_reqs = 9, .max_num_tokens = 72, .max_seq_len = 900, .max_query_len = 8, .min_query_len = 8};
  EXPECT_EQ(schedule_bounds({.max_q = 7}, verify).num_work, 0);
  EXPECT_GT(schedule_bounds({.max_q = 8}, verify).num_work, 0);
}

}  // namespace
}  // namespace imbrex

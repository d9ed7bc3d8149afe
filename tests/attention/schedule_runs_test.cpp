// Runs of pieces: which pieces an item has may depend on the batch, which pieces there are and how their sums are grouped may not.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "attention/random_lengths.h"
#include "imbrex/schedule.h"

namespace imbrex {
namespace {

using test::Lengths;
using test::Random;

SchedulePolicy random_policy(Random& random) {
  SchedulePolicy p{.tile_q = random.of({1, 4, 16}), .tile_kv = random.of({16, 64})};
  p.split_kv = p.tile_kv * random.of({1, 2, 5});
  p.split_max_q = random.of({1, 4, 40});
  p.num_workers = random.of({1, 5, 33, 132});
  p.max_splits = random.of({2, 3, 7, 34, 130});
  p.max_split_rows = p.max_splits * random.of({1, 4, 16});
  p.split_kv_each = random.of({0, 40});
  p.share_splits = random.of({INT32_MAX, 3, 12});
  p.longest_kv = random.of({INT32_MAX, 2000});
  p.max_q = random.of({4, INT32_MAX});
  p.runs = true;
  p.workers_each = random.of({1, 2});
  p.most_in_run = random.of({16, 64, 64});
  return p;
}

Lengths random_batch(Random& random) {
  Lengths batch;
  const int longest = random.of({300, 3000, 20000});
  for (int r = random.of({1, 4, 30, 200}); r > 0; --r) {
    const int q_len = random.of({0, 1, 1, 1, 3, 20}), context = random.between(0, longest);
    batch.add(q_len, context + q_len);
  }
  return batch;
}

const std::vector<Mask> kMasks = {{}, {.causal = false}, {.window_left = 700}, {.chunk = 1024}, {.window_left = 40, .chunk = 3000}};

// Items of the same queries, in the order of their keys.
std::map<int, std::vector<WorkItem>> by_token(const Schedule& s) {
  std::map<int, std::vector<WorkItem>> tiles;
  for (const WorkItem& w : s.work) tiles[w.q_begin].push_back(w);
  for (auto& [token, tile] : tiles)
    std::sort(tile.begin(), tile.end(), [](const WorkItem& a, const WorkItem& b) { return a.kv_begin < b.kv_begin; });
  return tiles;
}

int keys_of(const std::vector<WorkItem>& tile) { return tile.back().kv_end - tile.front().kv_begin; }

// Keys of the pieces of a tile: what a result may depend on.
using Pieces = std::vector<std::pair<int, int>>;
Pieces pieces_of(const std::vector<WorkItem>& tile) {
  Pieces pieces;
  for (const WorkItem& w : tile)
    for (int begin = w.kv_begin, keys = w.piece > 0 ? w.piece : w.kv_end - w.kv_begin; begin < w.kv_end; begin += keys)
      pieces.emplace_back(begin, std::min(begin + keys, w.kv_end));
  return pieces;
}

constexpr std::array kRuns{1, 4, 16, 64};  // pieces: the nodes of the tree that a thread block may have

TEST(ScheduleRuns, PiecesDependOnTheRequestAloneAndRunsAreNodesOfTheirTree) {
  std::map<int, int> runs;  // pieces of a run, and how many tiles have such
  int whole = 0;
  for (int seed = 0; seed < 1500; ++seed) {
    Random random(seed);
    const Mask& mask = kMasks[size_t(seed) % kMasks.size()];
    const SchedulePolicy policy = random_policy(random);
    const Lengths lengths = random_batch(random);
    const Batch batch = lengths.view();
    Schedule s, alone;
    schedule(batch, mask, policy, s);
    const auto tiles = by_token(s);
    int64_t keys = 0, longest = 0, number = 0;
    for (const auto& [token, tile] : tiles) keys += keys_of(tile), longest = std::max<int64_t>(longest, keys_of(tile));
    const int64_t count = int64_t(tiles.size()), workers = policy.num_workers, rest = count % workers;
    const bool even = longest * count * 4 <= keys * 5;
    for (int r = 0; r < batch.num_reqs(); ++r) {
      Lengths one;
      one.add(batch.query_len(r), batch.seq_lens[size_t(r)]);
      SchedulePolicy without = policy;  // what pieces there are
      without.runs = false;
      schedule(one.view(), mask, without, alone);
      const auto tokens = by_token(alone);
      for (auto at = tokens.rbegin(); at != tokens.rend(); ++at) {  // as items are numbered
        const auto& [token, pieces] = *at;
        SCOPED_TRACE(testing::Message() << "seed " << seed << ", request " << r << ", token " << token);
        const std::vector<WorkItem>& tile = tiles.at(batch.query_start_loc[size_t(r)] + token);
        const bool in_rest = number++ >= count - rest;
        ASSERT_EQ(pieces_of(tile), pieces_of(pieces));
        if (pieces.size() == 1) {
          ASSERT_TRUE(tile.size() == 1 && tile[0].piece == 0 && tile[0].merge < 0);
          continue;
        }
        // As documented: in full rounds of equal items all are as long as runs may be, unless they are few and very long; in the round
        // after these none has more keys than 5/4 of a worker's share of it, or two shares and a little more while that is 1024 at most; in
        // uneven lists a share, or longest_kv; unless it is a piece. A round alone ends as soon as it may.
        const int64_t piece = pieces[0].kv_end - pieces[0].kv_begin, share = keys * rest / (count * workers);
        const auto fits = [&](int64_t n) {
          if (!even) return n <= std::min<int64_t>(keys / workers, policy.longest_kv);
          if (!in_rest) return longest <= 4 * int64_t(policy.longest_kv) || count >= 6 * workers || n <= policy.longest_kv;
          return n <= share * 5 / 4 || (n <= 1024 && n <= share * 17 / 8);
        };
        const int num_pieces = int(pieces.size());
        const auto run_of = [&](const auto& fits) {
          if (num_pieces <= policy.most_in_run && fits(keys_of(tile))) return policy.most_in_run;
          return *std::find_if(kRuns.rbegin(), kRuns.rend(),
                               [&](int run) { return run == 1 || (run <= policy.most_in_run && fits(run * piece)); });
        };
        int run = run_of(fits);
        if (even && count < workers) {
          const auto time = [&](int64_t of_run) {
            const int64_t splits = (num_pieces + of_run - 1) / of_run, tasks = count * splits;
            const int64_t rounds = (tasks * policy.workers_each + workers - 1) / workers;
            return rounds * std::min<int64_t>(of_run * piece, keys_of(tile)) + (tasks + workers - 1) / workers * 300 + splits * 20;
          };
          run = *std::find_if(kRuns.begin(), kRuns.end(),
                              [&](int of_run) { return tile.size() == size_t((num_pieces + of_run - 1) / of_run); });
          if (count == 1 && batch.query_len(r) == std::max(policy.min_q, 1) && mask == Mask{}) {
            for (const int other : kRuns) {
              if (other <= policy.most_in_run && other * piece <= 4 * int64_t(policy.longest_kv)) {
                ASSERT_LE(time(run), time(other));
              }
            }
          }
        }
        ++runs[run], whole += run > 1 && tile.size() == 1;
        for (const WorkItem& w : tile) ASSERT_EQ(w.piece, run == 1 ? 0 : piece);
        ASSERT_EQ(tile.size(), size_t((num_pieces + run - 1) / run));
        ASSERT_EQ(tile[0].merge < 0, tile.size() == 1);
        if (tile.size() == 1) continue;
        const MergeItem& m = s.merges.at(size_t(tile[0].merge));
        ASSERT_EQ(m.num_splits, int(tile.size()));
        for (size_t i = 0; i < tile.size(); ++i) {
          ASSERT_EQ(tile[i].merge, tile[0].merge);
          ASSERT_EQ(tile[i].partial, m.first_partial + int(i) * (m.q_end - m.q_begin));
        }
      }
    }
  }
  for (const int run : kRuns) EXPECT_GT(runs[run], 100) << run;
  EXPECT_GT(whole, 300);
}

// Whose pieces are not equal from the first on, or whose cut depends on the load anyway.
TEST(ScheduleRuns, OtherListsHaveNone) {
  for (int seed = 0; seed < 200; ++seed) {
    Random random(seed);
    SchedulePolicy policy = random_policy(random);
    if (seed % 2 == 0) {
      policy.balanced = true;
    } else {
      policy.max_splits = 0;
    }
    const Lengths lengths = random_batch(random);
    Schedule s;
    schedule(lengths.view(), {}, policy, s);
    for (const WorkItem& w : s.work) ASSERT_EQ(w.piece, 0);
  }
}

// Of lists of verify: runs of four pieces would fill two rounds of workers and a half, and runs of one piece be too many. So eight of ten
// requests have runs of four pieces, which fill two rounds, and the others have single pieces.
TEST(ScheduleRuns, ItemsOfTheLastRoundHaveShorterRuns) {
  SchedulePolicy p{.tile_q = 1, .tile_kv = 32, .split_kv = 1024, .num_workers = 66, .max_splits = 64, .max_split_rows = 64};
  p.longest_kv = INT32_MAX, p.split_kv_each = 241, p.runs = p.few_splits = true;  // as for latents of 128 heads
  const auto runs_of = [&](int requests, int keys) {
    Lengths lengths;
    for (int r = 0; r < requests; ++r) lengths.add(1, keys);
    Schedule s;
    schedule(lengths.view(), {}, p, s);
    std::map<int, int> counts;
    for (const WorkItem& w : s.work) ++counts[w.kv_end - w.kv_begin];
    return counts;
  };
  EXPECT_EQ(runs_of(10, 65536), (std::map<int, int>{{1024, 2 * 64}, {4096, 8 * 16}}));
  EXPECT_EQ(runs_of(8, 65536), (std::map<int, int>{{4096, 8 * 16}}));  // two rounds, nearly
  EXPECT_EQ(runs_of(1, 65536), (std::map<int, int>{{1024, 64}}));
  EXPECT_EQ(runs_of(20, 16384), (std::map<int, int>{{1024, 4 * 16}, {4096, 16 * 4}}));
}

TEST(ScheduleRuns, LengthsNearTheEndOfIntDoNotOverflow) {
  const SchedulePolicy policy{.split_kv = 1 << 20, .max_splits = 7, .max_split_rows = 7, .runs = true};
  for (const int num_workers : {1, 3, 132}) {
    SchedulePolicy p = policy;
    p.num_workers = num_workers;
    Lengths lengths;
    lengths.add(1, INT32_MAX), lengths.add(1, INT32_MAX - 1);
    Schedule s;
    schedule(lengths.view(), {}, p, s);
    for (const auto& [token, tile] : by_token(s)) {
      EXPECT_EQ(tile.size(), num_workers == 1 ? 1u : 7u);
      EXPECT_EQ(tile.front().kv_begin, 0);
      EXPECT_EQ(tile.back().kv_end, lengths.lens[size_t(token)]);
      for (size_t i = 1; i < tile.size(); ++i) EXPECT_EQ(tile[i].kv_begin, tile[i - 1].kv_end);
    }
  }
}

}  // namespace
}  // namespace imbrex

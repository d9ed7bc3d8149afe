// schedule() over random batches: every visible pair is covered once, cuts lie where the policy allows, merges add up.
#include "imbrex/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstdio>
#include <random>
#include <tuple>
#include <vector>

#include "attention/mask.h"
#include "attention/schedule_tiles.h"
#include "count_allocations.h"
#include "expect_error.h"

namespace imbrex {
namespace {

using test::error_code;
using test::HostBatch;
using test::Request;
using test::Tile;
using test::tiles_of;

class Random {
 public:
  explicit Random(int seed) : engine_(unsigned(seed)) {}
  int below(int n) { return int(engine_() % unsigned(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  template <class T>
  const T& of(const std::vector<T>& values) {
    return values[size_t(below(int(values.size())))];
  }

  // Padded and empty requests, decode, verify, chunked and whole prefill; with `cross` also more queries than keys.
  Request request(int longest, bool cross) {
    const int context = below(longest);
    if (cross && below(3) == 0) return {between(1, 40), below(30)};
    switch (below(7)) {
      case 0: return {0, 0};
      case 1: return {0, context};
      case 2: return {between(2, 8), context + 8};
      case 3: {
        const int q_len = between(1, 90);
        return {q_len, context + q_len};
      }
      case 4: {
        const int q_len = between(1, 200);
        return {q_len, q_len};
      }
      default: return {1, context + 1};
    }
  }
  std::vector<Request> batch(int longest, bool cross) {
    std::vector<Request> requests(size_t(below(12)));
    for (Request& r : requests) r = request(longest, cross);
    return requests;
  }
  SchedulePolicy policy(bool balanced) {
    SchedulePolicy p;
    p.tile_q = of<int>({1, 3, 16, 64, 128});
    p.tile_kv = of<int>({1, 16, 24, 128});
    p.split_kv = p.tile_kv * of<int>({1, 2, 3, 8, 1000});
    p.split_max_q = of<int>({0, 1, 16, 50});
    p.balanced = balanced;
    p.num_workers = of<int>({1, 2, 7, 132});
    p.split_cost = of<int>({0, 1, 10});
    p.cost_by_keys = below(2) == 0;
    return p;
  }

 private:
  std::mt19937 engine_;
};

const std::vector<Mask>& masks() {
  static const std::vector<Mask> all = {
      {},
      {.causal = false},
      {.window_left = 0},
      {.window_left = 31},
      {.causal = false, .window_left = 5, .window_right = 9},
      {.causal = false, .window_right = 0},
      {.causal = false, .window_left = 40},
      {.chunk = 48},
      {.causal = false, .chunk = 7},
      {.window_left = 20, .chunk = 33},
      {.chunk = 16, .chunk_lookback = 2},
      {.causal = false, .chunk = 7, .chunk_lookback = 3},
      {.causal = false, .window_left = 11, .window_right = 200, .chunk = 64},
      {.custom = true},
      {.causal = false, .custom = true},
  };
  return all;
}

// Items tile the query tokens of their requests: nothing is left out, nothing is done twice.
void expect_tokens_covered_once(const Batch& batch, const SchedulePolicy& policy, const std::vector<Tile>& tiles) {
  int token = 0;
  for (const Tile& tile : tiles) {
    const WorkItem& w = tile[0];
    ASSERT_TRUE(w.table >= 0 && w.table < batch.num_reqs());
    ASSERT_EQ(w.q_begin, token);
    ASSERT_LT(w.q_begin, w.q_end);
    ASSERT_LE(w.q_end - w.q_begin, policy.tile_q);
    ASSERT_GE(w.q_begin, batch.query_start_loc[w.table]);
    ASSERT_LE(w.q_end, batch.query_start_loc[w.table + 1]);
    // As few tiles as possible: all but a request's last are full.
    ASSERT_TRUE(w.q_end - w.q_begin == policy.tile_q || w.q_end == batch.query_start_loc[w.table + 1]);
    token = w.q_end;
    for (const WorkItem& piece : tile) {
      ASSERT_EQ(piece.table, w.table);
      ASSERT_EQ(piece.q_end, w.q_end);
    }
  }
  ASSERT_EQ(token, batch.num_tokens());
}

// Each tile's keys are one range without holes or overlaps, with every visible key in it and no hidden tile at its ends.
void expect_keys_covered_once(const Batch& batch, const Mask& mask, const SchedulePolicy& policy, const std::vector<Tile>& tiles) {
  for (const Tile& tile : tiles) {
    const int r = tile[0].table, begin = tile[0].kv_begin, end = tile.back().kv_end;
    for (size_t i = 0; i < tile.size(); ++i) {
      ASSERT_EQ(tile[i].kv_begin % policy.tile_kv, 0);
      ASSERT_TRUE(tile.size() == 1 ? begin <= end : tile[i].kv_begin < tile[i].kv_end);
      ASSERT_TRUE(i == 0 || tile[i].kv_begin == tile[i - 1].kv_end);
    }
    ASSERT_LE(end, batch.seq_lens[r]);
    int first = INT_MAX, last = -1;
    for (int q = tile[0].q_begin; q < tile[0].q_end; ++q) {
      const int position = batch.context_len(r) + q - batch.query_start_loc[r];
      for (int j = 0; j < batch.seq_lens[r]; ++j) {
        if (!mask_allows(mask, position, j)) continue;
        first = std::min(first, j);
        last = std::max(last, j);
      }
    }
    if (last < 0) {
      ASSERT_EQ(begin, end);
      continue;
    }
    ASSERT_TRUE(begin <= first && last < end);
    ASSERT_EQ(begin, first / policy.tile_kv * policy.tile_kv);
    ASSERT_EQ(end, last + 1);
  }
}

void expect_cuts_follow_the_policy(const Batch& batch, const SchedulePolicy& policy, const std::vector<Tile>& tiles) {
  for (const Tile& tile : tiles) {
    if (batch.query_len(tile[0].table) > policy.split_max_q) {
      ASSERT_EQ(tile.size(), 1u);
    } else if (!policy.balanced) {
      for (const WorkItem& w : tile)  // so that a boundary is a multiple of split_kv, and every multiple is a boundary
        ASSERT_TRUE(w.kv_begin == w.kv_end || w.kv_begin / policy.split_kv == (w.kv_end - 1) / policy.split_kv);
    }
  }
}

void expect_merges_describe_the_pieces(const Schedule& s, const std::vector<Tile>& tiles) {
  std::vector<int> used(size_t(s.num_partial_rows), 0);
  size_t split_tiles = 0;
  for (const Tile& tile : tiles) {
    if (tile.size() == 1) {
      ASSERT_EQ(tile[0].partial, -1);
      continue;
    }
    ++split_tiles;
    const auto m = std::find_if(s.merges.begin(), s.merges.end(), [&](const MergeItem& merge) { return merge.q_begin == tile[0].q_begin; });
    ASSERT_NE(m, s.merges.end());
    ASSERT_EQ(m->q_end, tile[0].q_end);
    ASSERT_EQ(m->num_splits, int(tile.size()));
    const int rows = m->q_end - m->q_begin;
    for (int piece = 0; piece < m->num_splits; ++piece) {
      ASSERT_EQ(tile[size_t(piece)].partial, m->first_partial + piece * rows);
      for (int row = 0; row < rows; ++row) ++used.at(size_t(tile[size_t(piece)].partial + row));
    }
  }
  ASSERT_EQ(s.merges.size(), split_tiles);
  ASSERT_EQ(std::count(used.begin(), used.end(), 1), s.num_partial_rows);
}

// The order is a logarithm with three fractional bits of the cost, so costs within an eighth may be in any order.
void expect_longest_first(const Schedule& s, bool cost_by_keys) {
  int64_t smallest = INT64_MAX / 16;
  for (const WorkItem& w : s.work) {
    const int64_t cost = int64_t(w.kv_end - w.kv_begin + 64) * (cost_by_keys ? 1 : w.q_end - w.q_begin);
    ASSERT_LT(cost * 8, smallest * 9);
    smallest = std::min(smallest, cost);
  }
}

void expect_good(const Batch& batch, const Mask& mask, const SchedulePolicy& policy, const Schedule& s) {
  const std::vector<Tile> tiles = tiles_of(s);
  ASSERT_NO_FATAL_FAILURE(expect_tokens_covered_once(batch, policy, tiles));
  ASSERT_NO_FATAL_FAILURE(expect_keys_covered_once(batch, mask, policy, tiles));
  ASSERT_NO_FATAL_FAILURE(expect_cuts_follow_the_policy(batch, policy, tiles));
  ASSERT_NO_FATAL_FAILURE(expect_merges_describe_the_pieces(s, tiles));
  if (s.places.empty()) {
    ASSERT_NO_FATAL_FAILURE(expect_longest_first(s, policy.cost_by_keys));
  }
}

TEST(Schedule, RandomBatchesAreCutAsPromised) {
  Schedule s;  // shared: a call may not depend on what was in it
  size_t merges = 0, empty_items = 0;
  for (int seed = 0; seed < 1500; ++seed) {
    Random random(seed);
    const Mask& mask = masks()[size_t(seed) % masks().size()];
    const SchedulePolicy policy = random.policy(seed % 3 == 0);
    const HostBatch host(random.batch(/*longest=*/300, /*cross=*/seed % 4 == 0));
    schedule(host.view(), mask, policy, s);
    ASSERT_NO_FATAL_FAILURE(expect_good(host.view(), mask, policy, s)) << "seed " << seed << ", " << mask.str();
    merges += s.merges.size();
    for (const WorkItem& w : s.work) empty_items += w.kv_begin == w.kv_end;
  }
  EXPECT_GT(merges, 1000u);
  EXPECT_GT(empty_items, 100u);  // queries that see no key still need their output written
}

TEST(Schedule, NothingToDo) {
  Schedule s;
  schedule({}, {}, {}, s);
  EXPECT_TRUE(s.work.empty() && s.merges.empty());
  schedule(HostBatch({{0, 0}, {0, 77}, {0, 0}}).view(), {}, {.balanced = true, .num_workers = 132}, s);
  EXPECT_TRUE(s.work.empty() && s.merges.empty());
}

TEST(Schedule, ALongRequestByHand) {
  Schedule s;
  schedule(HostBatch({{2, 700}}).view(), {}, {.tile_q = 64, .tile_kv = 128, .split_kv = 256}, s);
  ASSERT_EQ(s.merges.size(), 1u);
  EXPECT_EQ(std::tie(s.merges[0].q_begin, s.merges[0].q_end, s.merges[0].first_partial, s.merges[0].num_splits),
            std::make_tuple(0, 2, 0, 3));
  const Tile tile = tiles_of(s).at(0);
  EXPECT_EQ(tile[0].kv_end, 256);
  EXPECT_EQ(tile[1].kv_end, 512);
  EXPECT_EQ(tile[2].kv_end, 700);
  EXPECT_EQ(tile[2].partial, 4);
  EXPECT_EQ(s.num_partial_rows, 6);
  EXPECT_EQ(s.work.back().kv_begin, 512);  // the shortest comes last
}

TEST(Schedule, LengthsNearTheEndOfIntDoNotOverflow) {
  Schedule s;
  const HostBatch host({{1, INT_MAX}, {3, INT_MAX - 1}});
  for (const bool balanced : {false, true}) {
    for (const Mask& mask : {Mask{}, Mask{.causal = false, .window_right = INT_MAX}, Mask{.chunk = INT_MAX},
                             Mask{.chunk = INT_MAX, .chunk_lookback = INT_MAX}}) {
      schedule(host.view(), mask, {.split_kv = 1 << 20, .balanced = balanced, .num_workers = 132}, s);
      const std::vector<Tile> tiles = tiles_of(s);
      ASSERT_EQ(tiles.size(), 2u);
      EXPECT_GT(tiles[0].size(), 50u);
      ASSERT_NO_FATAL_FAILURE(expect_merges_describe_the_pieces(s, tiles));
      for (size_t r = 0; r < 2; ++r) {
        EXPECT_EQ(tiles[r].front().kv_begin, 0);
        EXPECT_EQ(tiles[r].back().kv_end, host.lens[r]);
        for (size_t i = 1; i < tiles[r].size(); ++i) EXPECT_EQ(tiles[r][i].kv_begin, tiles[r][i - 1].kv_end);
      }
    }
  }
}

// How one request was cut, with tokens and partial rows counted from its own first.
using Cut = std::vector<std::array<int, 5>>;
Cut cut_of(const Schedule& s, int request, int first_token) {
  Cut cut;
  for (const Tile& tile : tiles_of(s))
    for (const WorkItem& w : tile)
      if (w.table == request)
        cut.push_back(
            {w.q_begin - first_token, w.q_end - first_token, w.kv_begin, w.kv_end, w.partial < 0 ? -1 : w.partial - tile[0].partial});
  return cut;
}

TEST(Schedule, ACutDependsOnItsRequestAlone) {
  Schedule s, alone;
  for (int seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const Mask& mask = masks()[size_t(seed) % masks().size()];
    SchedulePolicy policy = random.policy(false);
    const std::vector<Request> requests = random.batch(1000, false);
    const HostBatch host(requests);
    schedule(host.view(), mask, policy, s);
    policy.num_workers = random.between(1, 200);  // not looked at
    for (size_t r = 0; r < requests.size(); ++r) {
      schedule(HostBatch({requests[r]}).view(), mask, policy, alone);
      ASSERT_EQ(cut_of(s, int(r), host.starts[r]), cut_of(alone, 0, 0)) << "seed " << seed << ", request " << r;
    }
  }
}

TEST(Schedule, WarmCallsAllocateNothing) {
  for (const bool balanced : {false, true}) {
    Random random(7);
    std::vector<Request> requests;
    for (int i = 0; i < 400; ++i) requests.push_back(random.request(50000, false));
    const HostBatch large(requests), small({{1, 90000}, {5, 40}, {300, 300}});
    const SchedulePolicy policy{.balanced = balanced, .num_workers = 132};
    Schedule s;
    schedule(large.view(), {}, policy, s);
    EXPECT_GT(s.merges.size(), 10u);
    const auto both = [&] {
      schedule(small.view(), {}, policy, s);
      schedule(large.view(), {}, policy, s);
    };
    both();  // balanced cuts of the small batch are finer
    EXPECT_EQ(test::count_allocations(both), 0);
  }
  EXPECT_GT(test::count_allocations([] { HostBatch({{1, 1}}); }), 0);  // the counter counts
}

TEST(Schedule, BadPoliciesAreRefused) {
  const auto code = [](SchedulePolicy policy) {
    Schedule s;
    return error_code([&] { schedule(HostBatch({{1, 9}}).view(), {}, policy, s); });
  };
  EXPECT_EQ(code({}), "nothing thrown");
  for (int bad : {0, -1, -64, (1 << 20) + 1, 1 << 30, INT_MAX}) {
    EXPECT_EQ(code({.tile_q = bad}), "schedule.tile") << bad;
    EXPECT_EQ(code({.tile_kv = bad}), "schedule.tile") << bad;
    EXPECT_EQ(code({.tile_kv = bad, .balanced = true}), "schedule.tile") << bad;
  }
  for (int bad : {0, -128, 1, 100, 129, INT_MAX}) EXPECT_EQ(code({.tile_kv = 128, .split_kv = bad}), "schedule.split_kv") << bad;
  EXPECT_EQ(code({.tile_q = 1 << 20, .tile_kv = 1 << 20, .split_kv = 1 << 20, .balanced = true}), "nothing thrown");
  EXPECT_EQ(code({.balanced = true, .num_workers = 0}), "nothing thrown");
}

#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// The time of the fastest of `calls` calls: with enough of them a machine that is slow for some milliseconds does not count.
double best_microseconds(const Batch& batch, const Mask& mask, const SchedulePolicy& policy, int calls) {
  Schedule s;
  double best = 1e9;
  for (int i = 0; i < calls; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    schedule(batch, mask, policy, s);
    best = std::min(best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

TEST(Schedule, TakesMicroseconds) {
  Random random(1);
  std::vector<Request> decode, mixed;
  for (int i = 0; i < 256; ++i) decode.push_back({1, random.between(1, 8192)});
  for (int i = 0; i < 4096; ++i) mixed.push_back(i % 16 == 0 ? random.request(4000, false) : Request{1, random.between(1, 8192)});
  const std::pair<const char*, Mask> layers[] = {{"full", {}}, {"window", {.window_left = 1023}}, {"chunk", {.chunk = 2048}}};
  for (const bool balanced : {false, true})
    for (const auto& [name, mask] : layers) {
      const SchedulePolicy policy{.balanced = balanced, .num_workers = 132};
      const double small = best_microseconds(HostBatch(decode).view(), mask, policy, 6000);
      const double large = best_microseconds(HostBatch(mixed).view(), mask, policy, 400);
      printf("schedule (%s%s): 256 decode requests %.1f us, 4096 mixed requests %.1f us\n", name, balanced ? ", balanced" : "", small,
             large);
      EXPECT_LT(small, 40);  // twice what a slow machine takes
      EXPECT_LT(large, 800);
    }
}
#endif

}  // namespace
}  // namespace imbrex

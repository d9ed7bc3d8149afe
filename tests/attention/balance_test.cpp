// Cuts that follow the load: all workers end at about the same time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <vector>

#include "attention/schedule_tiles.h"

namespace imbrex {
namespace {

using test::HostBatch;
using test::Request;
using test::Tile;
using test::tiles_of;

// What a split costs besides its own keys, in keys: as in src/attention/balance.cpp.
constexpr int64_t kSplitKeys = 128;

int64_t whole_tiles(int keys, const SchedulePolicy& policy) { return int64_t(keys + policy.tile_kv - 1) / policy.tile_kv * policy.tile_kv; }

// When the workers have ended a list: each takes the next item as soon as it has ended one.
int64_t end_of(const Schedule& s, const SchedulePolicy& policy) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> ends;
  for (int i = 0; i < policy.num_workers; ++i) ends.push(0);
  int64_t last = 0;
  for (const WorkItem& w : s.work) {
    const int64_t end = ends.top() + whole_tiles(w.kv_end - w.kv_begin, policy) + kSplitKeys;
    ends.pop(), ends.push(end);
    last = std::max(last, end);
  }
  return last;
}

// Balanced: no more splits than items and workers together, and where every item may be cut, the last worker ends little later than if all
// ended at the same time. A long item that is cut into few splits may leave an eighth of one, which is added to the others.
void expect_even_ends(const Batch& batch, const Schedule& s, const SchedulePolicy& policy, const std::vector<Tile>& tiles) {
  ASSERT_LE(s.work.size(), tiles.size() + size_t(policy.num_workers));
  int64_t keys = 0, longest = 0;
  for (const Tile& tile : tiles) {
    const int64_t own = whole_tiles(tile.back().kv_end - tile[0].kv_begin, policy);
    if (batch.query_len(tile[0].table) > policy.split_max_q) return;
    keys += own + kSplitKeys, longest = std::max(longest, own);
  }
  int64_t share = keys / policy.num_workers;
  if (policy.split_cost > 0) share = std::max({share, int64_t(std::sqrt(double(policy.split_cost) * double(longest))), longest / 64});
  share += share / 8;
  if (int64_t(tiles.size()) > 3 * policy.num_workers) share += longest / 8;  // such items stay whole, and end when they do
  EXPECT_LE(end_of(s, policy), share + 3 * kSplitKeys + 6 * policy.tile_kv)
      << policy.num_workers << " workers, " << tiles.size() << " items";
}

TEST(Balance, WorkersEndTogether) {
  Schedule s;
  size_t cut = 0;
  for (int seed = 0; seed < 1500; ++seed) {
    test::Random random(seed);
    SchedulePolicy policy{.tile_q = random.of({1, 16, 64}), .tile_kv = random.of({16, 32, 128}), .balanced = true};
    policy.split_max_q = random.of({1, 16, 50}), policy.split_cost = random.of({0, 10});
    policy.num_workers = random.of({1, 2, 7, 66, 132});
    std::vector<Request> requests(size_t(random.between(1, random.of({4, 80, 500}))));
    const int longest = random.of({300, 5000, 100000}), shortest = random.of({1, longest / 2, longest});
    for (Request& r : requests) r = {random.of({1, 1, 2, policy.split_max_q}), 50 + random.between(shortest, longest)};
    const HostBatch host(requests);
    schedule(host.view(), {}, policy, s);
    ASSERT_NO_FATAL_FAILURE(expect_even_ends(host.view(), s, policy, tiles_of(s))) << "seed " << seed;
    cut += s.merges.size();
  }
  EXPECT_GT(cut, 10000u);
}

// Ten long requests would have six splits each, and six of 66 workers nothing to do. So splits have a worker's whole share, or two have it
// together.
TEST(Balance, SharesBeginWithinRequests) {
  Schedule s;
  const SchedulePolicy policy{.tile_q = 1, .tile_kv = 32, .balanced = true, .num_workers = 66};
  schedule(HostBatch(std::vector<Request>(10, Request{1, 65536})).view(), {}, policy, s);
  EXPECT_EQ(s.work.size(), 75u);
  EXPECT_LE(end_of(s, policy), 10 * 65536 / 66 * 103 / 100);
  // Whole requests that end a few per cent later are left whole, and so are even splits.
  schedule(HostBatch(std::vector<Request>(128, Request{1, 4096})).view(), {}, policy, s);
  EXPECT_EQ(s.work.size(), 128u);
  schedule(HostBatch(std::vector<Request>(16, Request{1, 32768})).view(), {}, policy, s);
  EXPECT_EQ(s.work.size(), 64u);
  for (const WorkItem& w : s.work) EXPECT_EQ(w.kv_end - w.kv_begin, 8192);
}

TEST(Balance, SplitsByLoad) {
  const auto pieces = [](const std::vector<Request>& requests, int num_workers) {
    Schedule s;
    schedule(HostBatch(requests).view(), {}, {.balanced = true, .num_workers = num_workers}, s);
    return tiles_of(s);
  };
  // One long request is shared by all the workers of a large device, evenly.
  const Tile tile = pieces({{1, 131072}}, 132).at(0);
  EXPECT_GT(tile.size(), 100u);
  EXPECT_LE(tile.size(), 132u);
  for (const WorkItem& w : tile) EXPECT_LE(w.kv_end - w.kv_begin, 1024);
  EXPECT_EQ(pieces({{1, 131072}}, 1).at(0).size(), 1u);
  // Where there are enough requests for all workers, none is split: a split would have to be merged.
  for (const Tile& t : pieces(std::vector<Request>(500, Request{1, 2000}), 132)) EXPECT_EQ(t.size(), 1u);
  // Short requests are left whole however many workers idle.
  EXPECT_EQ(pieces({{1, 200}}, 132).at(0).size(), 1u);
}

// A long context counts for what a windowed or chunked layer reads of it.
TEST(Balance, CountsVisibleKeysOnly) {
  for (const Mask& mask : {Mask{.window_left = 4095}, Mask{.chunk = 8192}}) {
    const auto pieces = [&](size_t count, int seq_len) {
      Schedule s;
      const std::vector<Request> requests(count, Request{1, seq_len});
      schedule(HostBatch(requests).view(), mask, {.balanced = true, .num_workers = 132}, s);
      return tiles_of(s);
    };
    // Keys 126976 to 131071 are visible, or 122880 to 126975: alone, two tiles of 128 for each of 16 workers.
    const int seq_len = mask.chunk > 0 ? 126976 : 131072;
    const Tile alone = pieces(1, seq_len).at(0);
    EXPECT_EQ(alone.size(), 16u);
    for (const WorkItem& w : alone) EXPECT_EQ(w.kv_end - w.kv_begin, 256);
    // Where there are as many requests as workers each is one item, and where there are half as many each is two.
    for (const Tile& tile : pieces(132, seq_len)) EXPECT_EQ(tile.size(), 1u);
    for (const Tile& tile : pieces(66, seq_len)) EXPECT_EQ(tile.size(), 2u);
  }
}

}  // namespace
}  // namespace imbrex

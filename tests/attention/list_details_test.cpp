// What a work list says besides its items: requests with the same blocks share the items that read them, and a custom mask's hidden tiles
// are left out. Random batches: every pair of a query and a key it may see is covered once, and merges find every partial row.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "allocations.h"
#include "attention/mask.h"
#include "attention/mask_stretches.h"
#include "attention/random_lengths.h"
#include "attention/shared_keys.h"

namespace imbrex {
namespace {

constexpr int kBlock = 16;

// Requests whose first blocks are those of one of a few stems, for some way; then each has blocks of its own.
struct SharedBatch : test::Lengths {
  std::vector<int32_t> table;
  int width = 0, next_id = 0;
  KeySource keys;
  Batch batch;

  SharedBatch(test::Random& random, int num_reqs, int longest) : width((longest + kBlock - 1) / kBlock) {
    std::vector<std::vector<int32_t>> stems(3);
    for (auto& stem : stems)
      for (int b = 0; b < width; ++b) stem.push_back(next_id++);
    for (int r = 0; r < num_reqs; ++r) {
      const int seq_len = random.between(1, longest), q_len = std::min(seq_len, random.of({0, 1, 1, 1, 2, 4, 40}));
      const auto& stem = stems[size_t(random.between(0, 2))];
      const int common = random.between(0, width);
      add(q_len, seq_len);
      for (int b = 0; b < width; ++b) table.push_back(b < common ? stem[size_t(b)] : next_id++);
    }
    batch = view();
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {num_reqs, width});
    find_keys(batch, keys);
  }
  int request_of(int token) const { return int(std::upper_bound(starts.begin(), starts.end(), token) - starts.begin()) - 1; }
  // The block that a request's key is in; it tells keys of different requests apart, unless they are the same.
  int block_of(int request, int key) const { return table[size_t(request) * size_t(width) + size_t(key / kBlock)]; }
};

SchedulePolicy policy_of(test::Random& random) {
  return {.tile_q = random.of({4, 16, 64}),
          .tile_kv = 32,
          .split_kv = random.of({64, 128}),
          .split_max_q = 4,
          .num_workers = random.of({1, 1, 2, 5})};
}

// Which partial row has the sums of a token over [begin, end), and every item's tokens and keys, checked on the way.
struct Piece {
  int begin, end;
};
void expect_same_work(const SharedBatch& b, const Schedule& plain, const Schedule& shared) {
  std::map<std::pair<int, int>, int> rows;  // (token, kv_begin) -> row; -1: written to the output
  std::set<int> used;
  const auto& tokens = shared.details.tokens;
  for (const WorkItem& w : shared.work) {
    ASSERT_LT(w.q_begin, w.q_end);
    for (int i = w.q_begin; i < w.q_end; ++i) {
      const int token = tokens.empty() ? i : tokens[size_t(i)], row = w.partial < 0 ? -1 : w.partial + i - w.q_begin;
      const int request = b.request_of(token);
      if (!tokens.empty()) {
        ASSERT_EQ(shared.details.request_of[size_t(token)], request);
      }
      for (int key = w.kv_begin; key < w.kv_end; ++key) ASSERT_EQ(b.block_of(w.table, key), b.block_of(request, key));
      ASSERT_TRUE(rows.emplace(std::pair(token, w.kv_begin), row).second) << "twice";
      if (row >= 0) {
        ASSERT_TRUE(used.insert(row).second) << "row " << row << " is written twice";
        ASSERT_LT(row, shared.num_partial_rows);
      }
    }
  }
  size_t pairs = 0;
  for (const WorkItem& w : plain.work)
    for (int token = w.q_begin; token < w.q_end; ++token, ++pairs) ASSERT_TRUE(rows.contains({token, w.kv_begin}));
  ASSERT_EQ(pairs, rows.size());
  // Merges join the same pieces of the same tokens, in the same order.
  ASSERT_EQ(plain.merges.size(), shared.merges.size());
  for (size_t m = 0; m < plain.merges.size(); ++m) {
    const MergeItem &before = plain.merges[m], &after = shared.merges[m];
    ASSERT_EQ(std::tie(before.q_begin, before.q_end, before.num_splits), std::tie(after.q_begin, after.q_end, after.num_splits));
    for (const WorkItem& w : plain.work) {
      if (w.merge != int(m)) continue;
      const int split = (w.partial - before.first_partial) / (before.q_end - before.q_begin);
      for (int token = w.q_begin; token < w.q_end; ++token) {
        const int first = shared.details.parts.empty() ? after.first_partial + split * (after.q_end - after.q_begin)
                                                       : shared.details.parts[size_t(after.first_partial + split)];
        ASSERT_EQ(first + token - after.q_begin, (rows[{token, w.kv_begin}]));
      }
    }
  }
}

TEST(SharedKeys, EveryPairIsCoveredOnceAndEveryRowIsMerged) {
  test::Random random(3);
  int shared_items = 0, lists = 0;
  ShareScratch scratch;
  for (int round = 0; round < 300; ++round) {
    const SharedBatch b(random, random.between(0, 9), 700);
    const SchedulePolicy policy = policy_of(random);
    Schedule plain, shared;
    schedule(b.batch, {}, policy, plain);
    schedule(b.batch, {}, policy, shared);
    share_keys(b.batch, b.keys, {kBlock, policy.tile_q, policy.num_workers}, shared, scratch);
    expect_same_work(b, plain, shared);
    for (const WorkItem& w : shared.work) {
      ASSERT_LE(w.q_end - w.q_begin, policy.tile_q);
      shared_items += w.q_begin >= b.batch.num_tokens();
    }
    lists += !shared.details.tokens.empty();
    ASSERT_TRUE(shared.work.size() < plain.work.size() || shared.details.tokens.empty());
  }
  EXPECT_GT(shared_items, 200);
  EXPECT_GT(lists, 50);
  EXPECT_LT(lists, 300);
}

TEST(SharedKeys, OnePromptOfManyRequestsIsReadOnceForEachTile) {
  test::Random random(5);
  SharedBatch b(random, 0, 512);
  for (int r = 0; r < 10; ++r) {
    b.add(1, 256 + 8 + r);
    for (int block = 0; block < b.width; ++block) b.table.push_back(block < 16 ? block : 1000 + r * b.width + block);
  }
  b.batch = b.view();
  b.batch.block_table = TensorView::contiguous(b.table.data(), DType::i32, {10, b.width});
  find_keys(b.batch, b.keys);
  const SchedulePolicy policy{.tile_q = 4, .tile_kv = 32, .split_kv = 128, .split_max_q = 4};
  Schedule list;
  ShareScratch scratch;
  schedule(b.batch, {}, policy, list);
  EXPECT_EQ(list.work.size(), 30u);
  share_keys(b.batch, b.keys, {kBlock, policy.tile_q, 1}, list, scratch);
  EXPECT_EQ(list.work.size(), 10u + 2 * 3);  // their own ends, and two pieces of the prompt for 4 + 4 + 2 tokens
  EXPECT_EQ(list.num_partial_rows, 30);
  for (size_t i = 1; i < list.work.size(); ++i) {  // longest first
    const auto cost = [&](const WorkItem& w) { return (w.q_end - w.q_begin) * (w.kv_end - w.kv_begin + 64); };
    EXPECT_LE(cost(list.work[i]), cost(list.work[i - 1]) * 9 / 8);
  }
  for (const auto& [workers, items] : {std::pair(2, 16u), {3, 18u}, {5, 20u}, {6, 30u}}) {  // more workers: smaller items, then none
    schedule(b.batch, {}, policy, list);
    share_keys(b.batch, b.keys, {kBlock, policy.tile_q, workers}, list, scratch);
    EXPECT_EQ(list.work.size(), items) << workers;
  }
  schedule(b.batch, {}, policy, list);
  share_keys(b.batch, b.keys, {kBlock, policy.tile_q, 1}, list, scratch);
  const Schedule warm = list;
  const auto again = [&] {
    schedule(b.batch, {}, policy, list);
    share_keys(b.batch, b.keys, {kBlock, policy.tile_q, 1}, list, scratch);
  };
  EXPECT_EQ(test::count_allocations(again), 0);
  EXPECT_EQ(warm.details.tokens, list.details.tokens);
  EXPECT_EQ(warm.details.parts, list.details.parts);
}

// Lists with runs of pieces, as GPUs have them.
SchedulePolicy policy_with_runs(test::Random& random) {
  const int tile_q = random.of({2, 4, 16});
  return {.tile_q = tile_q,
          .tile_kv = 32,
          .split_kv = 64,
          .split_max_q = 4,
          .num_workers = random.of({1, 2, 5, 40}),
          .max_splits = random.of({8, 32, 64}),
          .max_split_rows = 128,
          .split_kv_each = random.of({0, 20}),
          .max_q = tile_q,
          .runs = true,
          .most_in_run = random.of({4, 16, 64}),
          .most_partial_rows = random.of({0, 60, 400}),
          .cost_by_keys = true};
}

TEST(SharedKeys, RunsOfRequestsWithOneStemEndWhereItDoes) {
  test::Random random(11);
  int shared_items = 0, shared_runs = 0, cheaper = 0;
  ShareScratch scratch;
  for (int round = 0; round < 400; ++round) {
    const SharedBatch b(random, random.between(0, 20), 1500);
    const SchedulePolicy policy = policy_with_runs(random);
    const SharePolicy share{.block_size = kBlock, .most_tokens = policy.tile_q, .seen_by_all = true};
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

// The same on the list of an H200 for 8 kv heads: 64 requests behind a prompt of 8192 keys.
TEST(SharedKeys, LongRunsAreCutWhereAPromptIsCommon) {
  test::Random random(13);
  SharedBatch b(random, 0, 8292);
  for (int r = 0; r < 64; ++r) {
    b.add(1, 8292);
    for (int block = 0; block < b.width; ++block) b.table.push_back(block < 512 ? block : 512 + r * b.width + block);
  }
  b.batch = b.view();
  b.batch.block_table = TensorView::contiguous(b.table.data(), DType::i32, {64, b.width});
  find_keys(b.batch, b.keys);
  const SchedulePolicy policy{.tile_q = 4,
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
                              .cost_by_keys = true};
  const SharePolicy share{.block_size = kBlock, .most_tokens = 4, .seen_by_all = true};
  Schedule list;
  ShareScratch scratch;
  const auto update = [&] {
    cut(b.batch, {}, policy, list);
    ASSERT_TRUE(shorten_runs(b.batch, b.keys, share, policy, list, scratch));
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

// Where positions are given, an item is shared as far as each of its queries sees all of its keys.
TEST(SharedKeys, QueriesThatSeeFewerKeysShareNoOthers) {
  test::Random random(17);
  int shared_items = 0, left_out = 0;
  ShareScratch scratch;
  for (int round = 0; round < 200; ++round) {
    SharedBatch b(random, random.between(2, 9), 700);
    std::vector<int32_t> positions;
    for (int r = 0; r < b.batch.num_reqs(); ++r)
      for (int i = 0, last = random.between(0, b.batch.seq_lens[size_t(r)] - 1); i < b.batch.query_len(r); ++i)
        positions.push_back(random.between(0, 1) == 0 ? last : b.batch.seq_lens[size_t(r)] - 1);
    const SchedulePolicy policy = policy_of(random);
    const SharePolicy share{.block_size = kBlock, .most_tokens = policy.tile_q, .seen_by_all = true};
    Schedule plain, blind, shared;
    for (Schedule* list : {&plain, &blind, &shared}) schedule(b.batch, {.causal = false}, policy, *list);
    share_keys(b.batch, b.keys, share, blind, scratch);
    b.batch.positions = positions;
    share_keys(b.batch, b.keys, share, shared, scratch);
    expect_same_work(b, plain, shared);
    left_out += int(shared.work.size() > blind.work.size());
    for (const WorkItem& item : shared.work) {
      if (shared.details.tokens.empty() || item.q_begin < b.batch.num_tokens()) continue;
      ++shared_items;
      for (int i = item.q_begin; i < item.q_end; ++i) ASSERT_GE(positions[size_t(shared.details.tokens[size_t(i)])], item.kv_end - 1);
    }
  }
  EXPECT_GT(shared_items, 50);
  EXPECT_GT(left_out, 50);
}

// Under windows and chunks an item is shared as far as each of its queries sees all of its keys, and as many as an item takes would see
// them where kernels take them to stand: one behind the other, from the item's last key on.
TEST(SharedKeys, WindowsLeaveOutItemsThatSomeQuerySeesInPart) {
  test::Random random(19);
  int shared_items = 0, left_out = 0, run_items = 0;
  ShareScratch scratch;
  for (int round = 0; round < 600; ++round) {
    const bool runs = round % 2 == 0;
    const SharedBatch b(random, random.between(2, 20), runs ? 1500 : 700);
    Mask mask{.causal = random.between(0, 3) > 0};
    if (random.between(0, 1) == 0) mask.window_left = random.between(0, 1600);
    if (random.between(0, 3) == 0) mask.window_right = random.between(0, 50);
    if (random.between(0, 2) == 0) mask.chunk = random.between(1, 1600), mask.chunk_lookback = random.between(0, 2);
    const SchedulePolicy policy = runs ? policy_with_runs(random) : policy_of(random);
    const SharePolicy share{.block_size = kBlock, .most_tokens = policy.tile_q, .seen_by_all = true, .windows = windows_of(mask)};
    ASSERT_EQ(share.windows == nullptr, mask.window_left < 0 && mask.window_right < 0 && mask.chunk == 0);
    const SharePolicy blindly{.block_size = kBlock, .most_tokens = policy.tile_q, .seen_by_all = true};
    Schedule plain, blind, shared;
    for (Schedule* list : {&plain, &blind, &shared}) schedule(b.batch, mask, policy, *list);
    share_keys(b.batch, b.keys, blindly, blind, scratch);
    if (runs && shorten_runs(b.batch, b.keys, share, policy, shared, scratch)) {
      shared.work.resize(size_t(shared.num_work));
      write_work(shared, shared.work.data());
      plain = shared;
    }
    share_keys(b.batch, b.keys, share, shared, scratch);
    expect_same_work(b, plain, shared);
    left_out += int(!runs && shared.work.size() > blind.work.size());
    for (const WorkItem& item : shared.work) {
      if (shared.details.tokens.empty() || item.q_begin < b.batch.num_tokens()) continue;
      ++shared_items, run_items += item.piece > 0;
      const auto expect_seen = [&](int position) {
        for (const int key : {item.kv_begin, item.kv_end - 1}) ASSERT_TRUE(mask_allows(mask, position, key)) << mask.str();
      };
      for (int i = 0; i < share.most_tokens; ++i) expect_seen(item.kv_end - 1 + i);
      for (int i = item.q_begin; i < item.q_end; ++i) {
        const int token = shared.details.tokens[size_t(i)], r = b.request_of(token);
        expect_seen(b.batch.seq_lens[size_t(r)] - (b.batch.query_start_loc[size_t(r) + 1] - token));
      }
    }
  }
  EXPECT_GT(shared_items, 100);
  EXPECT_GT(run_items, 5);
  EXPECT_GT(left_out, 5);
}

TEST(MaskStretches, HiddenTilesAreLeftOutAndNoOthers) {
  test::Random random(7);
  int hidden_tiles = 0, shown_tiles = 0, plain_items = 0;
  for (int round = 0; round < 200; ++round) {
    SharedBatch b(random, random.between(1, 4), 300);
    std::vector<long> start;
    long bytes = 0;
    for (int r = 0; r < b.batch.num_reqs(); ++r) start.push_back(bytes), bytes += long(b.batch.query_len(r)) * b.batch.seq_lens[size_t(r)];
    // Tiles of 20 x 50 pairs that are hidden, shown, or seen in part; a round in three has the last kind alone.
    const int kinds = round % 3 == 0 ? 2 : 0;
    std::vector<uint8_t> mask(size_t(bytes), 0);
    for (int r = 0; r < b.batch.num_reqs(); ++r) {
      const int q_len = b.batch.query_len(r), seq_len = b.batch.seq_lens[size_t(r)];
      for (int q0 = 0; q0 < q_len; q0 += 20)
        for (int k0 = 0; k0 < seq_len; k0 += 50) {
          const int kind = random.between(kinds, 2);
          for (int q = q0; q < std::min(q_len, q0 + 20); ++q)
            for (int k = k0; k < std::min(seq_len, k0 + 50); ++k)
              mask[size_t(start[size_t(r)] + long(q) * seq_len + k)] = kind == 0 ? 0 : kind == 1 ? 255 : uint8_t((q + k) % 2);
        }
    }
    b.batch.custom_mask = TensorView::contiguous(mask.data(), DType::u8, {bytes});
    const SchedulePolicy policy = policy_of(random);
    Schedule list;
    schedule(b.batch, {.causal = false}, policy, list);
    if (bytes > 0) find_stretches(b.batch, start, policy.tile_kv, list);
    for (const WorkItem& w : list.work) {
      const auto byte = [&](int token, int key) {
        const int r = w.table;
        return mask[size_t(start[size_t(r)] + long(token - b.starts[size_t(r)]) * b.batch.seq_lens[size_t(r)] + key)];
      };
      std::vector<int> computed(size_t(w.kv_end), 0);  // 1: computed, 2: as one that is shown to all
      if (w.piece == 0) {
        ++plain_items;
        std::fill(computed.begin() + w.kv_begin, computed.end(), 1);
      } else {
        const ItemDetails& own = list.details.items[size_t(~w.piece)];
        ASSERT_EQ(own.kv_head, -1);
        int last = w.kv_begin;
        for (int i = 0; i < own.num_stretches; ++i) {
          const KeyStretch& s = list.details.stretches[size_t(own.first_stretch + i)];
          ASSERT_TRUE(s.begin >= last && s.begin < s.end && s.end <= w.kv_end && s.begin % policy.tile_kv == 0);
          last = s.end;
          for (int key = s.begin; key < s.end; ++key) computed[size_t(key)] = s.shown ? 2 : 1;
        }
      }
      for (int begin = w.kv_begin; begin < w.kv_end; begin += policy.tile_kv) {
        const int end = std::min(w.kv_end, begin + policy.tile_kv);
        bool any = false, all = true;
        for (int token = w.q_begin; token < w.q_end; ++token)
          for (int key = begin; key < end; ++key) any = any || byte(token, key) != 0, all = all && byte(token, key) != 0;
        for (int key = begin; key < end; ++key) ASSERT_EQ(computed[size_t(key)], !any ? 0 : all && w.piece != 0 ? 2 : 1);
        ASSERT_TRUE(w.piece != 0 || (any && !all));
        hidden_tiles += !any, shown_tiles += all;
      }
    }
  }
  EXPECT_GT(hidden_tiles, 100);
  EXPECT_GT(shown_tiles, 100);
  EXPECT_GT(plain_items, 100);
}

}  // namespace
}  // namespace imbrex

// What a work list says besides its items: requests with the same blocks share the items that read them, and a custom mask's hidden tiles
// are left out. Random batches: every pair of a query and a key it may see is covered once, and merges find every partial row.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "allocations.h"
#include "attention/mask.h"
#include "attention/mask_stretches.h"
#include "attention/shared_batch.h"

namespace imbrex {
namespace {

using test::expect_same_work, test::kBlock, test::policy_of, test::policy_with_runs, test::SharedBatch;

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
    const SharePolicy share{.block_size = kBlock,
                            .most_tokens = policy.tile_q,
                            .overhead_keys = kShareWherever,
                            .seen_by_all = true,
                            .windows = windows_of(mask)};
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

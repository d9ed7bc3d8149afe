// share_prefixes(): random batches of neighbours that begin with the same blocks.
#include "attention/shared_prefixes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace imbrex {
namespace {

constexpr int kPrefixBlockSize = 16;

int draw_below(std::mt19937_64& random, int end) { return int(random() % uint64_t(end)); }

// PrefixBatch whose block ids follow a tree: each goes on from one before it, or begins anew.
struct PrefixBatch {
  std::vector<int32_t> starts{0}, lens, table;
  int width = 0;
  Batch batch;
  KeySource keys;

  void finish() {
    batch.query_start_loc = starts, batch.seq_lens = lens;
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {int64_t(lens.size()), width});
    find_keys(batch, keys);
  }
};

PrefixBatch random_prefix_batch(std::mt19937_64& random, int most_q) {
  PrefixBatch made;
  const int count = draw_below(random, 40) + 1;
  made.width = 200;
  int next_id = 1;
  for (int r = 0; r < count; ++r) {
    const bool other = draw_below(random, 6) == 0;  // of another list, or padded
    const int q_len = other ? (draw_below(random, 3) == 0 ? 0 : most_q + 3) : 1 + draw_below(random, most_q);
    const int len = q_len == 0 ? 0 : q_len + draw_below(random, draw_below(random, 3) == 0 ? 900 : 3100);
    made.starts.push_back(made.starts.back() + q_len), made.lens.push_back(len);
    const int same = r == 0 ? 0 : draw_below(random, 5) == 0 ? 0 : 20 + draw_below(random, made.width - 20);
    for (int b = 0; b < made.width; ++b) made.table.push_back(b < same ? made.table[made.table.size() - size_t(made.width)] : next_id++);
  }
  return made;
}

PrefixPolicy prefix_policy(int tile_q, int most_q) {
  return {.block_size = kPrefixBlockSize,
          .tile_q = tile_q,
          .tile_kv = 64,
          .num_workers = 9,
          .split_cost = 128,
          .max_q = most_q,
          .first_partial = 5,
          .most_work = 1000,
          .most_merges = 1000,
          .most_parts = 10000,
          .most_partial_rows = 10000};
}

// Each query's keys are in the parts of its merge, or in the item of its output, once and in order, and rows have one writer each.
void expect_keys_once(const PrefixBatch& all, const PrefixPolicy& policy, const Schedule& list) {
  struct Written {
    const WorkItem* item;
    int token;
  };
  std::map<int, Written> rows;
  std::map<int, const WorkItem*> outputs;
  for (const WorkItem& item : list.work) {
    const int tokens = item.q_end - item.q_begin;
    EXPECT_LE(tokens, policy.tile_q);
    EXPECT_EQ(item.kv_begin % policy.tile_kv, 0);
    EXPECT_LT(item.kv_begin, item.kv_end);
    for (int t = 0; t < tokens; ++t) {
      if (item.partial < 0) {
        EXPECT_TRUE(outputs.emplace(item.q_begin + t, &item).second);
      } else {
        EXPECT_TRUE(rows.emplace(item.partial + t, Written{&item, item.q_begin + t}).second);
      }
    }
  }
  EXPECT_EQ(int(rows.size()), list.num_partial_rows);
  if (!rows.empty()) {
    EXPECT_EQ(rows.begin()->first, policy.first_partial);
    EXPECT_EQ(rows.rbegin()->first, policy.first_partial + list.num_partial_rows - 1);
  }
  std::map<int, int> merge_of;
  for (size_t m = 0; m < list.merges.size(); ++m)
    for (int t = list.merges[m].q_begin; t < list.merges[m].q_end; ++t) merge_of[t] = int(m);
  for (const auto& [row, written] : rows) EXPECT_TRUE(merge_of.contains(written.token)) << "a query of another list";
  for (int r = 0; r < all.batch.num_reqs(); ++r) {
    const int q_len = all.batch.query_len(r);
    const bool taken = q_len > 0 && q_len <= policy.max_q;
    for (int t = all.starts[size_t(r)]; t < all.starts[size_t(r) + 1]; ++t) {
      EXPECT_EQ(outputs.count(t) + merge_of.count(t), taken ? 1u : 0u);
      if (!taken) continue;
      int end = 0;
      const auto expect_next = [&](const WorkItem& item) {
        EXPECT_EQ(item.kv_begin, end);
        end = item.kv_end;
        const int32_t *const own = all.keys.ids_of(r), *const read = all.keys.ids_of(item.table);
        for (int key = item.kv_begin; key < item.kv_end; key += kPrefixBlockSize)
          EXPECT_EQ(own[key / kPrefixBlockSize], read[key / kPrefixBlockSize]);
        const int seen_by_all = all.lens[size_t(r)] - q_len + 1;
        EXPECT_LE(item.kv_end, item.table != r ? seen_by_all : all.lens[size_t(r)]);
      };
      if (outputs.count(t) > 0) {
        expect_next(*outputs.at(t));
      } else {
        const MergeItem& merge = list.merges[size_t(merge_of.at(t))];
        for (int split = 0; split < merge.num_splits; ++split) {
          const auto found = rows.find(list.details.parts[size_t(merge.first_partial + split)] + t - merge.q_begin);
          ASSERT_NE(found, rows.end());
          EXPECT_EQ(found->second.token, t);
          expect_next(*found->second.item);
        }
      }
      EXPECT_EQ(end, all.lens[size_t(r)]);
    }
  }
}

TEST(SharedPrefixes, EveryQueryReadsItsKeysOnce) {
  std::mt19937_64 random(11);
  PrefixScratch scratch;
  int taken = 0, levels = 0, left = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const int most_q = 1 + trial % 4;
    PrefixBatch all = random_prefix_batch(random, most_q);
    all.finish();
    const PrefixPolicy policy = prefix_policy(std::max(most_q, 1 + trial % 17), most_q);
    Schedule list;
    list.num_work = -7;
    if (!share_prefixes(all.batch, all.keys, policy, list, scratch)) {
      EXPECT_EQ(list.num_work, -7);
      ++left;
      continue;
    }
    ++taken;
    EXPECT_EQ(list.num_work, int(list.work.size()));
    EXPECT_TRUE(std::ranges::is_sorted(list.work, std::greater{}, [](const WorkItem& w) { return w.kv_end - w.kv_begin; }));
    expect_keys_once(all, policy, list);
    for (const MergeItem& merge : list.merges) levels += merge.num_splits > 3;
  }
  EXPECT_GT(taken, 60);
  EXPECT_GT(levels, 60);
  EXPECT_GT(left, 20);
}

// A system prompt of 8192 tokens in front of 64 requests is read once for each tile of them.
TEST(SharedPrefixes, APromptOfAllIsReadOnceForATile) {
  PrefixBatch all;
  all.width = 520;
  int next_id = 1000;
  for (int r = 0; r < 64; ++r) {
    all.starts.push_back(r + 1), all.lens.push_back(8292);
    for (int b = 0; b < all.width; ++b) all.table.push_back(b < 512 ? b : next_id++);
  }
  all.finish();
  Schedule list;
  PrefixScratch scratch;
  PrefixPolicy policy = prefix_policy(16, 4);
  ASSERT_TRUE(share_prefixes(all.batch, all.keys, policy, list, scratch));
  int64_t keys = 0;
  for (const WorkItem& item : list.work) keys += item.kv_end - item.kv_begin;
  EXPECT_EQ(keys, 4 * 8192 + 64 * 100);
  expect_keys_once(all, policy, list);
  // Without room for its rows, merges, parts or items there is no such list, nor where it has to be shorter still: it has 8.9 % of the
  // keys.
  for (const auto& less : std::initializer_list<void (*)(PrefixPolicy&)>{
           [](PrefixPolicy& p) { p.most_work = 70; }, [](PrefixPolicy& p) { p.most_merges = 63; },
           [](PrefixPolicy& p) { p.most_parts = 100; }, [](PrefixPolicy& p) { p.most_partial_rows = 196; },
           [](PrefixPolicy& p) { p.most_percent = 8; }}) {
    policy = prefix_policy(16, 4);
    less(policy);
    EXPECT_FALSE(share_prefixes(all.batch, all.keys, policy, list, scratch));
  }
  policy = prefix_policy(16, 4);
  policy.most_percent = 9;
  EXPECT_TRUE(share_prefixes(all.batch, all.keys, policy, list, scratch));
  all.lens[7] = 0;  // of an encoder that has seen nothing
  EXPECT_FALSE(share_prefixes(all.batch, all.keys, policy, list, scratch));
}

}  // namespace
}  // namespace imbrex

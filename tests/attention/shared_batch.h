#pragma once
// Random batches of requests that begin with the same blocks, and what a list of items that they share has to be.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "attention/random_lengths.h"
#include "attention/shared_keys.h"

namespace imbrex::test {

constexpr int kBlock = 16;

// Requests whose first blocks are those of one of a few stems, for some way; then each has blocks of its own.
struct SharedBatch : Lengths {
  std::vector<int32_t> table;
  int width = 0, next_id = 0;
  KeySource keys;
  Batch batch;

  SharedBatch(Random& random, int num_reqs, int longest) : width((longest + kBlock - 1) / kBlock) {
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

inline SchedulePolicy policy_of(Random& random) {
  return {.tile_q = random.of({4, 16, 64}),
          .tile_kv = 32,
          .split_kv = random.of({64, 128}),
          .split_max_q = 4,
          .num_workers = random.of({1, 1, 2, 5})};
}

// Checks that each token has the same pieces in both lists, that every item's keys are its tokens' own, and that merges find every partial
// row.
inline void expect_same_work(const SharedBatch& b, const Schedule& plain, const Schedule& shared) {
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

// Lists with runs of pieces, as GPUs have them.
inline SchedulePolicy policy_with_runs(Random& random) {
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

}  // namespace imbrex::test

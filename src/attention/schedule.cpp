// Cuts a batch into work items and merges, longest first. Pure arithmetic, shared by every softmax backend.
#include "imbrex/schedule.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "attention/balance.h"
#include "attention/cut_rules.h"
#include "attention/draft_tree.h"
#include "attention/item_order.h"
#include "attention/mask.h"
#include "core/check.h"

namespace imbrex {
namespace {

constexpr int kMaxTile = 1 << 20;  // far beyond any kernel; keeps sums of tiles within an int

// Positions of query tokens [t0, t1) of request r.
PositionRange positions_of(const Batch& batch, const Mask& mask, int r, int t0, int t1) {
  if (mask.tree) return tree_positions(batch, r, t0, t1);
  if (!mask.positions) return usual_positions(batch.query_len(r), batch.seq_lens[r], t0, t1);
  return given_positions(batch.positions.data() + batch.query_start_loc[r] + t0, t1 - t0);
}

// Counts the partial rows of a list whose pieces become runs of such lengths. They are only counted where there is a limit.
int64_t rows_of_runs(const CutRules& rules, std::span<const CutItem> items, const RunLengths& lengths) {
  int64_t rows = 0;
  int number = 0;
  for (CutItem item : rules.most_partial_rows > 0 ? items : std::span<const CutItem>()) {
    make_runs(rules, item, longest_run(lengths, number++));
    rows += partial_rows(item);
  }
  return rows;
}

// Calls visit(bucket, count, first) for the splits of an item that go to the same bucket. Where items have places, buckets are equal parts
// of a share, and all splits but the first begin one.
template <class Visit>
void for_splits(const Schedule& list, const CutItem& item, const Visit& visit) {
  for (int kind = 0; kind < (item.num_splits > 1 ? kSplitKinds : 1); ++kind) {
    EqualSplits equal = equal_splits(item, kind, list.cost_by_keys);
    if (!list.places.empty()) {
      const int64_t place = kind == 0 ? list.places[size_t(&item - list.items.data())] : 0;
      equal.bucket = int(place * (kCostBuckets - 1) / list.share);
    }
    visit(equal.bucket, equal.count, equal.first);
  }
}

}  // namespace

CutRules cut_rules(const Mask& mask, const SchedulePolicy& policy) {
  return {.tile_q = policy.tile_q,
          .tile_kv = policy.tile_kv,
          .split_kv = policy.split_kv,
          .split_max_q = policy.split_max_q,
          .max_splits = policy.max_splits,
          .share_splits = policy.share_splits,
          .longest_kv = policy.longest_kv,
          .max_split_rows = policy.max_split_rows,
          .split_kv_each = policy.split_kv_each,
          .min_q = policy.min_q,
          .max_q = policy.max_q,
          .num_workers = policy.num_workers,
          .items_each = policy.items_each,
          .workers_each = policy.workers_each,
          .most_in_run = policy.most_in_run,
          .most_partial_rows = policy.most_partial_rows,
          .causal = mask.causal,
          .runs = policy.runs && policy.max_splits > 0 && !policy.balanced,
          .few_splits = policy.few_splits,
          .cost_by_keys = policy.cost_by_keys,
          .window_left = mask.window_left,
          .window_right = mask.window_right,
          .chunk = mask.chunk,
          .chunk_before = lookback_tokens(mask)};
}

void cut(const Batch& batch, const Mask& mask, const SchedulePolicy& policy, Schedule& out, const SeenKeys& seen) {
  check(policy.tile_q > 0 && policy.tile_kv > 0 && policy.tile_q <= kMaxTile && policy.tile_kv <= kMaxTile, "schedule.tile",
        "tiles must be 1 to {}, got {} x {}", kMaxTile, policy.tile_q, policy.tile_kv);
  check(policy.split_kv > 0 && policy.split_kv % policy.tile_kv == 0, "schedule.split_kv",
        "split_kv must be a positive multiple of tile_kv {}, got {}", policy.tile_kv, policy.split_kv);
  out.merges.clear();
  out.items.clear();
  out.details.clear();
  out.num_work = 0;
  out.cost_by_keys = policy.cost_by_keys;
  CutRules rules = cut_rules(mask, policy);
  if (policy.balanced) rules.split_max_q = 0;  // items stay whole at first

  Load load;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int q_len = batch.query_len(r);
    if (!is_cut(rules, q_len)) continue;
    for (int t0 = last_tile(rules, q_len); t0 >= 0; t0 -= policy.tile_q) {
      CutItem& item = out.items.emplace_back();
      const PositionRange queries = positions_of(batch, mask, r, t0, tile_end(rules, q_len, t0));
      const KeyStretch of_tile = seen ? seen(r, t0) : KeyStretch{.begin = 0, .end = batch.seq_lens[r], .shown = 0};
      cut_item(rules, r, batch.query_start_loc[r], q_len, batch.seq_lens[r], t0, queries, {of_tile.begin, of_tile.end}, item);
      add_item(load, item, q_len);
    }
  }
  out.places.clear();
  if (policy.balanced) balance(batch, policy, out);
  RunLengths lengths = run_lengths(rules, load);
  while (lengthen(rules, load, policy.first_partial + rows_of_runs(rules, out.items, lengths), lengths)) {
  }
  int rows = policy.first_partial, number = 0;
  for (CutItem& item : out.items) {
    make_runs(rules, item, longest_run(lengths, number++));
    out.num_work += item.num_splits;
    if (item.num_splits == 1) continue;
    item.whole.partial = rows;
    item.whole.merge = int(out.merges.size());
    out.merges.push_back(merge_of(item));
    rows += int(partial_rows(item));
  }
  out.num_partial_rows = rows - policy.first_partial;
}

void write_work(const Schedule& schedule, WorkItem* to) {
  if (schedule.items.empty()) return;
  std::array<int, kCostBuckets + 1> start{};
  for (const CutItem& item : schedule.items) {
    for_splits(schedule, item, [&](int bucket, int count, int) { start[bucket + 1] += count; });
  }
  for (size_t i = 1; i < start.size(); ++i) start[i] += start[i - 1];
  for (const CutItem& item : schedule.items) {
    for_splits(schedule, item, [&](int bucket, int count, int first) {
      WorkItem* at = to + start[bucket];
      start[bucket] += count;
      if (count == 0) return;
      WorkItem split = split_of(item, first);
      at[0] = split;
      for (int i = 1; i < count; ++i) {  // equal ones
        split.kv_begin += item.split, split.kv_end += item.split, split.partial += split.q_end - split.q_begin;
        at[i] = split;
      }
    });
  }
}

namespace {

// Keys of an item that are computed.
int keys_of(const ListDetails& details, const WorkItem& item) {
  const int number = ~item.piece;
  if (number < 0 || details.items[size_t(number)].num_stretches < 0) return item.kv_end - item.kv_begin;
  const ItemDetails& own = details.items[size_t(number)];
  int keys = 0;
  for (int i = own.first_stretch; i < own.first_stretch + own.num_stretches; ++i)
    keys += details.stretches[size_t(i)].end - details.stretches[size_t(i)].begin;
  return keys;
}

}  // namespace

void order_items(Schedule& list) {
  const auto bucket = [&](const WorkItem& item) {
    return cost_bucket(list.cost_by_keys ? 1 : item.q_end - item.q_begin, keys_of(list.details, item));
  };
  // Counting leaves `rank` where each item goes; a cycle at a time is then moved into place.
  static thread_local std::vector<int> rank;  // kept, so that a warm call allocates nothing
  std::array<int, kCostBuckets + 1> start{};
  rank.resize(list.work.size());
  for (size_t i = 0; i < list.work.size(); ++i) ++start[size_t(rank[i] = bucket(list.work[i])) + 1];
  for (size_t i = 1; i < start.size(); ++i) start[i] += start[i - 1];
  for (int& place : rank) place = start[size_t(place)]++;
  for (size_t i = 0; i < list.work.size(); ++i)
    while (rank[i] != int(i)) {
      const size_t to = size_t(rank[i]);
      std::swap(list.work[i], list.work[to]);
      std::swap(rank[i], rank[to]);
    }
}

void schedule(const Batch& batch, const Mask& mask, const SchedulePolicy& policy, Schedule& out) {
  cut(batch, mask, policy, out);
  out.work.resize(size_t(out.num_work));
  write_work(out, out.work.data());
}

namespace {

struct QueryRange {
  int64_t least, most;  // query tokens of the requests that are cut; none when least > most
};
QueryRange cut_queries(const SchedulePolicy& policy, const PlanLimits& limits) {
  const int longest = limits.max_query_len > 0 ? limits.max_query_len : INT32_MAX;
  return {std::max({policy.min_q, limits.min_query_len, 1}), std::min({limits.max_num_tokens, policy.max_q, longest})};
}

bool limits_rows(const SchedulePolicy& policy) {
  return policy.runs && !policy.balanced && policy.max_splits > 0 && policy.most_partial_rows > 0;
}

int64_t tiles_of(const SchedulePolicy& policy, int64_t q) { return (q + policy.tile_q - 1) / policy.tile_q; }

// The most merges, additional items and partial rows that splitting makes of one request.
struct Splits {
  int64_t merges = 0, extra_items = 0, partial_rows = 0, pieces = 0;  // pieces: of an item
  int64_t least_rows = 0;                                             // of partial_rows, where runs are as long as they can be
};
Splits most_splits(const SchedulePolicy& policy, const PlanLimits& limits) {
  const auto [least, most] = cut_queries(policy, limits);
  const CutRules rules = cut_rules({}, policy);
  Splits splits;
  for (int64_t q = least; q <= std::min<int64_t>(policy.split_max_q, most); ++q) {
    const int allowed = most_pieces(rules, int(q)), longest = std::max(limits.max_seq_len, 1);
    const int64_t pieces =
        allowed < kAnyNumber ? even_pieces(rules, int(q), longest, allowed) : (longest - 1) / least_keys(rules, int(q)) + 1;
    if (pieces < 2) continue;
    splits.merges = std::max(splits.merges, tiles_of(policy, q));
    splits.extra_items = std::max(splits.extra_items, tiles_of(policy, q) * (pieces - 1));
    splits.partial_rows = std::max(splits.partial_rows, q * pieces);
    splits.pieces = std::max(splits.pieces, pieces);
    if (pieces > policy.most_in_run) splits.least_rows = std::max(splits.least_rows, q * ((pieces - 1) / policy.most_in_run + 1));
  }
  return splits;
}

}  // namespace

ScheduleBounds schedule_bounds(const SchedulePolicy& policy, const PlanLimits& limits) {
  const auto [least, most] = cut_queries(policy, limits);
  if (least > most || limits.max_num_reqs <= 0) return {};
  const int64_t tokens = limits.max_num_tokens, requests = std::min<int64_t>(limits.max_num_reqs, tokens / least);
  // The most items of all requests together: each request has at most one tile that is not full.
  const int64_t items = std::min({tokens, requests * tiles_of(policy, most), requests + tokens / policy.tile_q});
  if (policy.balanced) {  // every piece but the last of an item is a worker's share
    const int64_t workers = std::max(policy.num_workers, 1), split_q = std::min<int64_t>(policy.split_max_q, most);
    if (split_q < least) return {.num_work = items};
    const int64_t merges = std::min(requests * tiles_of(policy, split_q), items);
    return {.num_work = items + workers,
            .num_merges = merges,
            .num_partial_rows = std::min<int64_t>(policy.tile_q, split_q) * (merges + workers)};
  }
  const Splits splits = most_splits(policy, limits);
  ScheduleBounds bounds{.num_work = items + requests * splits.extra_items,
                        .num_merges = std::min(requests * splits.merges, items),
                        .num_partial_rows = std::min(requests * splits.partial_rows, tokens * splits.pieces)};
  if (policy.runs && policy.few_splits) {
    const int64_t most =
        int64_t(most_splits_each(policy.split_kv_each > 0)) * std::max(policy.num_workers, 1);  // of items with tile_q query tokens
    bounds.num_work = std::min(bounds.num_work, items + most * policy.items_each);
    bounds.num_partial_rows = std::min(bounds.num_partial_rows, most * policy.tile_q);
  }
  if (limits_rows(policy))
    bounds.num_partial_rows = std::min(bounds.num_partial_rows, std::max<int64_t>(policy.most_partial_rows, requests * splits.least_rows));
  return bounds;
}

int64_t partial_rows_bound(std::span<const SchedulePolicy> policies, const PlanLimits& limits) {
  int64_t sum = 0, rows = 0, pieces = 0;              // of lists without a limit of rows
  int64_t limited = 0, last_end = 0, least_rows = 0;  // of those with one, which counts from the first row of all
  bool balanced = false;
  for (const SchedulePolicy& policy : policies) {
    const Splits splits = most_splits(policy, limits);
    const int64_t most = schedule_bounds(policy, limits).num_partial_rows;
    if (limits_rows(policy)) {
      limited += most;
      last_end = std::max<int64_t>(last_end, policy.most_partial_rows);
      least_rows += std::max(limits.max_num_reqs, 0) * splits.least_rows;
      continue;
    }
    sum += most;
    rows = std::max(rows, splits.partial_rows);
    pieces = std::max(pieces, splits.pieces);
    balanced = balanced || policy.balanced;
  }
  limited = std::min(limited, last_end + least_rows);
  if (balanced) return limited + sum;
  return limited + std::min({sum, std::max(limits.max_num_reqs, 0) * rows, std::max(limits.max_num_tokens, 0) * pieces});
}

}  // namespace imbrex

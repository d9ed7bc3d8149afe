// Cuts a batch into work items and merges, longest first. Pure arithmetic, shared by every softmax backend.
#include "imbrex/schedule.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "core/check.h"

namespace imbrex {
namespace {

constexpr int kMaxTile = 1 << 20;  // far beyond any kernel; keeps sums of tiles within an int

struct KeyRange {
  int begin, end;
};

// Keys that at least one of the queries at positions [first, last] may see by causality, window and chunk.
KeyRange visible_keys(const Mask& mask, int first, int last, int seq_len) {
  int64_t begin = 0, end = seq_len;
  if (mask.causal) end = std::min<int64_t>(end, int64_t(last) + 1);
  if (mask.window_right >= 0) end = std::min<int64_t>(end, int64_t(last) + mask.window_right + 1);
  if (mask.window_left >= 0) begin = std::max<int64_t>(begin, int64_t(first) - mask.window_left);
  if (mask.chunk > 0) {
    begin = std::max<int64_t>(begin, int64_t(std::max(first, 0)) / mask.chunk * mask.chunk);
    end = std::min<int64_t>(end, (int64_t(std::max(last, 0)) / mask.chunk + 1) * mask.chunk);
    if (last < 0) end = 0;
  }
  if (begin >= end) return {0, 0};
  return {int(begin), int(end)};
}

// Position of an item in the order "longest first": a logarithm with three fractional bits, so that one pass sorts.
constexpr int kBuckets = 512;
int cost_bucket(int num_queries, int num_keys) {
  const uint64_t cost = (uint64_t(num_keys) + 64) * uint64_t(num_queries);
  const int log2 = 63 - std::countl_zero(cost | 8);
  return kBuckets - 1 - ((log2 << 3) | int((cost >> (log2 - 3)) & 7));
}

// Calls visit(bucket, count, first) for the pieces of an item that cost the same: `first` is the number of the first of them.
template <class Visit>
void for_pieces(const CutItem& item, const Visit& visit) {
  const WorkItem& w = item.whole;
  const int queries = w.q_end - w.q_begin, last = item.num_pieces - 1;
  if (last == 0) return visit(cost_bucket(queries, w.kv_end - w.kv_begin), 1, 0);
  visit(cost_bucket(queries, item.first_end - w.kv_begin), 1, 0);
  if (last > 1) visit(cost_bucket(queries, item.piece), last - 1, 1);
  visit(cost_bucket(queries, w.kv_end - item.first_end - (last - 1) * item.piece), 1, last);
}

WorkItem piece_of(const CutItem& item, int index) {
  WorkItem w = item.whole;
  if (index > 0) w.kv_begin = item.first_end + (index - 1) * item.piece;
  if (index + 1 < item.num_pieces) w.kv_end = item.first_end + index * item.piece;
  if (w.partial >= 0) w.partial += index * (w.q_end - w.q_begin);
  return w;
}

// What an item of query tokens [t0, t1) of request r reads: the visible keys, from the beginning of a tile.
KeyRange item_keys(const Batch& batch, const Mask& mask, int tile_kv, int r, int t0, int t1) {
  const int seq_len = batch.seq_lens[r], context = seq_len - batch.query_len(r);
  const KeyRange keys = visible_keys(mask, context + t0, context + t1 - 1, seq_len);
  return {keys.begin / tile_kv * tile_kv, keys.end};
}

bool is_cut(const SchedulePolicy& policy, int q_len) { return q_len >= policy.min_q && q_len <= policy.max_q; }

// Pieces an item of a request with q_len query tokens may have; INT_MAX: as many as there are.
int most_pieces(const SchedulePolicy& policy, int q_len) {
  if (policy.max_splits <= 0) return INT32_MAX;
  return std::clamp(policy.max_split_rows / std::max(q_len, 1), 1, policy.max_splits);
}

// Keys of a piece: split_kv, grown with the query tokens. Where an item has `pieces` at most, an equal share of its keys comes on top, so
// that long items have longer pieces rather than as many as there may be. 0: one piece.
int64_t piece_keys(const SchedulePolicy& policy, int q_len, KeyRange keys, int pieces) {
  const int64_t least = int64_t(policy.split_kv) * std::clamp(q_len, 1, std::max(policy.growth, 1));
  if (pieces == INT32_MAX) return least;
  if (keys.begin > 0) --pieces;  // boundaries are multiples of the piece, so that the first and the last one may both be short
  if (pieces <= 1) return 0;
  const int64_t share = (int64_t(keys.end) - keys.begin + pieces - 1) / pieces;
  return least + (share + policy.tile_kv - 1) / policy.tile_kv * policy.tile_kv;
}

// Keys a piece may have when the load is balanced: the keys of all items that may be split, spread over the workers in whole tiles.
int balanced_piece(const Batch& batch, const Mask& mask, const SchedulePolicy& policy) {
  int64_t keys = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int q_len = batch.query_len(r);
    if (q_len > policy.split_max_q || !is_cut(policy, q_len)) continue;
    for (int t0 = 0; t0 < q_len; t0 += policy.tile_q) {
      const KeyRange range = item_keys(batch, mask, policy.tile_kv, r, t0, std::min(q_len, t0 + policy.tile_q));
      keys += range.end - range.begin;
    }
  }
  const int64_t share = keys / std::max(policy.num_workers, 1) + 1;
  const int64_t tiles = std::clamp<int64_t>((share + policy.tile_kv - 1) / policy.tile_kv, 2, 1 << 20);
  return int(std::min<int64_t>(tiles * policy.tile_kv, INT32_MAX / 2 / policy.tile_kv * policy.tile_kv));
}

}  // namespace

void cut(const Batch& batch, const Mask& mask, const SchedulePolicy& policy, Schedule& out) {
  check(policy.tile_q > 0 && policy.tile_kv > 0 && policy.tile_q <= kMaxTile && policy.tile_kv <= kMaxTile, "schedule.tile",
        "tiles must be 1 to {}, got {} x {}", kMaxTile, policy.tile_q, policy.tile_kv);
  check(policy.split_kv > 0 && policy.split_kv % policy.tile_kv == 0, "schedule.split_kv",
        "split_kv must be a positive multiple of tile_kv {}, got {}", policy.tile_kv, policy.split_kv);
  out.merges.clear();
  out.items.clear();
  out.num_work = 0;
  int rows = policy.first_partial;
  const int balanced = policy.balanced ? balanced_piece(batch, mask, policy) : 0;

  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int q_len = batch.query_len(r);
    if (!is_cut(policy, q_len)) continue;
    const int q0 = batch.query_start_loc[r];
    const int pieces = q_len <= policy.split_max_q ? most_pieces(policy, q_len) : 1;
    for (int t0 = 0; t0 < q_len; t0 += policy.tile_q) {
      const int t1 = std::min(q_len, t0 + policy.tile_q);
      const KeyRange keys = item_keys(batch, mask, policy.tile_kv, r, t0, t1);
      const auto [begin, end] = keys;
      const int origin = policy.balanced ? begin : 0;  // equal pieces, or boundaries that a growing context does not move
      const int64_t piece = pieces == 1 ? 0 : policy.balanced ? balanced : piece_keys(policy, q_len, keys, pieces);
      const int64_t first = piece == 0 ? 0 : (begin - origin) / piece;
      int64_t last = piece > 0 && end > begin ? (end - origin - 1) / piece : first;
      // A short last piece is not worth a partial result of its own.
      if (policy.max_splits > 0 && !policy.balanced && last > first && end - last * piece < piece / 2) --last;
      CutItem item{.whole = {.request = r, .q_begin = q0 + t0, .q_end = q0 + t1, .kv_begin = begin, .kv_end = end, .partial = -1}};
      if (last > first) {
        item.num_pieces = int(last - first + 1);
        item.first_end = int(origin + (first + 1) * piece);
        item.piece = int(piece);
        item.whole.partial = rows;
        item.whole.merge = int(out.merges.size());
        out.merges.push_back({item.whole.q_begin, item.whole.q_end, rows, item.num_pieces});
        rows += item.num_pieces * (t1 - t0);
      }
      out.num_work += item.num_pieces;
      out.items.push_back(item);
    }
  }
  out.num_partial_rows = rows - policy.first_partial;
}

void write_work(const Schedule& schedule, WorkItem* to) {
  if (schedule.items.empty()) return;
  std::array<int, kBuckets + 1> start{};
  for (const CutItem& item : schedule.items) for_pieces(item, [&](int bucket, int count, int) { start[bucket + 1] += count; });
  for (size_t i = 1; i < start.size(); ++i) start[i] += start[i - 1];
  for (const CutItem& item : schedule.items) {
    for_pieces(item, [&](int bucket, int count, int first) {
      WorkItem* at = to + start[bucket];
      start[bucket] += count;
      for (int i = 0; i < count; ++i) at[i] = piece_of(item, first + i);
    });
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
  return {std::max(policy.min_q, 1), std::min({limits.max_num_tokens, policy.max_q, longest})};
}

int64_t tiles_of(const SchedulePolicy& policy, int64_t q) { return (q + policy.tile_q - 1) / policy.tile_q; }

// The most that splitting makes of one request.
struct Splits {
  int64_t merges = 0, extra_items = 0, partial_rows = 0, pieces = 0;  // pieces: of an item
};
Splits most_splits(const SchedulePolicy& policy, const PlanLimits& limits) {
  const auto [least, most] = cut_queries(policy, limits);
  Splits splits;
  for (int64_t q = least; q <= std::min<int64_t>(policy.split_max_q, most); ++q) {
    const int64_t piece = int64_t(policy.split_kv) * std::min<int64_t>(q, std::max(policy.growth, 1));
    const int64_t pieces = std::min<int64_t>(most_pieces(policy, int(q)), (std::max(limits.max_seq_len, 1) - 1) / piece + 1);
    if (pieces < 2) continue;
    splits.merges = std::max(splits.merges, tiles_of(policy, q));
    splits.extra_items = std::max(splits.extra_items, tiles_of(policy, q) * (pieces - 1));
    splits.partial_rows = std::max(splits.partial_rows, q * pieces);
    splits.pieces = std::max(splits.pieces, pieces);
  }
  return splits;
}

}  // namespace

ScheduleBounds schedule_bounds(const SchedulePolicy& policy, const PlanLimits& limits) {
  const auto [least, most] = cut_queries(policy, limits);
  if (least > most || limits.max_num_reqs <= 0) return {};
  const int64_t tokens = limits.max_num_tokens, requests = std::min<int64_t>(limits.max_num_reqs, tokens / least);
  // Of all requests together: each has at most one tile that is not full.
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
  return {.num_work = items + requests * splits.extra_items,
          .num_merges = std::min(requests * splits.merges, items),
          .num_partial_rows = std::min(requests * splits.partial_rows, tokens * splits.pieces)};
}

int64_t partial_rows_bound(std::span<const SchedulePolicy> policies, const PlanLimits& limits) {
  int64_t sum = 0, rows = 0, pieces = 0;
  bool balanced = false;
  for (const SchedulePolicy& policy : policies) {
    const Splits splits = most_splits(policy, limits);
    sum += schedule_bounds(policy, limits).num_partial_rows;
    rows = std::max(rows, splits.partial_rows);
    pieces = std::max(pieces, splits.pieces);
    balanced = balanced || policy.balanced;
  }
  if (balanced) return sum;
  return std::min({sum, std::max(limits.max_num_reqs, 0) * rows, std::max(limits.max_num_tokens, 0) * pieces});
}

}  // namespace imbrex

// Cuts a batch into work items and merges, longest first. Pure arithmetic, shared by every softmax backend.
#include "imbrex/schedule.h"

#include <algorithm>
#include <array>
#include <bit>

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
int cost_bucket(const WorkItem& w) {
  const uint64_t cost = uint64_t(w.kv_end - w.kv_begin + 64) * uint64_t(w.q_end - w.q_begin);
  const int log2 = 63 - std::countl_zero(cost | 8);
  return 511 - ((log2 << 3) | int((cost >> (log2 - 3)) & 7));
}

void sort_longest_first(std::vector<WorkItem>& from, std::vector<WorkItem>& to) {
  std::array<int, 513> start{};
  for (const WorkItem& w : from) ++start[cost_bucket(w) + 1];
  for (size_t i = 1; i < start.size(); ++i) start[i] += start[i - 1];
  to.resize(from.size());
  for (const WorkItem& w : from) to[start[cost_bucket(w)]++] = w;
}

// What an item of query tokens [t0, t1) of request r reads: the visible keys, from the beginning of a tile.
KeyRange item_keys(const Batch& batch, const Mask& mask, int tile_kv, int r, int t0, int t1) {
  const int seq_len = batch.seq_lens[r], context = seq_len - batch.query_len(r);
  const KeyRange keys = visible_keys(mask, context + t0, context + t1 - 1, seq_len);
  return {keys.begin / tile_kv * tile_kv, keys.end};
}

// Keys a piece may have when the load is balanced: the keys of all items that may be split, spread over the workers in whole tiles.
int balanced_piece(const Batch& batch, const Mask& mask, const SchedulePolicy& policy) {
  int64_t keys = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int q_len = batch.query_len(r);
    if (q_len > policy.split_max_q) continue;
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

void schedule(const Batch& batch, const Mask& mask, const SchedulePolicy& policy, Schedule& out) {
  check(policy.tile_q > 0 && policy.tile_kv > 0 && policy.tile_q <= kMaxTile && policy.tile_kv <= kMaxTile, "schedule.tile",
        "tiles must be 1 to {}, got {} x {}", kMaxTile, policy.tile_q, policy.tile_kv);
  check(policy.split_kv > 0 && policy.split_kv % policy.tile_kv == 0, "schedule.split_kv",
        "split_kv must be a positive multiple of tile_kv {}, got {}", policy.tile_kv, policy.split_kv);
  out.merges.clear();
  out.num_partial_rows = 0;
  std::vector<WorkItem>& items = out.unsorted;
  items.clear();
  const int split_kv = policy.balanced ? balanced_piece(batch, mask, policy) : policy.split_kv;

  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int q_len = batch.query_len(r);
    const int q0 = batch.query_start_loc[r];
    const bool may_split = q_len <= policy.split_max_q;
    for (int t0 = 0; t0 < q_len; t0 += policy.tile_q) {
      const int t1 = std::min(q_len, t0 + policy.tile_q);
      const auto [begin, end] = item_keys(batch, mask, policy.tile_kv, r, t0, t1);
      const int origin = policy.balanced ? begin : 0;  // equal pieces, or boundaries that a growing context does not move
      const int first = (begin - origin) / split_kv, last = end > begin ? (end - origin - 1) / split_kv : first;
      WorkItem item{.request = r, .q_begin = q0 + t0, .q_end = q0 + t1, .kv_begin = begin, .kv_end = end, .partial = -1};
      if (!may_split || first == last) {
        items.push_back(item);
        continue;
      }
      out.merges.push_back({item.q_begin, item.q_end, out.num_partial_rows, last - first + 1});
      for (int s = first; s <= last; ++s) {
        item.kv_begin = std::max(begin, origin + s * split_kv);
        item.kv_end = std::min<int64_t>(end, origin + (int64_t(s) + 1) * split_kv);
        item.partial = out.num_partial_rows;
        out.num_partial_rows += t1 - t0;
        items.push_back(item);
      }
    }
  }
  sort_longest_first(items, out.work);
}

}  // namespace imbrex

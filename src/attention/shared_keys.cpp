// See shared_keys.h.
#include "attention/shared_keys.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <tuple>

#include "attention/item_order.h"
#include "attention/mask.h"

namespace imbrex {
namespace {

using Piece = ShareScratch::Piece;

class Sharing {
 public:
  Sharing(const Batch& batch, const KeySource& keys, const SharePolicy& policy, Schedule& schedule, ShareScratch& scratch)
      : batch_(batch), keys_(keys), policy_(policy), list_(schedule), s_(scratch) {}

  void run() {
    collect();
    if (s_.pieces.size() < 2 || !group(most_tokens())) return;
    number_parts();
    make_items();
    order_items(list_);
  }

 private:
  // The pieces that could be shared, those of the same keys next to each other.
  void collect() {
    s_.pieces.clear();
    for (size_t i = 0; i < list_.work.size(); ++i) {
      const WorkItem& item = list_.work[i];
      if (item.partial < 0 || item.piece < 0 || 2 * num_queries(item) > policy_.most_tokens || item.kv_begin >= item.kv_end) continue;
      if (policy_.seen_by_all && !is_seen_by_all(item)) continue;
      const int32_t* const ids = keys_.ids_of(item.table);
      const int block_size = policy_.block_size;
      s_.pieces.push_back(
          {item.kv_begin, item.kv_end, item.piece, ids[item.kv_begin / block_size], ids[(item.kv_end - 1) / block_size], int(i)});
    }
    const auto order = [](const Piece& p) { return std::tuple(p.kv_begin, p.kv_end, p.piece, p.first_id, p.last_id, p.item); };
    std::sort(s_.pieces.begin(), s_.pieces.end(), [&](const Piece& a, const Piece& b) { return order(a) < order(b); });
  }

  // Whether each of an item's queries sees all of its keys, and would do so right behind them.
  bool is_seen_by_all(const WorkItem& item) const {
    const int first = first_position(batch_, item);
    if (item.kv_end > first + 1) return false;
    if (policy_.windows == nullptr) return true;
    const auto see_all = [&](int64_t from, int64_t to) {
      return first_visible_key(*policy_.windows, to) <= item.kv_begin && mask_allows(*policy_.windows, from, item.kv_end - 1);
    };
    return see_all(first, last_position(batch_, item)) && see_all(item.kv_end - 1, int64_t(item.kv_end) - 2 + policy_.most_tokens);
  }

  const WorkItem& item_of(const Piece& piece) const { return list_.work[size_t(piece.item)]; }

  bool same_keys(const Piece& a, const Piece& b) const {
    const auto key = [](const Piece& p) { return std::tie(p.kv_begin, p.kv_end, p.piece, p.first_id, p.last_id); };
    if (key(a) != key(b)) return false;
    const int begin = a.kv_begin / policy_.block_size, end = (a.kv_end - 1) / policy_.block_size + 1;
    const int32_t *const ids_a = keys_.ids_of(item_of(a).table), *const ids_b = keys_.ids_of(item_of(b).table);
    return std::equal(ids_a + begin, ids_a + end, ids_b + begin);
  }

  // Query tokens of an item at most: as many as keep it within a part of a worker's share of the list.
  int most_tokens() const {
    if (policy_.num_workers == 0) return policy_.most_tokens;
    int64_t pairs = 0, longest = 1;
    for (const WorkItem& item : list_.work) pairs += int64_t(num_queries(item)) * (item.kv_end - item.kv_begin);
    for (const Piece& piece : s_.pieces) longest = std::max<int64_t>(longest, piece.kv_end - piece.kv_begin);
    return int(std::min<int64_t>(policy_.most_tokens, pairs / (kPartsOfShare * policy_.num_workers) / longest));
  }

  // Cuts the pieces into groups, each of which becomes one item. False when every group is a single piece.
  bool group(int most_tokens) {
    s_.group_end.clear();
    const int count = int(s_.pieces.size());
    for (int begin = 0, end = 0; begin < count; begin = end) {
      int tokens = 0;
      for (end = begin; end < count && same_keys(s_.pieces[size_t(begin)], s_.pieces[size_t(end)]); ++end) {
        tokens += num_queries(item_of(s_.pieces[size_t(end)]));
        if (tokens > most_tokens && end > begin) break;
      }
      s_.group_end.push_back(end);
    }
    return s_.group_end.size() < s_.pieces.size();
  }

  void number_parts() {
    s_.first_part.clear();
    int parts = 0;
    for (const MergeItem& merge : list_.merges) {
      s_.first_part.push_back(parts);
      parts += merge.num_splits;
    }
    list_.details.parts.resize(size_t(parts));
  }

  // Says that the rows of a piece of the old list begin at `row` now.
  void set_row(const WorkItem& piece, int row) {
    const MergeItem& merge = list_.merges[size_t(piece.merge)];
    const int split = (piece.partial - merge.first_partial) / num_queries(piece);
    list_.details.parts[size_t(s_.first_part[size_t(piece.merge)]) + size_t(split)] = row;
  }

  void make_items() {
    std::vector<int>& tokens = list_.details.tokens;
    tokens.resize(size_t(batch_.num_tokens()));
    std::iota(tokens.begin(), tokens.end(), 0);
    list_.details.merge_of.clear();
    int row = list_.merges.empty() ? 0 : list_.merges.front().first_partial;
    for (const MergeItem& merge : list_.merges) row = std::min(row, merge.first_partial);

    s_.items.clear();
    int begin = 0;
    for (const int end : s_.group_end) {
      WorkItem shared = item_of(s_.pieces[size_t(begin)]);
      shared.partial = row;
      if (end - begin > 1) shared.q_begin = int(tokens.size()), shared.merge = -1;
      for (int i = begin; i < end; ++i) {
        WorkItem& piece = list_.work[size_t(s_.pieces[size_t(i)].item)];
        set_row(piece, row);
        row += num_queries(piece);
        if (end - begin > 1)
          for (int t = piece.q_begin; t < piece.q_end; ++t) tokens.push_back(t), list_.details.merge_of.push_back(piece.merge);
        piece.piece = kTaken;
      }
      if (end - begin > 1) shared.q_end = int(tokens.size());
      s_.items.push_back(shared);
      begin = end;
    }
    for (const WorkItem& item : list_.work) {
      if (item.piece == kTaken) continue;
      WorkItem& kept = s_.items.emplace_back(item);
      if (item.partial < 0) continue;
      set_row(item, row);
      kept.partial = row;
      row += num_queries(item);
    }
    list_.work.assign(s_.items.begin(), s_.items.end());
    list_.num_work = int(list_.work.size());
    for (size_t m = 0; m < list_.merges.size(); ++m) list_.merges[m].first_partial = s_.first_part[m];

    std::vector<int>& request_of = list_.details.request_of;
    request_of.clear();
    for (int r = 0; r < batch_.num_reqs(); ++r) request_of.insert(request_of.end(), size_t(batch_.query_len(r)), r);
  }

  static constexpr int kPartsOfShare = 2;   // of which a shared item is one at most
  static constexpr int kTaken = INT32_MIN;  // piece: the item is a part of another one

  const Batch& batch_;
  const KeySource& keys_;
  const SharePolicy& policy_;
  Schedule& list_;
  ShareScratch& s_;
};

}  // namespace

int first_position(const Batch& batch, const WorkItem& item) {
  if (!batch.positions.empty()) return std::ranges::min(batch.positions.subspan(size_t(item.q_begin), size_t(num_queries(item))));
  return batch.seq_lens[item.table] - batch.query_len(item.table) + item.q_begin - batch.query_start_loc[item.table];
}

int last_position(const Batch& batch, const WorkItem& item) {
  if (!batch.positions.empty()) return std::ranges::max(batch.positions.subspan(size_t(item.q_begin), size_t(num_queries(item))));
  return first_position(batch, item) + num_queries(item) - 1;
}

const Mask* windows_of(const Mask& mask) { return mask.window_left >= 0 || mask.window_right >= 0 || mask.chunk > 0 ? &mask : nullptr; }

bool is_position_free(const AttentionSpec& spec) {
  const Mask& mask = spec.mask;
  if (mask.custom || mask.tree || !spec.mask_mod.empty()) return false;
  if (mask.positions && windows_of(mask) != nullptr) return false;  // given positions of shared items are beyond all windows
  if (spec.score.alibi || spec.score.relative_buckets > 0) return false;
  using enum ExpressionVariable;
  return spec.score_mod.empty() || std::ranges::none_of(std::array{batch, q, q_len, kv_len},
                                                        [&](ExpressionVariable of_request) { return spec.score_mod.uses(of_request); });
}

void share_keys(const Batch& batch, const KeySource& keys, const SharePolicy& policy, Schedule& schedule, ShareScratch& scratch) {
  Sharing(batch, keys, policy, schedule, scratch).run();
}

}  // namespace imbrex

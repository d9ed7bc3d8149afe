// See shared_keys.h.
#include "attention/shared_keys.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <tuple>

#include "attention/cut_item.h"
#include "attention/item_order.h"

namespace imbrex {
namespace {

using Piece = ShareScratch::Piece;

int num_queries(const WorkItem& item) { return item.q_end - item.q_begin; }

// Of the item's first query among the keys of its request.
int first_position(const Batch& batch, const WorkItem& item) {
  return batch.seq_lens[item.table] - batch.query_len(item.table) + item.q_begin - batch.query_start_loc[item.table];
}

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
      if (policy_.seen_by_all && item.kv_end > first_position(batch_, item) + 1) continue;
      const int32_t* const ids = keys_.ids_of(item.table);
      const int block_size = policy_.block_size;
      s_.pieces.push_back(
          {item.kv_begin, item.kv_end, item.piece, ids[item.kv_begin / block_size], ids[(item.kv_end - 1) / block_size], int(i)});
    }
    const auto order = [](const Piece& p) { return std::tuple(p.kv_begin, p.kv_end, p.piece, p.first_id, p.last_id, p.item); };
    std::sort(s_.pieces.begin(), s_.pieces.end(), [&](const Piece& a, const Piece& b) { return order(a) < order(b); });
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

// The runs of requests that begin with the same blocks.
class Shortening {
 public:
  Shortening(const Batch& batch, const KeySource& keys, const SharePolicy& share, const SchedulePolicy& policy, Schedule& list,
             ShareScratch& scratch)
      : batch_(batch), keys_(keys), share_(share), policy_(policy), list_(list), s_(scratch), workers_(std::max(policy.num_workers, 1)) {}

  bool run() {
    if (!two_begin_with_one_block()) return false;
    if (!policy_.runs || policy_.balanced || policy_.max_splits <= 0) return true;
    collect();
    for (const CutItem& item : list_.items) cost_ += cost_of(item, run_of(item), 0, 1), rows_ += partial_rows(item);
    bool changed = false;
    for (size_t begin = 0, end = 0; begin < s_.starts.size(); begin = end) {
      while (end < s_.starts.size() && same_start(s_.starts[begin], s_.starts[end])) ++end;
      if (end - begin > 1) changed = choose_run({s_.starts.data() + begin, end - begin}) || changed;
    }
    if (changed) number_anew();
    return true;
  }

 private:
  using Start = ShareScratch::Start;

  static bool same_start(const Start& a, const Start& b) {
    return std::tie(a.first_id, a.piece, a.queries) == std::tie(b.first_id, b.piece, b.queries);
  }
  static int keys_of(const CutItem& item) { return item.whole.kv_end - item.whole.kv_begin; }
  // Keys of a piece; 0: there is one piece alone.
  static int piece_of(const CutItem& item) { return item.whole.piece > 0 ? item.whole.piece : item.split; }
  // Pieces of a run.
  int run_of(const CutItem& item) const {
    if (item.whole.piece == 0) return 1;
    return item.num_splits == 1 ? policy_.most_in_run : item.split / item.whole.piece;
  }
  static int splits_of(const CutItem& item, int run) {
    const int64_t split = int64_t(piece_of(item)) * run;
    return split == 0 ? 1 : int((keys_of(item) + split - 1) / split);
  }

  bool two_begin_with_one_block() {
    s_.first_ids.clear();
    for (const CutItem& item : list_.items) {
      const WorkItem& w = item.whole;
      if (w.kv_begin > 0 || w.kv_end == 0 || piece_of(item) == 0 || 2 * num_queries(w) > share_.most_tokens) continue;
      s_.first_ids.push_back(uint64_t(uint32_t(keys_.ids_of(w.table)[0])) << 32 | uint64_t(&item - list_.items.data()));
    }
    std::sort(s_.first_ids.begin(), s_.first_ids.end());
    const auto same = [](uint64_t a, uint64_t b) { return a >> 32 == b >> 32; };
    return std::adjacent_find(s_.first_ids.begin(), s_.first_ids.end(), same) != s_.first_ids.end();
  }

  void collect() {
    s_.starts.clear();
    for (const uint64_t first : s_.first_ids) {
      const CutItem& item = list_.items[size_t(uint32_t(first))];
      const int32_t* const ids = keys_.ids_of(item.whole.table);
      const int pieces = keys_of(item) / piece_of(item);
      Start& start = s_.starts.emplace_back(Start{int(first >> 32), piece_of(item), num_queries(item.whole), {}, int(uint32_t(first)), 0});
      int part = 1;  // of four: blocks within whole pieces, that all requests of one length of pieces have at the same place
      for (int& sample : start.samples) sample = ids[int64_t(pieces) * part++ / 4 * start.piece / share_.block_size];
    }
    const auto order = [](const Start& a) {
      return std::tuple(a.first_id, a.piece, a.queries, a.samples[0], a.samples[1], a.samples[2], a.item);
    };
    std::sort(s_.starts.begin(), s_.starts.end(), [&](const Start& a, const Start& b) { return order(a) < order(b); });
  }

  // Keys that two requests have in common, as far as whole blocks are the same, and every query of both sees them.
  int common_keys(const Start& a, const Start& b) const {
    const WorkItem &one = list_.items[size_t(a.item)].whole, &other = list_.items[size_t(b.item)].whole;
    const int seen = std::min({one.kv_end, other.kv_end, first_position(batch_, one) + 1, first_position(batch_, other) + 1});
    if (seen <= 0) return 0;
    const int blocks = (seen - 1) / share_.block_size + 1;
    const int32_t* const ids = keys_.ids_of(one.table);
    const auto differ = std::mismatch(ids, ids + blocks, keys_.ids_of(other.table)).first;
    return int(std::min<int64_t>(seen, (differ - ids) * int64_t(share_.block_size)));
  }

  // What an item costs a worker, in keys. Runs within the first `common` keys are shared by as many requests as `sharers`.
  int64_t cost_of(const CutItem& item, int run, int common, int sharers) const {
    constexpr int kTaskKeys = 300, kMergePercent = 60;  // as in soonest_run() of cut_item.h
    const int64_t split = int64_t(piece_of(item)) * run, splits = splits_of(item, run), shared = split == 0 ? 0 : common / split;
    const int64_t merge = splits > 1 ? splits * num_queries(item.whole) * policy_.split_kv_each * kMergePercent / 100 : 0;
    return shared * (split + kTaskKeys) / sharers + keys_of(item) - shared * split + (splits - shared) * kTaskKeys + merge;
  }

  // A bound of the time in which the workers end a list: what each has to do, and the longest item, which may begin last.
  int64_t time_of(int64_t cost, int64_t longest) const { return cost / workers_ + longest; }

  // Gives the requests that begin with the same blocks runs of the length that makes the list end soonest, if that is not the length they
  // have. False: they stay what they are.
  bool choose_run(std::span<Start> same) {
    int64_t cost = cost_, rows = rows_, longest = 0;  // of the list without them, and of them
    for (const Start& start : same) {
      const CutItem& item = list_.items[size_t(start.item)];
      cost -= cost_of(item, run_of(item), 0, 1), rows -= partial_rows(item);
      longest = std::max<int64_t>(longest, std::min(keys_of(item), run_of(item) * piece_of(item)));
    }
    for (size_t i = 1; i < same.size(); ++i) {
      const int common = common_keys(same[i - 1], same[i]);
      same[i - 1].common = std::max(same[i - 1].common, common), same[i].common = common;
    }
    const int sharers = std::min<int>(share_.most_tokens / same[0].queries, int(same.size()));
    int64_t soonest = time_of(cost_, longest), best_cost = 0, best_rows = 0;
    int best = 0;
    for (int run = policy_.most_in_run; run >= 1; run /= kPiecesTogether) {
      int64_t run_cost = cost, run_rows = rows, run_longest = 0;
      bool any = false;
      for (const Start& start : same) {
        const CutItem& item = list_.items[size_t(start.item)];
        const int splits = splits_of(item, run);
        run_cost += cost_of(item, run, start.common, sharers);
        if (splits > 1) run_rows += int64_t(splits) * start.queries;
        run_longest = std::max<int64_t>(run_longest, std::min(int64_t(keys_of(item)), int64_t(run) * start.piece));
        any = any || int64_t(run) * start.piece <= start.common;
      }
      if (!any || (policy_.most_partial_rows > 0 && policy_.first_partial + run_rows > policy_.most_partial_rows)) continue;
      if (const int64_t time = time_of(run_cost, run_longest); time < soonest)
        soonest = time, best = run, best_cost = run_cost, best_rows = run_rows;
    }
    if (best == 0) return false;
    cost_ = best_cost, rows_ = best_rows;
    for (const Start& start : same) set_run(list_.items[size_t(start.item)], start.piece, best);
    return true;
  }

  static void set_run(CutItem& item, int piece, int run) {
    item.num_splits = splits_of(item, run);
    item.whole.piece = run > 1 ? piece : 0;
    item.split = item.num_splits > 1 ? piece * run : 0;
    item.first_end = item.num_splits > 1 ? item.whole.kv_begin + item.split : 0;
  }

  void number_anew() {
    int rows = policy_.first_partial;
    list_.num_work = 0;
    list_.merges.clear();
    for (CutItem& item : list_.items) {
      list_.num_work += item.num_splits;
      item.whole.partial = item.whole.merge = -1;
      if (item.num_splits == 1) continue;
      item.whole.partial = rows, item.whole.merge = int(list_.merges.size());
      list_.merges.push_back(merge_of(item));
      rows += int(partial_rows(item));
    }
    list_.num_partial_rows = rows - policy_.first_partial;
  }

  const Batch& batch_;
  const KeySource& keys_;
  const SharePolicy& share_;
  const SchedulePolicy& policy_;
  Schedule& list_;
  ShareScratch& s_;
  const int64_t workers_;
  int64_t cost_ = 0, rows_ = 0;  // of the list
};

}  // namespace

bool is_position_free(const AttentionSpec& spec) {
  const Mask& mask = spec.mask;
  return mask.window_left < 0 && mask.window_right < 0 && mask.chunk == 0 && !mask.custom && !mask.positions && !spec.score.alibi &&
         spec.score.relative_buckets == 0;
}

void share_keys(const Batch& batch, const KeySource& keys, const SharePolicy& policy, Schedule& schedule, ShareScratch& scratch) {
  Sharing(batch, keys, policy, schedule, scratch).run();
}

bool shorten_runs(const Batch& batch, const KeySource& keys, const SharePolicy& share, const SchedulePolicy& policy, Schedule& schedule,
                  ShareScratch& scratch) {
  return Shortening(batch, keys, share, policy, schedule, scratch).run();
}

}  // namespace imbrex

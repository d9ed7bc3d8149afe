// See shared_keys.h: shorten_runs().
#include <algorithm>
#include <bit>
#include <span>
#include <tuple>

#include "attention/cut_item.h"
#include "attention/mask.h"
#include "attention/shared_keys.h"

namespace imbrex {
namespace {

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
    for (const CutItem& item : list_.items) add(all_, item, run_of(item), 0, 1);
    bool pays = false;
    for (size_t begin = 0, end = 0; begin < s_.starts.size(); begin = end) {
      while (end < s_.starts.size() && same_start(s_.starts[begin], s_.starts[end])) ++end;
      if (end - begin > 1) pays = choose_run({s_.starts.data() + begin, end - begin}) || pays;
    }
    if (pays) number_anew();
    return pays || share_.overhead_keys < 0;
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

  // Finds the requests that could share. They go through a hash table, because nearly every step ends here: there is nothing to share.
  bool two_begin_with_one_block() {
    s_.firsts.clear();
    const int bits = std::bit_width(2 * list_.items.size());
    s_.table.assign(size_t(1) << bits, 0);
    bool two = false;
    for (const CutItem& item : list_.items) {
      const WorkItem& w = item.whole;
      if (w.kv_begin > 0 || w.kv_end == 0 || piece_of(item) == 0 || 2 * num_queries(w) > share_.most_tokens) continue;
      if (share_.windows != nullptr && first_visible_key(*share_.windows, last_position(batch_, w)) > 0) continue;
      const int id = keys_.ids_of(w.table)[0];
      s_.firsts.push_back({id, int(&item - list_.items.data())});
      size_t at = bits == 0 ? 0 : (uint32_t(id) * 0x9e3779b97f4a7c15) >> (64 - bits);
      const auto other = [&] { return s_.table[at] == 0 ? nullptr : &s_.firsts[size_t(s_.table[at] - 1)]; };
      while (other() != nullptr && other()->id != id) at = (at + 1) % s_.table.size();
      two = two || other() != nullptr;
      s_.table[at] = int(s_.firsts.size());
    }
    return two;
  }

  void collect() {
    s_.starts.clear();
    for (const ShareScratch::First& first : s_.firsts) {
      const CutItem& item = list_.items[size_t(first.item)];
      const int32_t* const ids = keys_.ids_of(item.whole.table);
      const int pieces = keys_of(item) / piece_of(item);
      Start& start = s_.starts.emplace_back(Start{first.id, piece_of(item), num_queries(item.whole), {}, first.item, 0});
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

  // Of a list; in keys, tasks and partial rows.
  struct Cost {
    double keys = 0, tasks = 0;
    int64_t rows = 0, longest = 0;  // longest: of the runs that are chosen
  };
  // Adds what an item costs, `times` of it. Runs within the first `common` keys are shared by as many requests as `sharers`.
  void add(Cost& list, const CutItem& item, int run, int common, int sharers, int times = 1) const {
    constexpr int kTaskKeys = 300, kMergePercent = 60;  // as in soonest_runs() of cut_item.h
    const int64_t split = int64_t(piece_of(item)) * run, splits = splits_of(item, run), shared = split == 0 ? 0 : common / split;
    const int64_t merge = splits > 1 ? splits * num_queries(item.whole) * policy_.split_kv_each * kMergePercent / 100 : 0;
    const double tasks = double(shared) / sharers + double(splits - shared);
    list.keys += times * (double(shared * split) / sharers + double(keys_of(item) - shared * split + merge) + tasks * kTaskKeys);
    list.tasks += times * tasks;
    list.rows += times * (splits > 1 ? splits * num_queries(item.whole) : 0);
  }
  // A bound of the time in which the workers end a list: what each has to do, and the longest item, which may begin last.
  double time_of(const Cost& list) const { return list.keys / workers_ + double(list.longest); }
  // That of a list with few tasks, whose workers have a multiprocessor each: so they take less for an item.
  double time_alone(const Cost& list) const {
    const double each = std::max(policy_.workers_each, 1);
    return list.keys / workers_ + double(list.longest) * std::clamp(list.tasks / workers_, 1 / each, 1.);
  }

  const CutItem& item_of(const Start& start) const { return list_.items[size_t(start.item)]; }
  static int64_t longest_run(const CutItem& item, int run) { return std::min<int64_t>(keys_of(item), int64_t(run) * piece_of(item)); }

  // Gives requests that begin with the same blocks, or as many of them as there are partial rows for, runs of the length with which the
  // list ends soonest. False: they stay what they are, since the list would hardly end sooner.
  bool choose_run(std::span<Start> same) {
    int64_t longest = 0;
    for (const Start& start : same) longest = std::max(longest, longest_run(item_of(start), run_of(item_of(start))));
    for (size_t i = 1; i < same.size(); ++i) {
      const int common = common_keys(same[i - 1], same[i]);
      same[i - 1].common = std::max(same[i - 1].common, common), same[i].common = common;
    }
    const int sharers = std::min<int>(share_.most_tokens / same[0].queries, int(same.size()));
    const int64_t most_rows = policy_.most_partial_rows > 0 ? policy_.most_partial_rows - policy_.first_partial : INT64_MAX;
    constexpr double kWorthwhile = 95;  // per cent of the time without sharing: a smaller gain may be none
    Cost apart = all_;
    apart.longest = longest;
    Cost best{};
    int best_run = 0;
    size_t best_count = 0;
    for (int run = policy_.most_in_run; run >= 1; run /= kPiecesTogether) {
      Cost list = all_;
      size_t count = 0;  // of requests that get such runs
      bool any = false;
      for (const Start& start : same) {
        const CutItem& item = item_of(start);
        Cost more = list;
        add(more, item, run_of(item), 0, 1, -1);
        add(more, item, run, start.common, sharers);
        if (more.rows > most_rows) break;
        ++count, list = more;
        list.longest = std::max(list.longest, longest_run(item, run));
        any = any || int64_t(run) * start.piece <= start.common;
      }
      if (count < same.size()) list.longest = std::max(list.longest, longest);
      if (any && (best_run == 0 || time_of(list) < time_of(best))) best = list, best_run = run, best_count = count;
    }
    if (best_run == 0 || time_alone(best) + share_.overhead_keys > time_alone(apart) * kWorthwhile / 100) return false;
    all_ = best, all_.longest = 0;
    for (const Start& start : same.first(best_count)) set_run(list_.items[size_t(start.item)], start.piece, best_run);
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
  Cost all_;  // of the list
};

}  // namespace

bool shorten_runs(const Batch& batch, const KeySource& keys, const SharePolicy& share, const SchedulePolicy& policy, Schedule& schedule,
                  ShareScratch& scratch) {
  return Shortening(batch, keys, share, policy, schedule, scratch).run();
}

}  // namespace imbrex

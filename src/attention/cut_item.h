#pragma once
// How one item of a request is cut, and where its splits stand in a list: the arithmetic that schedule() shares with the kernel which
// plans on a device, so that both make the same lists. Plain numbers and no headers but work.h, since NVRTC reads this file too.
#include "imbrex/work.h"

namespace imbrex {

// SchedulePolicy and Mask, as far as a cut depends on them; all fields mean what they mean there.
struct CutRules {
  int tile_q, tile_kv, split_kv, split_max_q;
  int max_splits, share_splits, longest_kv, max_split_rows, split_kv_each, min_q, max_q;
  int num_workers, items_each, workers_each, most_in_run, most_partial_rows;
  bool causal, runs, few_splits, cost_by_keys;
  int window_left, window_right, chunk, chunk_before;  // chunk_before: lookback_tokens() of the mask
};

struct KeyRange {
  int begin, end;
};

inline long smaller(long a, long b) { return a < b ? a : b; }
inline long larger(long a, long b) { return a > b ? a : b; }
inline long clamped(long x, long low, long high) { return larger(low, smaller(x, high)); }

// Keys that at least one of the queries at positions [first, last] may see by causality, window and chunk.
inline KeyRange visible_keys(const CutRules& rules, int first, int last, int seq_len) {
  long begin = 0, end = seq_len;
  if (rules.causal) end = smaller(end, long(last) + 1);
  if (rules.window_right >= 0) end = smaller(end, long(last) + rules.window_right + 1);
  if (rules.window_left >= 0) begin = larger(begin, long(first) - rules.window_left);
  if (rules.chunk > 0) {
    begin = larger(begin, larger(first, 0) / rules.chunk * rules.chunk - rules.chunk_before);
    end = smaller(end, (larger(last, 0) / rules.chunk + 1) * rules.chunk);
    if (last < 0) end = 0;
  }
  if (begin >= end) return {0, 0};
  return {int(begin), int(end)};
}

// The least and the greatest position of an item's queries.
struct PositionRange {
  int first, last;
};
// Of query tokens [t0, t1) of a request whose positions the batch does not give.
inline PositionRange usual_positions(int q_len, int seq_len, int t0, int t1) { return {seq_len - q_len + t0, seq_len - q_len + t1 - 1}; }
// Of `count` tokens whose positions it gives.
inline PositionRange given_positions(const int* positions, int count) {
  PositionRange range{positions[0], positions[0]};
  for (int i = 1; i < count; ++i) {
    range.first = int(smaller(range.first, positions[i]));
    range.last = int(larger(range.last, positions[i]));
  }
  return range;
}

// What an item of queries at such positions reads: the visible keys, from the beginning of a tile.
inline KeyRange item_keys(const CutRules& rules, PositionRange queries, int seq_len) {
  const KeyRange keys = visible_keys(rules, queries.first, queries.last, seq_len);
  return {keys.begin == 0 ? 0 : keys.begin / rules.tile_kv * rules.tile_kv, keys.end};
}

inline int tile_end(const CutRules& rules, int q_len, int t0) { return int(smaller(q_len, long(t0) + rules.tile_q)); }
inline bool is_cut(const CutRules& rules, int q_len) { return q_len >= rules.min_q && q_len <= rules.max_q; }
inline int num_tiles(const CutRules& rules, int q_len) { return int((long(q_len) + rules.tile_q - 1) / rules.tile_q); }
// Query token that a request's last tile begins with; negative: it has none. Items are numbered from the last tile to the first, so that
// with a causal mask the longest comes first among those of one cost bucket too.
inline int last_tile(const CutRules& rules, int q_len) { return (num_tiles(rules, q_len) - 1) * rules.tile_q; }

constexpr int kAnyNumber = 0x7fffffff;

// Pieces an item of a request with q_len query tokens may have.
inline int most_pieces(const CutRules& rules, int q_len) {
  if (q_len > rules.split_max_q) return 1;
  if (rules.max_splits <= 0) return kAnyNumber;
  return int(clamped(rules.max_split_rows / int(larger(q_len, 1)), 1, rules.max_splits));
}

inline long least_keys(const CutRules& rules, int q_len) {
  const long wanted = smaller(long(q_len) * rules.split_kv_each, rules.longest_kv), tile = larger(rules.tile_kv, 1);
  return larger(rules.split_kv, (wanted + tile - 1) / tile * tile);
}

// Whether a list has the verify items of a kernel whose splits are merged by a launch of their own: such items are mostly of one length.
inline bool of_merged_verify(const CutRules& rules) { return rules.few_splits && rules.split_kv_each > 0; }

// The number of even pieces that an item of so many keys is cut into, `pieces` at most: as many as have least_keys() or more, but at most
// share_splits; more when these would have more than longest_kv keys. A rest of less than a quarter of least_keys() is not counted as a
// piece. In a list of_merged_verify() a number above kPiecesTogether is rounded to the nearest allowed power of two: then runs of pieces
// have one length, and end at the same time. The number never falls when the keys rise.
inline long even_pieces(const CutRules& rules, int q_len, long keys, int pieces) {
  const long least = least_keys(rules, q_len), longest = larger(least, rules.longest_kv), rounding = least * 3 / 4;
  long wanted = smaller((keys + rounding) / least, rules.share_splits);
  if (wanted * longest < keys) wanted = (keys + longest - 1) / longest;
  wanted = clamped(wanted, 1, pieces);
  if (wanted <= kPiecesTogether || !of_merged_verify(rules)) return wanted;
  long power = kPiecesTogether;
  while (power * 3 / 2 <= wanted && power * 2 <= pieces) power *= 2;
  return power;
}

// Keys of a piece: split_kv or more, by the number of query tokens, or as many as make the pieces even. 0: the item is one piece.
inline long piece_keys(const CutRules& rules, int q_len, KeyRange keys, int pieces) {
  if (pieces == 1) return 0;
  if (pieces == kAnyNumber) return least_keys(rules, q_len);
  const long all = long(keys.end) - keys.begin, number = even_pieces(rules, q_len, all, pieces);
  if (number <= 1) return 0;
  const long unit = number * rules.tile_kv;
  return (all + unit - 1) / unit * rules.tile_kv;
}

// Makes the item of query tokens [t0, tile_end()) of a request whose queries begin at token q_start of the batch. whole.partial and
// whole.merge are -1: where there are several pieces, the code that assigns partial rows sets them.
//
// `seen`: keys of which it has no others, from the beginning of a tile.
inline void cut_item(const CutRules& rules, int request, int q_start, int q_len, int seq_len, int t0, PositionRange queries, KeyRange seen,
                     CutItem& item) {
  const int t1 = tile_end(rules, q_len, t0);
  const KeyRange visible = item_keys(rules, queries, seq_len);
  const int first_key = int(larger(visible.begin, seen.begin)), end_key = int(smaller(visible.end, seen.end));
  const KeyRange keys{end_key > first_key ? first_key : 0, end_key > first_key ? end_key : 0};
  const int begin = keys.begin, end = keys.end;
  // Even pieces begin with the item. Pieces of a fixed length begin at multiples of it, so that a growing context does not move them.
  const int origin = rules.max_splits > 0 ? begin : 0;
  const long piece = piece_keys(rules, q_len, keys, most_pieces(rules, q_len));
  const long first = piece == 0 || begin == origin ? 0 : (begin - origin) / piece;
  const long last = piece > 0 && end > begin ? (end - origin - 1) / piece : first;
  item.whole = {request, q_start + t0, q_start + t1, begin, end, -1};
  item.num_splits = 1, item.first_end = item.split = 0;
  if (last > first) {
    item.num_splits = int(last - first + 1);
    item.first_end = int(origin + (first + 1) * piece);
    item.split = int(piece);
  }
}

// Sums and maxima over the items of a list, before their pieces become runs.
struct Load {
  long keys = 0, longest = 0;  // keys of all items, and of the item that has most
  int items = 0;
  int queries = 0, q_len = 0;  // query tokens of the item, and of the request, that has most
};
inline void add_item(Load& load, const CutItem& item, int q_len) {
  const long keys = item.whole.kv_end - item.whole.kv_begin;
  load.keys += keys, load.longest = larger(load.longest, keys), ++load.items;
  load.queries = int(larger(load.queries, item.whole.q_end - item.whole.q_begin));
  load.q_len = int(larger(load.q_len, q_len));
}

// Whether so many items have about one length: the longest has a quarter more keys, or tiles, than the mean at most.
inline bool about_one_length(long longest, long all, long items) { return longest * items <= all * 5 / 4; }

// How many keys a run may have: of_full in items before number first_of_rest, of_rest in the others. 0: no runs.
struct RunLengths {
  long of_full, of_rest;
  int first_of_rest;
};
inline long longest_run(const RunLengths& lengths, int item) { return item < lengths.first_of_rest ? lengths.of_full : lengths.of_rest; }

// Bounds of a list with few_splits, for each worker. soonest_runs() cuts items of the greatest length into most_tasks_each() tasks at most,
// and allows a run allowed_percent() of the keys of such a task; some items may have runs of a quarter of that. make_runs() makes runs of
// at least a quarter of the keys that are allowed. So the number of splits is bounded by most_splits_each(): one more than these for each
// item, and there are no more items than workers. Where the length of runs is a part of the load instead, there are at most nine splits for
// each worker. With verify's percentage two pieces are not a run where one piece ends soonest.
inline int most_tasks_each(bool verify) { return verify ? 3 : 4; }
inline int allowed_percent(bool verify) { return verify ? 125 : 150; }
inline int most_splits_each(bool verify) {
  return (400 * kPiecesTogether * most_tasks_each(verify) + allowed_percent(verify) - 1) / allowed_percent(verify) + 1;
}

// Run lengths of a list whose items have about the same length and are fewer than workers: those with which the last task ends soonest.
// Workers that share a multiprocessor share its speed, so that one of them alone is as fast as all. With few_splits some items may have
// shorter runs than the others: those that would be in the last, incomplete round.
inline RunLengths soonest_runs(const CutRules& rules, const Load& load, long workers) {
  // Times are in units of the time that a worker takes for a key. A task costs kTaskKeys besides its keys, and a launch that merges
  // kMergeKeys (fitted to an H200). Merging a split costs a fifth of the keys that split_kv_each asks of a piece: the worker merges with
  // all of its threads when it has no other task. Before that it merges with one warp, which takes three fifths. With few_splits a launch
  // of its own merges, and all workers share the cost.
  constexpr long kTaskKeys = 300, kMergeKeys = 200;
  constexpr long kMergeByAll = 1, kMergeByWarp = 3, kMergeUnit = 5;  // one fifth and three
  constexpr long kLongestRun = 4;                                    // in pieces of longest_kv
  constexpr long kAllowedPercent = 125;  // a run is allowed a little more keys than were found best: items have about one length
  constexpr long kWorthwhile = 90;       // per cent of the time with runs of one length
  const long least = larger(load.queries * long(rules.split_kv_each), 1);
  const long joined_last = (least * kMergeByAll + kMergeUnit - 1) / kMergeUnit, joined_before = least * kMergeByWarp / kMergeUnit;
  const long keys = load.longest, piece = piece_keys(rules, load.q_len, {0, int(keys)}, most_pieces(rules, load.q_len));
  if (piece == 0) return {0, keys, 0};
  const bool verify = of_merged_verify(rules);
  // `computed`: keys that the last worker to end computes.
  const auto time_of = [&](int tasks, long computed, int splits) {
    const long by_launch = splits > 1 ? kMergeKeys + tasks * least / workers : 0;
    const long joined = verify ? by_launch : splits * (tasks > workers ? joined_before : joined_last);
    return computed + (tasks + workers - 1) / workers * kTaskKeys + joined;
  };
  const auto rounds_of = [&](int tasks) { return (long(tasks) * rules.workers_each + workers - 1) / workers; };
  const auto splits_of = [&](long run) { return int((keys + run - 1) / run); };
  int best = 0, best_of_two = 0, first_of_rest = 0;  // of two: with runs of two lengths, the longer one
  long soonest = 0, soonest_of_two = 0;
  for (int pieces = 1; pieces <= rules.most_in_run; pieces *= kPiecesTogether) {
    const long run = smaller(piece * pieces, keys), shorter = piece * pieces / kPiecesTogether;
    const int splits = splits_of(run), tasks = splits * load.items;
    if (rules.few_splits && tasks > most_tasks_each(verify) * workers && pieces < rules.most_in_run) continue;
    const long time = time_of(tasks, rounds_of(tasks) * run, splits);
    if (best == 0 || (time < soonest && run <= kLongestRun * rules.longest_kv)) best = int(run), soonest = time;
    const long full_rounds = long(tasks) * rules.workers_each / workers;
    const int first = int(full_rounds * workers / (long(splits) * rules.workers_each));  // items that full rounds take
    if (!rules.few_splits || pieces == 1 || shorter >= keys || first == 0) continue;
    const int tasks_of_rest = (load.items - first) * splits_of(shorter);
    const long time_of_two =
        time_of(first * splits + tasks_of_rest, full_rounds * run + rounds_of(tasks_of_rest) * shorter, kPiecesTogether);
    if (best_of_two == 0 || time_of_two < soonest_of_two) best_of_two = int(run), soonest_of_two = time_of_two, first_of_rest = first;
  }
  const long percent = rules.few_splits ? allowed_percent(of_merged_verify(rules)) : kAllowedPercent;
  if (best_of_two == 0 || soonest_of_two * 100 >= soonest * kWorthwhile) return {0, best * percent / 100, 0};
  return {best_of_two * percent / 100, best_of_two * percent / (100 * kPiecesTogether), first_of_rest};
}

// How long runs may be in a list. A round is as many items as there are workers.
//   Items of about one length: items of full rounds stay whole, since they keep all workers busy and end at the same time. In the last,
//   incomplete round a run has a worker's share of the round's keys and a quarter more, or two shares and an eighth while that is short, so
//   that the last to end do not end much later than the others. A list of less than a round is cut as soonest_runs() says.
//   Items of different lengths do not end at the same time: a run has at most a worker's share of all keys, and at most longest_kv.
//   Items of about one length that are few and very long get longest_kv too: the heads of a request, which read neighbouring keys, would
//   not stay at the same keys.
inline RunLengths run_lengths(const CutRules& rules, const Load& load) {
  constexpr long kShort = 1024;  // keys that two shares of a worker are limited to
  constexpr long kVeryLong = 4;  // in pieces of longest_kv
  constexpr int kFewRounds = 6;  // very long items are few in so many rounds
  if (!rules.runs || load.items == 0) return {0, 0, 0};
  const bool small = long(load.queries) * rules.items_each <= rules.tile_q;
  const long workers = larger(rules.num_workers, 1) * (small ? rules.items_each : 1);
  if (!about_one_length(load.longest, load.keys, load.items)) return {0, smaller(load.keys / workers, rules.longest_kv), 0};
  if (load.items < workers) return soonest_runs(rules, load, workers);
  const int rest = int(load.items % workers);
  const long share = load.keys * rest / (load.items * workers);
  const bool drift = load.longest > kVeryLong * rules.longest_kv && load.items < kFewRounds * workers;
  const long share_and_quarter = share * 5 / 4, two_shares = share * 17 / 8;
  return {drift ? rules.longest_kv : load.longest, larger(share_and_quarter, smaller(two_shares, kShort)), load.items - rest};
}

// Allows longer runs, which need fewer partial rows, if the list's rows end at `rows`, beyond most_partial_rows. Returns false, and changes
// nothing, if they do not, or if runs are already as long as they can be.
inline bool lengthen(const CutRules& rules, const Load& load, long rows, RunLengths& lengths) {
  if (!rules.runs || rules.most_partial_rows == 0 || rows <= rules.most_partial_rows) return false;
  const long most = 2 * load.longest, least = load.longest / kMostInRun + 1;  // twice: pieces are rounded up to tiles
  if (smaller(lengths.of_full, lengths.of_rest) >= most) return false;
  lengths.of_full = clamped(2 * lengths.of_full, least, most);
  lengths.of_rest = clamped(2 * lengths.of_rest, least, most);
  return true;
}

// Makes the pieces of an item runs, as long as `longest` keys allow. Only this step depends on the load, and no result does: a thread
// block adds up the pieces of a run in the order in which the item's merge adds up splits.
inline void make_runs(const CutRules& rules, CutItem& item, long longest) {
  if (item.num_splits == 1 || longest == 0) return;
  int run = rules.most_in_run;
  if (item.num_splits > run || item.whole.kv_end - item.whole.kv_begin > longest)
    while (run > 1 && long(item.split) * run > longest) run /= kPiecesTogether;
  if (run == 1) return;
  item.whole.piece = item.split;
  item.num_splits = (item.num_splits + run - 1) / run;
  if (item.num_splits == 1) {
    item.first_end = item.split = 0;
  } else {
    item.first_end += (run - 1) * item.split;
    item.split *= run;
  }
}

inline long partial_rows(const CutItem& item) {
  return item.num_splits == 1 ? 0 : long(item.num_splits) * (item.whole.q_end - item.whole.q_begin);
}
// The merge of an item in several splits, after its partial rows have been assigned.
inline MergeItem merge_of(const CutItem& item) { return {item.whole.q_begin, item.whole.q_end, item.whole.partial, item.num_splits}; }

inline WorkItem split_of(const CutItem& item, int index) {
  WorkItem w = item.whole;
  if (index > 0) w.kv_begin = item.first_end + (index - 1) * item.split;
  if (index + 1 < item.num_splits) w.kv_end = item.first_end + index * item.split;
  if (w.partial >= 0) w.partial += index * (w.q_end - w.q_begin);
  return w;
}

// Position of an item in the order "longest first": a logarithm with three fractional bits, so that one pass sorts.
constexpr int kCostBuckets = 512;
inline int cost_bucket(int num_queries, int num_keys) {
  const unsigned long cost = (static_cast<unsigned long>(num_keys) + 64) * static_cast<unsigned long>(num_queries);
#ifdef __CUDA_ARCH__
  const int log2 = 63 - __clzll(static_cast<long long>(cost | 8));
#else
  const int log2 = 63 - __builtin_clzl(cost | 8);
#endif
  return kCostBuckets - 1 - ((log2 << 3) | int((cost >> (log2 - 3)) & 7));
}

// How many of the kv heads have their keys and values in L2 at the same time, at least one: L2 holds l2_keys of one head, and the requests
// of a list have `keys`. The result is all heads, or a power of two: a few heads left over would end late.
inline int heads_in_l2(long l2_keys, long keys, int num_kv_heads) {
  int heads = int(clamped(l2_keys / larger(keys, 1), 1, num_kv_heads));
  if (heads < num_kv_heads)
    while ((heads & (heads - 1)) != 0) heads &= heads - 1;
  return heads;
}

// Splits of an item that cost the same. There are three kinds, in the order of a list: the first split, those in the middle, the last one.
struct EqualSplits {
  int bucket, count, first;  // first: number of the first of them
};
constexpr int kSplitKinds = 3;
inline EqualSplits equal_splits(const CutItem& item, int kind, bool cost_by_keys) {
  const WorkItem& w = item.whole;
  const int queries = cost_by_keys ? 1 : w.q_end - w.q_begin, last = item.num_splits - 1;
  if (kind == 0) return {cost_bucket(queries, (last > 0 ? item.first_end : w.kv_end) - w.kv_begin), 1, 0};
  if (last == 0) return {0, 0, 0};
  if (kind == 1) return {cost_bucket(queries, item.split), last - 1, 1};
  return {cost_bucket(queries, w.kv_end - item.first_end - (last - 1) * item.split), 1, last};
}

}  // namespace imbrex

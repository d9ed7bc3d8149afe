// See shared_prefixes.h.
#include "attention/shared_prefixes.h"

#include <algorithm>
#include <functional>

namespace imbrex {
namespace {

constexpr int kLeastKeys = 256;       // of a prefix that is worth items of its own
constexpr int64_t kLeastPiece = 256;  // keys, below which a partial result is not worth it

using Item = PrefixScratch::Item;

class Prefixes {
 public:
  Prefixes(const Batch& batch, const KeySource& keys, const PrefixPolicy& policy, PrefixScratch& scratch)
      : batch_(batch), keys_(keys), policy_(policy), s_(scratch) {}

  bool run(Schedule& list) {
    if (!collect()) return false;
    s_.items.clear(), s_.path.clear(), s_.parts_of.clear();
    s_.first_parts.assign(1, 0);
    walk(0, int(s_.requests.size()), 0);
    if (!pays()) return false;
    cut();
    if (!has_room()) return false;
    write(list);
    return true;
  }

 private:
  int length(int i) const { return batch_.seq_lens[size_t(s_.requests[size_t(i)])]; }
  int queries(int i) const { return batch_.query_len(s_.requests[size_t(i)]); }
  int token(int i) const { return batch_.query_start_loc[size_t(s_.requests[size_t(i)])]; }
  // Keys that all queries of a request see, and that leave it some of its own.
  int context(int i) const { return length(i) - queries(i); }

  // False: a request has no keys at all.
  bool collect() {
    s_.requests.clear(), s_.common.clear();
    for (int r = 0; r < batch_.num_reqs(); ++r) {
      const int q_len = batch_.query_len(r);
      if (q_len == 0 || q_len > policy_.max_q) continue;
      if (batch_.seq_lens[size_t(r)] == 0) return false;
      s_.requests.push_back(r);
    }
    for (int i = 0; i + 1 < int(s_.requests.size()); ++i) s_.common.push_back(keys_in_common(i));
    return true;
  }

  // Of a request and the next one, if their query tokens are neighbours: whole tiles.
  int keys_in_common(int i) const {
    if (token(i) + queries(i) != token(i + 1)) return 0;
    const int most = std::max(std::min(context(i), context(i + 1)), 0), blocks = most / policy_.block_size;
    const int32_t *const a = keys_.ids_of(s_.requests[size_t(i)]), *const b = keys_.ids_of(s_.requests[size_t(i) + 1]);
    const int same = int(std::mismatch(a, a + blocks, b).first - a);
    return same * policy_.block_size / policy_.tile_kv * policy_.tile_kv;
  }

  // Requests [first, last), whose keys up to `from` are in the items of the path.
  void walk(int first, int last, int from) {
    for (int i = first, end = first; i < last; i = end) {
      int shared = INT32_MAX;
      for (end = i + 1; end < last && s_.common[size_t(end - 1)] - from >= kLeastKeys; ++end)
        shared = std::min(shared, s_.common[size_t(end - 1)]);
      if (end - i == 1) {
        add_own(i, from);
        continue;
      }
      s_.path.push_back(int(s_.items.size()));
      add_prefix(i, end, from, shared);
      walk(i, end, shared);
      s_.path.pop_back();
    }
  }

  void add(int first, int last, int from, int to) {
    s_.items.push_back({first, last, token(first), token(last - 1) + queries(last - 1), from, to});
  }

  // Items of as many of the requests as a tile has rows for, all of about one number.
  void add_prefix(int first, int last, int from, int to) {
    const int tokens = token(last - 1) + queries(last - 1) - token(first), tiles = (tokens + policy_.tile_q - 1) / policy_.tile_q;
    const int most = std::max((tokens + tiles - 1) / tiles, policy_.max_q);
    for (int begin = first, end = first; begin < last; begin = end) {
      while (end < last && token(end) + queries(end) - token(begin) <= most) ++end;
      add(begin, end, from, to);
    }
  }

  void add_own(int i, int from) {
    for (const int first : s_.path) {
      int number = first;
      while (s_.items[size_t(number)].last <= i) ++number;
      s_.parts_of.push_back(number);
    }
    s_.parts_of.push_back(int(s_.items.size()));
    s_.first_parts.push_back(int(s_.parts_of.size()));
    add(i, i + 1, from, length(i));
  }

  int64_t cost(int keys) const { return int64_t(keys) + policy_.split_cost; }

  bool pays() {
    if (s_.items.size() == s_.requests.size()) return false;
    int64_t apart = 0;
    for (size_t i = 0; i < s_.requests.size(); ++i) apart += cost(length(int(i)));
    cost_ = 0;
    for (const Item& item : s_.items) cost_ += cost(item.kv_end - item.kv_begin);
    return cost_ * 100 <= apart * policy_.most_percent;
  }

  // Each worker gets its share of the list. Rows of the partial buffers are numbered.
  void cut() {
    const int64_t share = std::max(cost_ / std::max(policy_.num_workers, 1), kLeastPiece);
    num_work_ = 0, rows_ = 0;
    for (Item& item : s_.items) {
      const int tiles = (item.kv_end - item.kv_begin + policy_.tile_kv - 1) / policy_.tile_kv;
      const int wanted = int(std::clamp<int64_t>((int64_t(item.kv_end) - item.kv_begin + share / 2) / share, 1, tiles));
      const int each = (tiles + wanted - 1) / wanted;
      item.piece = each * policy_.tile_kv, item.pieces = (tiles + each - 1) / each;
      num_work_ += item.pieces;
    }
    for (size_t i = 0; i < s_.requests.size(); ++i)
      if (is_alone(i)) own_of(i).first_row = kOutput;
    for (Item& item : s_.items) {
      if (item.first_row == kOutput) continue;
      item.first_row = policy_.first_partial + int(rows_);
      rows_ += int64_t(item.pieces) * (item.q_end - item.q_begin);
    }
  }

  int num_parts(size_t i) const { return s_.first_parts[i + 1] - s_.first_parts[i]; }
  Item& own_of(size_t i) const { return s_.items[size_t(s_.parts_of[size_t(s_.first_parts[i + 1] - 1)])]; }
  // Whether a request has one piece, whose results are outputs.
  bool is_alone(size_t i) const { return num_parts(i) == 1 && own_of(i).pieces == 1; }

  bool has_room() const {
    int64_t parts = 0;
    for (size_t i = 0; i < s_.requests.size(); ++i)
      for (int part = s_.first_parts[i]; part < s_.first_parts[i + 1]; ++part) parts += s_.items[size_t(s_.parts_of[size_t(part)])].pieces;
    return num_work_ <= policy_.most_work && int64_t(s_.requests.size()) <= policy_.most_merges && parts <= policy_.most_parts &&
           policy_.first_partial + rows_ <= policy_.most_partial_rows;
  }

  void write(Schedule& list) const {
    list.clear();
    for (size_t i = 0; i < s_.requests.size(); ++i) {
      if (is_alone(i)) continue;
      const int first = int(list.details.parts.size());
      for (int part = s_.first_parts[i]; part < s_.first_parts[i + 1]; ++part) {
        const Item& item = s_.items[size_t(s_.parts_of[size_t(part)])];
        for (int piece = 0; piece < item.pieces; ++piece)
          list.details.parts.push_back(item.first_row + piece * (item.q_end - item.q_begin) + token(int(i)) - item.q_begin);
      }
      own_of(i).merge = int(list.merges.size());
      list.merges.push_back({token(int(i)), token(int(i)) + queries(int(i)), first, int(list.details.parts.size()) - first});
    }
    for (const Item& item : s_.items)
      for (int piece = 0; piece < item.pieces; ++piece) {
        const int begin = item.kv_begin + piece * item.piece, tokens = item.q_end - item.q_begin;
        list.work.push_back({.table = s_.requests[size_t(item.first)],
                             .q_begin = item.q_begin,
                             .q_end = item.q_end,
                             .kv_begin = begin,
                             .kv_end = std::min(begin + item.piece, item.kv_end),
                             .partial = item.first_row == kOutput ? -1 : item.first_row + piece * tokens,
                             .merge = item.merge});
      }
    const auto keys_of = [](const WorkItem& item) { return item.kv_end - item.kv_begin; };
    std::ranges::stable_sort(list.work, std::greater{}, keys_of);
    list.num_work = int(list.work.size()), list.num_partial_rows = int(rows_);
  }

  static constexpr int kOutput = -2;  // Item::first_row: its results are outputs

  const Batch& batch_;
  const KeySource& keys_;
  const PrefixPolicy& policy_;
  PrefixScratch& s_;
  int64_t cost_ = 0, num_work_ = 0, rows_ = 0;
};

}  // namespace

bool share_prefixes(const Batch& batch, const KeySource& keys, const PrefixPolicy& policy, Schedule& list, PrefixScratch& scratch) {
  return Prefixes(batch, keys, policy, scratch).run(list);
}

}  // namespace imbrex

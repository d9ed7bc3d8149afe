// See balance.h.
//
// Keys are counted in tiles. A worker has a share: so many tiles, of which each split that it computes costs some besides its own. Shares
// are dealt out in one of two ways:
//   apart: every split has a worker of its own, so that each item is cut into as many splits as it takes;
//   in a row: a worker begins where the one before it ended, be it in the middle of an item (McNaughton's rule for preemptive machines).
//     It ends one item, computes whole ones, and begins another.
// Workers take splits from a queue, each when it has ended one. Splits of a row are in it in the order of their places in the shares: so
// each worker gets the splits of one share, because the first to end is the one whose next split has the first place. Other lists are in
// the usual order, longest first.
#include "attention/balance.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "attention/cut_item.h"

namespace imbrex {
namespace {

constexpr int64_t kSplitKeys = 128;  // what a split costs besides its own keys: its beginning, its end, its merge
constexpr int64_t kLeastTiles = 2;   // of a split
constexpr int64_t kMostSplits = 64;  // of an item, where splits cost something
constexpr int64_t kManyItems = 3;    // for each worker
// By so many per cent a row has to end sooner than splits apart, or than whole items: it has more splits than the one, and more to merge
// than the other. Requests with the same keys can share them where they are apart.
constexpr int64_t kGainOfRow = 5;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Shares {
 public:
  Shares(const Batch& batch, const SchedulePolicy& policy, Schedule& list)
      : policy_(policy),
        list_(list),
        items_(list.items),
        workers_(std::max(policy.num_workers, 1)),
        split_cost_(divide_up(kSplitKeys, policy.tile_kv)) {
    for (CutItem& item : items_) {
      if (batch.query_len(item.whole.table) > policy.split_max_q) continue;
      tiles_of(item) = int((unsigned(item.whole.kv_end - item.whole.kv_begin) + unsigned(policy.tile_kv - 1)) / unsigned(policy.tile_kv));
      all_ += tiles_of(item), longest_ = std::max<int64_t>(longest_, tiles_of(item)), ++count_;
    }
  }

  void deal_out() {
    const int64_t whole = std::max<int64_t>(longest_, 1) + split_cost_;
    // Whole items that are many, and none of them long, end at the same time by the order of the queue alone, longest first.
    const bool in_time = !about_one_length(longest_, all_, count_) && count_ > kManyItems * workers_ && longest_ <= all_ / workers_ / 2;
    if (longest_ == 0 || in_time) return cut_apart(whole);
    const int64_t share = least_share();
    // A worker of a row leaves less than a split, and has one more than its part of the items.
    const int64_t row =
        least_that(share, share + 2 * split_cost_ + kLeastTiles + 1, [&](int64_t s) { return workers_in_row(s) <= workers_; });
    int64_t apart = divide_up(count_, workers_) * whole;
    if (count_ <= workers_) apart = least_that(share, whole, [&](int64_t s) { return workers_apart(s) <= workers_; });
    if (row * (100 + kGainOfRow) < apart * 100) {
      cut_in_row(row);
    } else {
      cut_apart(apart);
    }
  }

 private:
  // An item that is whole has no use for the length of its splits: until it is cut, that is its number of tiles; 0: it stays whole.
  static int& tiles_of(CutItem& item) { return item.split; }

  // What no worker has less than.
  int64_t least_share() const {
    int64_t least = kLeastTiles;
    if (policy_.split_cost > 0) {  // pieces of x keys, and a split_cost for each of them, end soonest with x = sqrt(split_cost * keys)
      const int64_t keys = int64_t(std::sqrt(double(policy_.split_cost) * double(longest_) * policy_.tile_kv));
      least = std::max({least, divide_up(keys, policy_.tile_kv), divide_up(longest_, kMostSplits)});
    }
    return std::max(divide_up(all_ + split_cost_ * count_, workers_), least + split_cost_);
  }

  // The least number of [from, to) that suffices, or `to`, which does.
  template <class Suffices>
  static int64_t least_that(int64_t from, int64_t to, const Suffices& suffices) {
    while (from < to) {
      const int64_t middle = (from + to) / 2;
      if (suffices(middle)) {
        to = middle;
      } else {
        from = middle + 1;
      }
    }
    return to;
  }

  int64_t workers_apart(int64_t share) const {
    int64_t workers = 0;
    for (CutItem& item : items_) workers += divide_up(tiles_of(item), share - split_cost_);
    return workers;
  }

  // Where little of the longest item would be left over, its splits are made so much longer: a small one costs more than it relieves others
  // of.
  void cut_apart(int64_t share) {
    constexpr int64_t kLeftOver = 8;  // an eighth of a split, which is spread over all splits of the item
    int64_t split = share - split_cost_;
    const int64_t splits = longest_ / split;
    if (splits > 0 && longest_ % split <= split / kLeftOver) split = divide_up(longest_, splits);
    for (CutItem& item : items_) cut(item, split, split);
  }

  // Calls visit(item, first, each) for all items: of how many tiles the first and each further split may be, where the first one ends a
  // share. Returns the number of workers.
  template <class Visit>
  int64_t in_row(int64_t share, const Visit& visit) const {
    const int64_t each = share - split_cost_;
    int64_t workers = 0, left = 0;  // left: of the last worker's share
    for (CutItem& item : items_) {
      const int64_t tiles = tiles_of(item);
      if (tiles == 0) continue;
      if (left < split_cost_ + kLeastTiles) ++workers, left = share;
      const int64_t first = left - split_cost_, more = tiles > first ? divide_up(tiles - first, each) : 0;
      visit(item, first, each);
      workers += more;
      left = first + more * each - tiles;
    }
    return workers;
  }
  int64_t workers_in_row(int64_t share) const {
    return in_row(share, [](CutItem&, int64_t, int64_t) {});
  }
  void cut_in_row(int64_t share) {
    list_.places.assign(items_.size(), 0);
    list_.share = share;
    in_row(share, [&](CutItem& item, int64_t first, int64_t each) {
      list_.places[size_t(&item - items_.data())] = each - first;
      cut(item, first, each);
    });
  }

  // Into splits of so many tiles.
  void cut(CutItem& item, int64_t first, int64_t each) const {
    const int64_t tiles = tiles_of(item);
    item.split = 0;
    if (tiles <= first) return;
    item.num_splits = int(1 + divide_up(tiles - first, each));
    item.first_end = int(item.whole.kv_begin + first * policy_.tile_kv);
    item.split = int(std::min<int64_t>(each * policy_.tile_kv, INT32_MAX));
  }

  const SchedulePolicy& policy_;
  Schedule& list_;
  const std::span<CutItem> items_;
  const int64_t workers_, split_cost_;         // split_cost_: in tiles
  int64_t all_ = 0, longest_ = 0, count_ = 0;  // tiles of the items that may be cut, and of the longest; their number
};

}  // namespace

void balance(const Batch& batch, const SchedulePolicy& policy, Schedule& list) { Shares(batch, policy, list).deal_out(); }

}  // namespace imbrex

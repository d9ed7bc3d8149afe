#pragma once
// schedule(): the one pure function that cuts a batch into work items. CPU threads and CUDA thread blocks consume the same list.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "imbrex/batch.h"
#include "imbrex/spec.h"
#include "imbrex/work.h"

namespace imbrex {

struct SchedulePolicy {
  int tile_q = 64;        // query tokens of an item at most
  int tile_kv = 128;      // key ranges begin at multiples of this (counted from the request's first key)
  int split_kv = 4096;    // a split boundary is a multiple of this; a multiple of tile_kv
  int split_max_q = 16;   // requests with more query tokens than this are not split
  bool balanced = false;  // deal the visible keys out to num_workers evenly instead: faster for few long requests, not batch-invariant
  int num_workers = 1;    // items that run at a time; looked at when balanced, and with runs
  // Keys that a split costs besides its own. Looked at when balanced: a long item is cut into as many pieces as end soonest.
  int split_cost = 0;

  // For kernels whose list has to fit memory of a fixed size. All of it depends on the request alone. An item's keys are divided evenly:
  // into as many pieces as have split_kv keys or more, but into share_splits pieces at most. Where these would have more than longest_kv
  // keys there are more pieces, up to max_splits.
  int max_splits = 0;  // 0: off, and the other two are not used
  int share_splits = INT32_MAX;
  int longest_kv = INT32_MAX;
  int max_split_rows = 0;  // query tokens of a request times its pieces at most; with max_splits only; 0: off
  int split_kv_each = 0;   // a request of n query tokens has pieces of n * split_kv_each keys or more, as far as longest_kv allows
  int min_q = 0;           // only requests with min_q to max_q query tokens are cut: the others are in the list of another shape of
  int max_q = INT32_MAX;   // the kernel
  int first_partial = 0;   // first row of the partial buffers to use: another list may use those before it

  // For kernels that take runs of pieces; with max_splits only, and not when balanced. An item may be a run: the pieces of a node of
  // kPiecesTogether's tree, or all pieces of a tile of queries if they are fewer, as long as there are enough items for all workers.
  // A tile then has 256 pieces at most: with more, long runs would be nodes of another tree.
  bool runs = false;
  int most_in_run = kMostInRun;  // pieces of a run at most: 4, 16 or 64
  int most_partial_rows = 0;     // runs become longer where the list would use partial rows from this number on, up to most_in_run; 0: off
  bool few_splits = false;       // the splits of a list are bounded for each worker; needs max_splits <= most_in_run, and no longest_kv
  int items_each = 1;    // items that a worker runs at a time where none has more than tile_q / items_each query tokens; divides tile_q
  int workers_each = 1;  // how many of num_workers share a multiprocessor and its speed

  // An item's cost is its number of keys, however many query tokens it has: for kernels that are bound by memory. So the tiles of a request
  // are neighbours in the list, and the second one finds its keys in L2.
  bool cost_by_keys = false;
};

// What a list says where its items are not each one request's tokens against one range of keys. Each array is empty where the list has
// nothing of that kind; the usual list has none of them.
struct ListDetails {
  // Query tokens of the items, which q_begin and q_end count in. The first ones are the batch's tokens in their order, so that an item of
  // neighbouring tokens says what it says without this array; behind them are the tokens of items that several requests share.
  std::vector<int> tokens;
  std::vector<int> request_of;  // with tokens: of each token of the batch
  std::vector<int> merge_of;    // likewise, of each token behind them: the merge that joins its partial row
  std::vector<int> parts;  // the rows of the partial buffers with which the parts of merges begin: MergeItem::first_partial counts here
  std::vector<ItemDetails> items;
  std::vector<KeyStretch> stretches;

  void clear() { tokens.clear(), request_of.clear(), merge_of.clear(), parts.clear(), items.clear(), stretches.clear(); }
};

struct Schedule {
  std::vector<WorkItem> work;     // longest first, but for `places`
  std::vector<MergeItem> merges;  // empty when nothing was split
  int num_partial_rows = 0;       // rows (token, split) of the partial buffers in use
  int num_work = 0;               // splits of all items
  bool cost_by_keys = false;      // SchedulePolicy::cost_by_keys, for write_work()
  std::vector<CutItem> items;
  // Where balanced shares may begin within items, each item's place in the share that it begins in, and the length of a share: `work` is
  // in the order of places then, since workers that take it in that order get the shares. Empty otherwise.
  std::vector<int64_t> places;
  int64_t share = 0;
  ListDetails details;  // of `work` and `merges`; schedule() leaves it empty

  void clear() {
    work.clear(), merges.clear(), items.clear(), places.clear(), details.clear();
    num_partial_rows = num_work = 0;
  }
};

// Cuts every request by its queries (tile_q) and, where it has few of them, by its keys (split_kv). Keys that the mask hides
// from a whole item are left out. By default the cut of a request into pieces depends on that request alone; which of them are items of
// their own and which make a run may depend on the batch, and changes no result. Items do not name a kv head: every item is run for every
// kv head. `out` keeps its capacity, so that a warm call allocates nothing.
void schedule(const Batch&, const Mask&, const SchedulePolicy&, Schedule& out);
// schedule() in two steps, for a list that is written where a kernel reads it: cut() does not touch `work`, and write_work() writes
// num_work items, longest first. `seen`, where there is one: of an item of a request, by its first query, the keys that any of its queries
// sees besides what the mask says, from the beginning of a tile; an item has no others.
using SeenKeys = std::function<KeyStretch(int request, int first_query)>;
void cut(const Batch&, const Mask&, const SchedulePolicy&, Schedule& out, const SeenKeys& seen = {});
void write_work(const Schedule&, WorkItem* to);

// The largest list that a policy makes of any batch within the limits.
struct ScheduleBounds {
  int64_t num_work = 0, num_merges = 0, num_partial_rows = 0;
};
ScheduleBounds schedule_bounds(const SchedulePolicy&, const PlanLimits&);
// The most partial rows of several lists that share them, each beginning where the one before ended; no request is in two of the lists.
int64_t partial_rows_bound(std::span<const SchedulePolicy>, const PlanLimits&);

}  // namespace imbrex

#pragma once
// schedule(): the one pure function that cuts a batch into work items. CPU threads and CUDA thread blocks consume the same list.
#include <cstdint>
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
  bool balanced = false;  // split the visible keys evenly over num_workers instead: faster for few long requests, not batch-invariant
  int num_workers = 1;    // items that run at a time; looked at when balanced, and with runs

  // For kernels that read their list from memory of a fixed size (0 and 1: off). All of it depends on the request alone.
  int max_splits = 0;            // pieces of an item at most; they are even then, with split_kv keys each, or more where that makes
  int share_splits = INT32_MAX;  // so many pieces, but no more keys than
  int longest_kv = INT32_MAX;    // these, as far as max_splits allows
  int max_split_rows = 0;        // query tokens of a request times its pieces at most; with max_splits only
  int split_kv_each = 0;         // a request of n query tokens has pieces of n * split_kv_each keys or more, as far as longest_kv allows
  int min_q = 0;                 // only requests with this many query tokens or more are cut,
  int max_q = INT32_MAX;         // and with this many or fewer: the others belong to the list of another kernel
  int first_partial = 0;         // first row of the partial buffers to use: another list may have those before

  // For kernels that take them, with max_splits only, and not when balanced: items may be runs of as many pieces as a node of
  // kPiecesTogether's tree has, or of all pieces of a tile of queries where there are no more, as long as the load keeps the workers busy.
  // A tile has 256 pieces at most then: where there are more, the tree would be another one for long runs.
  bool runs = false;
  int most_in_run = kMostInRun;  // pieces of a run at most: 4, 16 or 64
  int most_partial_rows = 0;     // runs become longer where partial rows would end behind this number, as far as most_in_run allows; 0: off
  bool few_splits = false;       // the splits of a list are bounded for each worker; needs max_splits <= most_in_run, and no longest_kv
  int items_each = 1;    // items that a worker runs at a time where none has more than tile_q / items_each query tokens; divides tile_q
  int workers_each = 1;  // of num_workers, those that share a multiprocessor, and its pace

  // An item costs what its keys do, however many query tokens it has: where memory sets the pace. So the tiles of a request stand together
  // in a list, and the second one finds its keys in L2.
  bool cost_by_keys = false;
};

struct Schedule {
  std::vector<WorkItem> work;     // longest first
  std::vector<MergeItem> merges;  // empty when nothing was split
  int num_partial_rows = 0;       // rows (token, split) of the partial buffers in use
  int num_work = 0;               // splits of all items
  bool cost_by_keys = false;      // the policy's, for write_work()
  std::vector<CutItem> items;
};

// Cuts every request by its queries (tile_q) and, where it has few of them, by its keys (split_kv). Keys that the mask hides
// from a whole item are left out. By default the cut of a request into pieces depends on that request alone; which of them are items of
// their own and which make a run may depend on the batch, and changes no result. Items do not name a kv head: every item is run for every
// kv head. `out` keeps its capacity, so that a warm call allocates nothing.
void schedule(const Batch&, const Mask&, const SchedulePolicy&, Schedule& out);
// The same in two steps, for a list that is written where a kernel reads it: cut() leaves `work` as it is, and write_work() writes
// num_work items, longest first.
void cut(const Batch&, const Mask&, const SchedulePolicy&, Schedule& out);
void write_work(const Schedule&, WorkItem* to);

// What no batch within the limits exceeds; every batch must have been cut by the same policy.
struct ScheduleBounds {
  int64_t num_work = 0, num_merges = 0, num_partial_rows = 0;
};
ScheduleBounds schedule_bounds(const SchedulePolicy&, const PlanLimits&);
// Of cuts that share the partial rows, each beginning where the one before ended; no request belongs to two of them.
int64_t partial_rows_bound(std::span<const SchedulePolicy>, const PlanLimits&);

}  // namespace imbrex

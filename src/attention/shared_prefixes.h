#pragma once
// Neighbouring requests of a step that begin with the same blocks read these once, in items of the query tokens of all of them: with the
// tiles of a kernel that has rows for many, on as many levels as there are. How a request's keys are cut depends on its neighbours then, as
// in balanced lists; items that are shared without that are those of shared_keys.h. Used by balanced plans for GPUs (cuda/plan).
#include <cstdint>
#include <vector>

#include "attention/key_source.h"
#include "imbrex/schedule.h"

namespace imbrex {

struct PrefixPolicy {
  int block_size = 1;
  int tile_q = 1, tile_kv = 1;  // as in SchedulePolicy, and so are num_workers and first_partial
  int num_workers = 1;
  int split_cost = 0;  // keys that an item costs besides its own
  int max_q = 1;       // query tokens of the requests that the list is of; others are in other lists
  int first_partial = 0;
  int most_percent = 80;  // of the keys of a list without shared items, up to which one with such ends sooner
  // What there is room for.
  int64_t most_work = 0, most_merges = 0, most_parts = 0, most_partial_rows = 0;
};

// What share_prefixes() keeps between its calls, so that a warm one allocates nothing.
struct PrefixScratch {
  // Query tokens of neighbouring requests, numbers in `requests`, which see all of these keys; or of one request, with its other keys.
  struct Item {
    int first, last;  // requests
    int q_begin, q_end, kv_begin, kv_end;
    int pieces = 1, piece = 0;  // keys of a piece
    int first_row = -1, merge = -1;
  };
  std::vector<int> requests, common;  // common: keys of requests[i] and the next one
  std::vector<Item> items;
  std::vector<int> path;                   // the first of the items of each prefix, down to where the walk is
  std::vector<int> parts_of, first_parts;  // items of the requests, one request behind the other
};

// Makes the list of the requests with 1 to max_q query tokens if some share so much that it is worth it (most_percent), and there is room;
// not where one of them has no keys. False: it is left as it was. The list has no Schedule::items; its work is in order, and its merges
// have parts. Every query has to see all keys in front of its request's queries, and logits must not depend on positions
// (is_position_free()).
bool share_prefixes(const Batch&, const KeySource&, const PrefixPolicy&, Schedule&, PrefixScratch&);

}  // namespace imbrex

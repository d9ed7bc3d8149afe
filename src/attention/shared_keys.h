#pragma once
// Requests of a step whose keys are the same blocks, say those of a common system prompt, share the items that read them: the keys are then
// read once for all of them, and no longer once for each. (FlashInfer and vLLM: cascade attention; SGLang: the shared prefix of a radix
// tree. There the engine says what is shared; here the block ids do.)
#include <atomic>
#include <cstdint>
#include <vector>

#include "attention/key_source.h"
#include "imbrex/schedule.h"

namespace imbrex {

// What an item may be shared by.
struct SharePolicy {
  int block_size = 1;
  int most_tokens = 1;  // query tokens of a shared item
  // Items that run at a time. A shared item has fewer tokens where it would be more than half of what each of them has to do. 0: an item
  // takes as long for many tokens as for one, so that this does not matter.
  int num_workers = 0;
  // For shorten_runs(): what items of several requests cost a list beside their keys, in keys of a worker. A list that would end sooner by
  // less shares nothing; below 0 one shares what it can.
  int overhead_keys = 0;
  // Only keys that each of the item's queries sees are shared: the queries' positions are then of no account.
  bool seen_by_all = false;
  // With seen_by_all: a mask that has windows or chunks. Kernels take the query tokens of a shared item to stand behind each other from its
  // last key on, so most_tokens of them see all of its keys there too. Null: there are none.
  const Mask* windows = nullptr;
};

constexpr int kShareWherever = -(1 << 20);  // SharePolicy::overhead_keys with which all is shared that can be

// While one lives, plans for GPUs share wherever they can, which steps as short as those of tests do not gain from.
class SharingWherever {
 public:
  SharingWherever() { ++living; }
  ~SharingWherever() { --living; }
  SharingWherever(const SharingWherever&) = delete;
  SharingWherever& operator=(const SharingWherever&) = delete;

  static inline std::atomic<int> living = 0;
};
// SharePolicy::overhead_keys of plans for GPUs, fitted on an H200 to steps of 2 to 16 requests of 600 to 8292 keys, 32/8 and 32/2 heads:
// the shortest of these take longer with shared items.
inline int plan_overhead_keys() { return SharingWherever::living > 0 ? kShareWherever : 250; }

// Whether an item of this layer is the same for queries at any positions that see all of its keys: no logit depends on a position or on
// what else a request has of its own, and what hides a key goes by indices and positions alone.
bool is_position_free(const AttentionSpec&);
// What SharePolicy::windows is for a layer's mask.
const Mask* windows_of(const Mask&);

inline int num_queries(const WorkItem& item) { return item.q_end - item.q_begin; }
// The least and the greatest position that an item's queries have among the keys of their request.
int first_position(const Batch&, const WorkItem&);
int last_position(const Batch&, const WorkItem&);

// What share_keys() and shorten_runs() keep between their calls, so that a warm one allocates nothing.
struct ShareScratch {
  struct Piece {
    int kv_begin, kv_end, piece, first_id, last_id, item;
  };
  std::vector<Piece> pieces;
  std::vector<WorkItem> items;
  std::vector<int> first_part, group_end;
  struct Start {
    int first_id, piece, queries;
    int samples[3];  // ids of further blocks: requests that have more blocks in common are neighbours
    int item, common;
  };
  struct First {
    int id, item;
  };
  std::vector<First> firsts;  // blocks of requests
  std::vector<int> table;     // by a hash of the id: numbers in `firsts`, from 1 on; 0: none
  std::vector<Start> starts;
};

// Joins items of a list that schedule() has made: those with partial results whose keys are the same blocks of a table. Partial rows are
// numbered anew, from the first one of the list on, as many as there were, and merges get parts. Results of kernels whose rows depend on
// their own query and keys alone keep their bits, as do those of the merges, because the pieces of a request stay what they were, and an
// item may be a run of them only where all its requests have that run. A list without such items stays as it is.
void share_keys(const Batch&, const KeySource&, const SharePolicy&, Schedule&, ShareScratch&);

// For a list that cut() has made, in front of write_work() and share_keys(): false if no two of its requests begin with the same block, or
// if the list would hardly end sooner, so that there is nothing to share. Where it would, and the policy allows runs of pieces, runs of
// these requests get one length: the one with which the list ends soonest if what they have in common is read once for as many of them as
// an item takes. Runs that end within the common keys can be shared; long ones seldom do.
bool shorten_runs(const Batch&, const KeySource&, const SharePolicy&, const SchedulePolicy&, Schedule&, ShareScratch&);

}  // namespace imbrex

#pragma once
// One scheduler step as arrays: what the scheduler writes, a Batch views, and the replay makes inputs of layers from.
#include <cstdint>
#include <vector>

#include "imbrex/batch.h"
#include "serve/drafts.h"
#include "serve/trace.h"

namespace imbrex::serve {

// Identity of a request's token: equal where requests share a prefix, different everywhere else.
uint64_t token_id(uint64_t seed, const TraceRequest&, int prefix_block, int id, int position);

// Requests with one token left to compute (they decode) come first, then those with a piece of their prompt; the arrays are per
// request in that order. Kept by the caller from step to step, so that a step writes only what changed.
struct StepPlan {
  struct Group {  // of pages; empty for a group of states
    struct Row {
      int64_t stamp = -1;  // admission that the row belongs to
      size_t filled = 0;   // entries that are up to date
    };
    std::vector<int32_t> block_table;   // [max_num_seqs, stride]; entries before a window are valid ids that nobody reads
    std::vector<int64_t> slot_mapping;  // [num_tokens]
    std::vector<int64_t> kept_slots;    // [num_tokens]: where a draft that is kept has its key from then on, if not where it is; else -1
    std::vector<Row> rows;              // [max_num_seqs]
  };
  std::vector<int32_t> query_start_loc;  // [num_reqs + 1]
  std::vector<int32_t> seq_lens;         // [num_reqs], this step's tokens included
  std::vector<int32_t> request_ids;      // [num_reqs], as given to Scheduler::add
  std::vector<int32_t> first_positions;  // [num_reqs], of the first query
  std::vector<int32_t> fresh_from;       // [num_reqs], tokens before this position were computed before, ahead of a preemption
  std::vector<uint8_t> makes_token;      // [num_reqs], 1: an output token is made from the last query
  std::vector<int32_t> state_slots;      // [num_reqs], the same in all groups of states; empty: the model keeps none
  std::vector<int32_t> source_slots;     // [num_reqs], where each reads what it has of the past: its own, or one that is kept of a prefix
  std::vector<Drafts> drafts;            // [num_reqs], behind a request's last certain token; empty: none are made
  std::vector<int32_t> num_drafts, accepted_drafts, draft_parents;  // the same as Batch has it, with the drafts of the step before
  std::vector<int32_t> positions;                                   // [num_tokens], as Batch has them; empty: no request has images
  std::vector<Group> groups;                                        // per cache group
  int64_t stride = 0;                                               // entries of a block table row
  bool moves = false;                                               // kept_slots has a slot of any draft
  uint64_t owner = 0;                                               // the scheduler that keeps the rows up to date; 0: none yet

  int num_reqs() const { return int(seq_lens.size()); }
  int num_tokens() const { return query_start_loc.empty() ? 0 : query_start_loc.back(); }
  int certain_tokens(int request) const {  // of the step
    return query_start_loc[size_t(request) + 1] - query_start_loc[size_t(request)] - (drafts.empty() ? 0 : drafts[size_t(request)].count());
  }
  int position(int request, int query) const;  // that the mask goes by
  bool decodes_only() const;                   // every request has one certain token
  Batch batch(int group) const;                // views of this plan
  // The same of a group of pages with kept_slots in place of slot_mapping: writing the step's keys and values once more moves those of
  // paths that are kept together. Only where `moves`.
  Batch kept_batch(int group) const;
};

}  // namespace imbrex::serve

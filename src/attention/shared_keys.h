#pragma once
// Requests of a step whose keys are the same blocks, say those of a common system prompt, share the items that read them: the keys are then
// read once for all of them, and no longer once for each. (FlashInfer and vLLM: cascade attention; SGLang: the shared prefix of a radix
// tree. There the engine says what is shared; here the block ids do.)
#include <vector>

#include "attention/key_source.h"
#include "imbrex/schedule.h"

namespace imbrex {

// What share_keys() keeps between its calls, so that a warm one allocates nothing.
struct ShareScratch {
  struct Piece {
    int kv_begin, kv_end, first_id, last_id, item;
  };
  std::vector<Piece> pieces;
  std::vector<WorkItem> items;
  std::vector<int> first_part, group_end;
};

// Joins items of a list that schedule() has made: those with partial results whose keys are the same blocks of a table, up to most_tokens
// query tokens in one item, and fewer where that would be more than half of what each of `num_workers` (items that run at a time) has to
// do. Partial rows are numbered anew, from the first one of the list on, as many as there were, and merges get parts. Results of kernels
// whose rows depend on their own query and keys alone keep their bits, as do those of the merges, because the pieces of a request stay what
// they were. A list without such items stays as it is.
void share_keys(const Batch&, const KeySource&, int block_size, int most_tokens, int num_workers, Schedule&, ShareScratch&);

}  // namespace imbrex

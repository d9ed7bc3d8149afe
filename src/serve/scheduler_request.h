#pragma once
// What the scheduler keeps of cache groups and requests; for its own files alone.
#include <algorithm>
#include <vector>

#include "attention/mask.h"
#include "serve/scheduler.h"

namespace imbrex::serve {

inline int blocks_of(int64_t tokens, int block_size) { return int((tokens + block_size - 1) / block_size); }

struct Scheduler::Group {
  Group(int index, int num_blocks, const Mask& mask) : index(index), pool(num_blocks), mask(mask) {}
  int index;  // of the model's cache groups
  BlockPool pool;
  Mask mask;

  bool limited() const { return forgets(mask); }
  // Blocks that a request can hold at once while its `tokens` are computed in pieces of at most `piece`.
  int peak_blocks(int tokens, int piece, int block_size) const {
    const int all = blocks_of(tokens, block_size);
    if (!limited()) return all;
    return int(std::min<int64_t>(all, (most_earlier_keys(mask) + std::min(tokens, piece) - 1) / block_size + 2));
  }
};

struct Scheduler::Request {
  struct Table {
    std::vector<int32_t> blocks;  // entry per block of tokens
    int first_held = 0;           // entries before it were given back, or never held
    int published = 0;
    int held() const { return int(blocks.size()) - first_held; }
  };

  const TraceRequest* trace = nullptr;
  RequestRecord record;
  int64_t stamp = -1;             // of this admission
  int computed = 0;               // tokens whose k and v are in the caches, and that its states are of
  int ever_computed = 0;          // the same, before preemptions
  int generated = 0;              // output tokens
  int scheduled = 0;              // tokens of the step under way, its drafts included
  Drafts drafts;                  // of the step under way
  int accepted = 0;               // the last draft that was kept of the step before, as Batch has it
  int branch = 0;                 // the most tokens, in units of states, that other prompts were seen to share; 0: none
  bool admitted = false;          // ever
  std::vector<BlockHash> hashes;  // of full blocks, as far as they were needed
  std::vector<Table> tables;      // per group of pages
  std::vector<int32_t> slot;      // of its states: one while it runs, where the model keeps some
  std::vector<int32_t> source;    // the slot that its next step reads instead: of a state that is kept; none: its own

  int num_tokens() const { return trace->input_length + generated; }
  int remaining() const { return num_tokens() - computed; }
};

}  // namespace imbrex::serve

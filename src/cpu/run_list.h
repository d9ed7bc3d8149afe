#pragma once
// Runs a work list: its items for every kv head, and then its merges, on the threads of a plan.
#include "cpu/params.h"
#include "imbrex/parallel.h"
#include "imbrex/schedule.h"

namespace imbrex::cpu {

struct ScratchMemory {  // of each worker, one behind the other
  char* data;
  long bytes_each;
};

// Calls body(argument, worker) on every worker.
void invoke(const ParallelFor&, ParallelFor::Body, void* argument);

// Points the parameters at what a list says besides its items.
void set_details(const ListDetails&, AttentionParams&);

// `params` are those of the list: set_details() has been called. heads_together is 1 where an item is for one kv head only.
void run_list(const AttentionParams& params, const Kernels&, const Schedule&, ScratchMemory, const ParallelFor&);

}  // namespace imbrex::cpu

#pragma once
// Where the keys of a batch's requests are: a block table, CSR arrays or ragged rows, in one form for all who read it. Made once a step.
#include <cstdint>
#include <vector>

#include "imbrex/batch.h"

namespace imbrex {

struct KeySource {
  TensorView ids;           // i32, of blocks: block b of request r is element start[r] + b. Empty where keys are ragged, or there are none
  std::vector<long> start;  // [num_reqs]; ragged: row of k and v that the request's first key is

  const int32_t* ids_of(int request) const { return ids.as<const int32_t>() + start[size_t(request)]; }
};

// Fills `to`, which keeps its capacity. kv_indptr and kv_start_loc have to be in host memory; ids need not be.
void find_keys(const Batch&, KeySource& to);

}  // namespace imbrex

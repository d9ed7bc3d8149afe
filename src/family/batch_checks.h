#pragma once
// Checks of batches that all families need. They are called once a step, so they have to be cheap.
#include <string_view>

#include "imbrex/batch.h"

namespace imbrex {

// Checks that query_start_loc and seq_lens have the same number of requests, within the limits. queries_are_keys: a request must have at
// least as many keys as query tokens. Errors batch.num_reqs, batch.query_start_loc, batch.seq_len, batch.query_len, batch.num_tokens.
void check_lengths(const Batch&, const PlanLimits&, bool queries_are_keys);

// Checks what the host can see of a batch whose lengths are on a device: shapes of query_start_loc and seq_lens, and max_num_tokens. Errors
// batch.num_reqs.limit, batch.num_tokens.limit, batch.lengths.
void check_lengths(const DeviceBatch&, const PlanLimits&);
// Checks that a tensor is contiguous i32 [count] on the device. Error `code`, and tensor.*
void check_list(const TensorView&, const char* name, int64_t count, std::string_view code);
int max_tokens(const DeviceBatch&, const PlanLimits&);  // the most tokens that the step can have, as far as the host knows

}  // namespace imbrex

#pragma once
// What holds for the batches of every family. Called once a step, so it has to be cheap.
#include <string_view>

#include "imbrex/batch.h"

namespace imbrex {

// query_start_loc and seq_lens are lists of as many requests, within the limits. queries_are_keys: a request has as many keys as it has
// query tokens, or more. Errors batch.num_reqs, batch.query_start_loc, batch.seq_len, batch.query_len, batch.num_tokens.
void check_lengths(const Batch&, const PlanLimits&, bool queries_are_keys);

// Of lengths on a device, what the host can see: query_start_loc, seq_lens and max_num_tokens. Errors batch.num_reqs.limit,
// batch.num_tokens.limit, batch.lengths.
void check_lengths(const DeviceBatch&, const PlanLimits&);
// Contiguous i32 [count] on the device. Error `code`, and tensor.*
void check_list(const TensorView&, const char* name, int64_t count, std::string_view code);
int max_tokens(const DeviceBatch&, const PlanLimits&);  // of the step, as far as the host knows

}  // namespace imbrex

#pragma once
// What holds for the batches of every family. Called once a step, so it has to be cheap.
#include "imbrex/batch.h"

namespace imbrex {

// query_start_loc and seq_lens are lists of as many requests, within the limits. queries_are_keys: a request has as many keys as it has
// query tokens, or more. Errors batch.num_reqs, batch.query_start_loc, batch.seq_len, batch.query_len, batch.num_tokens.
void check_lengths(const Batch&, const PlanLimits&, bool queries_are_keys);

}  // namespace imbrex

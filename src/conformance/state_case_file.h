#pragma once
// What case files of families with states in slots share: the requests of a step as tensors.
#include "conformance/case_fields.h"
#include "conformance/state_case.h"
#include "family/state_step.h"

namespace imbrex {

// Takes query_start_loc and seq_lens, and with drafts in the spec also num_drafts and accepted_drafts, where they are there, and with trees
// of them draft_parents. Error case_file.*
StateCaseRequests take_state_requests(CaseTensors&, const StateDrafts&);
void add_state_requests(Safetensors&, const StateCaseRequests&, const StateDrafts&);

// Whether the requests have no drafts, now or before, so that a step may be cut anywhere.
bool have_no_drafts(const StateCaseRequests&);

}  // namespace imbrex

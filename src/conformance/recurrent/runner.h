#pragma once
// Runs one case through one backend of recurrent layers the way a server would: states in slots in shuffled order, far apart, among poison.
#include <functional>
#include <string>
#include <vector>

#include "conformance/recurrent/inputs.h"

namespace imbrex {

// How a case is run; none of it may change the result, but for steps, as RecurrentPlan says.
struct RecurrentRunOptions {
  Gaps gaps = Gaps::aligned;
  Poison poison = Poison::nan;
  int padding_tokens = 2;      // rows after the batch's tokens
  uint64_t slot_seed = 1;      // which slots the requests have
  int chunk = 0;               // > 0: requests' tokens come in steps of so many, without drafts
  int rows = 0;                // of q and all other tensors with tokens, at least as many as those and their padding; 0: just so many
  bool on_device = false;      // update_on_device()
  bool other_sources = false;  // requests read what they have of the past from other slots than those that they write
  ParallelFor threads;
  // The steps to run, each with the parts of requests that it computes. Empty: the case, in one step or in chunks.
  std::vector<StateParts> steps;
};
RecurrentRunOptions default_options(const RecurrentCase&);

struct RecurrentRunResult {
  std::vector<float> out;               // [T, num_v_heads, head_dim_v], of the last step that had the token
  HostTensor state;                     // as in the inputs: the rows written by a request's last step, else those of the inputs
  HostTensor conv_state;                // likewise, with a convolution in front
  std::vector<std::string> violations;  // writes to bytes that no request owns
};
bool same_bits(const RecurrentRunResult&, const RecurrentRunResult&);

RecurrentRunResult run_case(const BackendOf<RecurrentFamily>&, const DeviceInfo&, const RecurrentCaseInputs&, const RecurrentRunOptions&);
// Runs a case with an existing plan, whose limits must be large enough.
RecurrentRunResult run_case(RecurrentPlan&, const RecurrentCaseInputs&, const RecurrentRunOptions&);

}  // namespace imbrex

#pragma once
// Runs one case through one backend of the short convolution the way a server would: states in slots in shuffled order, far apart, among
// poison. Used by the conformance tests and `imbrex verify`.
#include <functional>
#include <string>
#include <vector>

#include "conformance/short_conv/inputs.h"

namespace imbrex {

using ShortConvPart = StatePart;
using ShortConvParts = StateParts;

// How a case is run; none of it may change the result.
struct ShortConvRunOptions {
  Gaps gaps = Gaps::aligned;
  Poison poison = Poison::nan;
  int padding_tokens = 2;      // rows after the batch's tokens
  uint64_t slot_seed = 1;      // which slots the requests have
  int chunk = 0;               // > 0: requests' tokens come in steps of so many, without drafts
  int rows = 0;                // > 0: tensors have so many rows in every step, the padding included
  bool on_device = false;      // update_on_device() instead of update(), by a mirror
  bool other_sources = false;  // requests read what they have of the past from other slots than those that they write
  ParallelFor threads;
  // The steps to run, each with the parts of requests that it computes. Empty: the case, in one step or in chunks.
  std::vector<ShortConvParts> steps;
  // Called instead of plan.run(), where a test wants to be there.
  std::function<void(const ShortConvPlan&, const ShortConvInputs&, const ShortConvOutputs&)> run;
};
ShortConvRunOptions default_options(const ShortConvCase&);

struct ShortConvRunResult {
  std::vector<float> out;               // [T, dim], of the last step that had the token
  HostTensor state;                     // [R, state_rows, dim]: the rows written by a request's last step, else those of the inputs
  std::vector<std::string> violations;  // writes to bytes that no request owns
};

ShortConvRunResult run_case(const BackendOf<ShortConvFamily>&, const DeviceInfo&, const ShortConvCaseInputs&, const ShortConvRunOptions&);
// Runs a case with an existing plan, whose limits must be large enough.
ShortConvRunResult run_case(ShortConvPlan&, const ShortConvCaseInputs&, const ShortConvRunOptions&);

}  // namespace imbrex

#pragma once
// What all backends of the short convolution share: the requests of a step, and checks of batches and of the tensors of run().
#include <string_view>
#include <vector>

#include "imbrex/short_conv.h"

namespace imbrex {

// A request that has tokens in the step. Its h[0] to h[width - 2] are of the width - 1 tokens before the step's first, and h[width - 1] on
// of the tokens of the step.
struct ShortConvRequest {
  int begin, end;  // tokens of the batch
  int slot;
  bool fresh;     // the request has no earlier tokens: h is zero there, and the slot may hold anything
  int first_row;  // the row of the state that holds h[0]
  int drafts;     // state row i becomes h[end - begin - drafts + i]
};

struct ShortConvStep {
  std::vector<ShortConvRequest> requests;
  int num_tokens = 0;
  int64_t num_slots = 0;  // that the state has at least: one more than the largest number of a slot, which may be that of an int
};

// The checks that a backend makes before it makes a plan. Errors short_conv.*, backend.out_dtype, and those of begin_plan() of all
// families.
void begin_plan(const BackendOf<ShortConvFamily>&, const ShortConvSpec&, const DeviceInfo&, const PlanOptions&,
                std::string_view kernels = {});

// Reads a batch into `to`. Error batch.*; with `checked` false the batch is not checked.
void read_batch(const ShortConvSpec&, const PlanLimits&, const Batch&, bool checked, ShortConvStep&);

// Checks the tensors of a run() of a step with tokens: they must have room for num_tokens, and the state for num_slots. Error
// short_conv.run.*, tensor.*
void check_run(const ShortConvSpec&, Device, const ShortConvInputs&, const ShortConvOutputs&, int num_tokens, int64_t num_slots);

}  // namespace imbrex

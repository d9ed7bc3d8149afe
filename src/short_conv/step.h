#pragma once
// What every backend of the short convolution makes of a batch, and asks of the tensors of run().
#include <string_view>
#include <vector>

#include "imbrex/short_conv.h"

namespace imbrex {

// A request that has tokens in the step. Of its tokens gone by and of this step together, in order, h[i] is the i-th counted from
// width - 1 before the step's first.
struct ShortConvRequest {
  int begin, end;  // tokens of the batch
  int slot;
  bool fresh;     // nothing has gone by: h is zero there, and the slot may hold anything
  int first_row;  // of the state: where h[0] is
  int drafts;     // state row i becomes h[end - begin - drafts + i]
};

struct ShortConvStep {
  std::vector<ShortConvRequest> requests;
  int num_tokens = 0, num_slots = 0;  // num_slots: the state has so many at least
};

// What every backend asks before it makes a plan. Errors short_conv.*, backend.out_dtype, and those of begin_plan() of all families.
void begin_plan(const BackendOf<ShortConvFamily>&, const ShortConvSpec&, const DeviceInfo&, const PlanOptions&,
                std::string_view kernels = {});

// Error batch.*; `checked` false: the caller vouches for the batch.
void read_batch(const ShortConvSpec&, const PlanLimits&, const Batch&, bool checked, ShortConvStep&);

// Of a step with tokens: tensors of a run() have room for so many, and the state for so many slots. Error short_conv.run.*, tensor.*
void check_run(const ShortConvSpec&, Device, const ShortConvInputs&, const ShortConvOutputs&, int num_tokens, int num_slots);

}  // namespace imbrex

#pragma once
// What all backends of the short convolution share: checks of what a plan is made of, and of the tensors of run().
#include <string_view>

#include "family/state_step.h"
#include "imbrex/short_conv.h"

namespace imbrex {

// The checks that a backend makes before it makes a plan. Errors short_conv.*, backend.out_dtype, and those of begin_plan() of all
// families.
void begin_plan(const BackendOf<ShortConvFamily>&, const ShortConvSpec&, const DeviceInfo&, const PlanOptions&,
                std::string_view kernels = {});

// Checks the tensors of a run() of a step with tokens: they must have room for num_tokens, and the state for num_slots. Error
// short_conv.run.*, tensor.*
void check_run(const ShortConvSpec&, Device, const ShortConvInputs&, const ShortConvOutputs&, int num_tokens, int64_t num_slots);

}  // namespace imbrex

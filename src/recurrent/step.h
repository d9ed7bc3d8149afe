#pragma once
// What all backends of recurrent layers share: checks of what a plan is made of, and of the tensors of run().
#include <string_view>

#include "family/state_step.h"
#include "imbrex/recurrent.h"

namespace imbrex {

// The checks that a backend makes before it makes a plan. Errors recurrent.*, backend.out_dtype, and those of begin_plan() of all families.
void begin_plan(const BackendOf<RecurrentFamily>&, const RecurrentSpec&, const DeviceInfo&, const PlanOptions&,
                std::string_view kernels = {});

// Checks the tensors of a run() of a step with tokens: they must have room for num_tokens, and the state for num_slots. Errors
// recurrent.run.*, tensor.*
void check_run(const RecurrentSpec&, Device, const RecurrentInputs&, const RecurrentOutputs&, int num_tokens, int64_t num_slots);

}  // namespace imbrex

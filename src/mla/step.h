#pragma once
// What all backends of MLA share: the checks before a plan is made, and of the tensors of its calls.
#include <string_view>

#include "attention/plan_checks.h"
#include "imbrex/mla.h"

namespace imbrex {

// The checks that a backend makes before it makes a plan. Errors mla.*, spec.*, backend.out_dtype, and those of begin_plan() of all
// families.
void begin_plan(const BackendOf<MlaFamily>&, const MlaSpec&, const DeviceInfo&, const PlanOptions&, std::string_view kernels = {});

// Checks all arguments of MlaPlan::run; returns the type of the output. Errors mla.run.*, run.*, kv_cache.*, tensor.*
DType check_run(const MlaSpec&, Device, const MlaInputs&, const MlaOutputs&, int num_tokens, const BatchReach&);

// Checks all arguments of MlaPlan::write_kv; returns the type of the new latents. Errors mla.write_kv.*, write_kv.*, kv_cache.*, tensor.*
DType check_write(const MlaSpec&, Device, const KvCache&, const TensorView& latent, const TensorView& rope, const TensorView& slot_mapping,
                  int num_tokens, const BatchReach&);

}  // namespace imbrex

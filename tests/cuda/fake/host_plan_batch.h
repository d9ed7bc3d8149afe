#pragma once
// plan_batch.cu as plain host code, for host_kernels.cpp.
#include "cuda/params.h"
#include "imbrex/spec.h"

namespace imbrex::cuda::fake {

// What plan_batch.cu does, for batches that break no rule.
void plan_batch(const PlanBatchParams&, const Mask&);

}  // namespace imbrex::cuda::fake

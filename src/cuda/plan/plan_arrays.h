#pragma once
// The memory of a plan's steps, by the names that CUDA's plans have for it: gpu/plan_arrays.h.
#include "gpu/plan_arrays.h"

namespace imbrex::cuda {

using gpu::ArrayLayout;
using gpu::ArrayOf;
using gpu::PlanArrays;

}  // namespace imbrex::cuda

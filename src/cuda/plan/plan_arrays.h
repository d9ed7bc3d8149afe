#pragma once
// The memory of a plan's steps, by the names that CUDA's plans have for it: gpu/plan_arrays.h.
#include "cuda/driver/memory.h"
#include "gpu/plan_arrays.h"

namespace imbrex::cuda {

using gpu::ArrayLayout;
using gpu::ArrayOf;
using gpu::PlanArrays;

template <class T>
T* array_in(const DeviceBuffer& memory, const ArrayOf<T>& array) {
  return gpu::array_in(memory.as<void>(), array);
}

}  // namespace imbrex::cuda

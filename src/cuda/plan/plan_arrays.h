#pragma once
// The memory of a plan's steps, by the names that CUDA's plans have for it: gpu/plan_arrays.h.
#include "gpu/plan_arrays.h"
#include "imbrex/tensor.h"

namespace imbrex::cuda {

using gpu::ArrayLayout;
using gpu::ArrayOf;
using gpu::PlanArrays;

constexpr int64_t kMaxHostBlocks = int64_t(1) << 22;  // ids of host block tables: 16 MiB on the device

inline bool on_host(const TensorView& t) { return t.device.type == DeviceType::cpu; }

}  // namespace imbrex::cuda

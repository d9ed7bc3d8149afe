#pragma once
// Which attention kernels a plan for a layer would run, and in which sizes: BackendOf::kernel_choices() of the CUDA backends.
#include <vector>

#include "cuda/attention/attention_kernels.h"
#include "imbrex/family.h"

namespace imbrex::cuda {

std::vector<KernelChoice> kernel_choices(const AttentionKernels&, const AttentionSpec&, const DeviceInfo&);

}  // namespace imbrex::cuda

#pragma once
// Checks of the tensors of a merge, on any device.
#include <span>

#include "imbrex/merge.h"

namespace imbrex {

// Error merge.*
void check_merge(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, Device);

}  // namespace imbrex

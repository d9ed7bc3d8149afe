#pragma once
// What a merge asks of its tensors, on any device.
#include <span>

#include "imbrex/merge.h"

namespace imbrex {

// Error merge.*
void check_merge(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, Device);

}  // namespace imbrex

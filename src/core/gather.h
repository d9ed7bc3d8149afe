#pragma once
// What every DeviceStream::gather asks of its tensors.
#include "imbrex/tensor.h"

namespace imbrex {

void check_gather(const Device&, const TensorView& from, const TensorView& offsets, const TensorView& to);  // Error stream.gather

}  // namespace imbrex

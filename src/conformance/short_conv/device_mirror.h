#pragma once
// A GPU's backend of the short convolution for callers whose tensors are in host memory, see conformance/mirror.h.
#include <memory>

#include "conformance/state_mirror.h"
#include "imbrex/short_conv.h"

namespace imbrex {

// Lists of update_on_device() are in host memory too. `backend` must live as long.
std::unique_ptr<BackendOf<ShortConvFamily>> device_mirror(const BackendOf<ShortConvFamily>& backend, const StateMirrorOptions& = {});

}  // namespace imbrex

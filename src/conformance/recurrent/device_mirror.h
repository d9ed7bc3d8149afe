#pragma once
// A GPU's backend of recurrent layers for callers whose tensors are in host memory, see conformance/mirror.h.
#include <memory>

#include "conformance/state_mirror.h"
#include "imbrex/recurrent.h"

namespace imbrex {

// Lists of update_on_device() are in host memory too. `backend` must live as long.
std::unique_ptr<BackendOf<RecurrentFamily>> device_mirror(const BackendOf<RecurrentFamily>& backend, const StateMirrorOptions& = {});

}  // namespace imbrex

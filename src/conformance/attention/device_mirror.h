#pragma once
// A GPU's attention backend for callers whose tensors are in host memory, see conformance/mirror.h.
#include <memory>

#include "imbrex/attention.h"

namespace imbrex {

// Arrays of every second batch are handed on as host memory, of the others as device memory. `backend` must live as long.
std::unique_ptr<BackendOf<AttentionFamily>> device_mirror(const BackendOf<AttentionFamily>& backend);

}  // namespace imbrex

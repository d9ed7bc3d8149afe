#pragma once
// A GPU's backend for callers whose tensors are in host memory: every call copies what it is given to the device and the results back.
// Correct and slow; conformance tests and case files run through it, so that what a caller of the real backend would see is what they see.
#include <memory>

#include "imbrex/backend.h"

namespace imbrex {

// Copies span all bytes from the first to the last element of a view, gaps included, and are surrounded by guards: what a kernel must not
// read holds what the host holds there or 0xff, and a write into a guard is Error mirror.guard. Arrays of every second batch are handed
// on as host memory, of the others as device memory. `backend` must live as long.
std::unique_ptr<Backend> device_mirror(const Backend& backend);

}  // namespace imbrex

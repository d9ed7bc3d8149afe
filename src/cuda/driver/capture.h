#pragma once
// Which graph a stream of a GPU is captured into, and what that graph keeps alive: imbrex/capture.h, for CUDA.
#include <cstdint>
#include <memory>

#include "cuda/driver/driver.h"

namespace imbrex::cuda {

uint64_t capture_of(CUstream);  // 0: none. Error stream.capture
// Error stream.capture unless the stream captures; `device` is for its text.
void keep_for_capture(int device, CUstream, std::shared_ptr<void>);

}  // namespace imbrex::cuda

#pragma once
// A GPU's backend of the short convolution for callers whose tensors are in host memory, see conformance/mirror.h.
#include <memory>

#include "imbrex/short_conv.h"

namespace imbrex {

struct ShortConvMirrorOptions {
  // run() captures the plan's launches into a graph, once, and replays it as long as the tensors have the same shapes and the same places
  // on the device. Only for plans that are capturable().
  bool in_graph = false;
  int* captures = nullptr;  // counts them
};

// Lists of update_on_device() are in host memory too. `backend` must live as long.
std::unique_ptr<BackendOf<ShortConvFamily>> device_mirror(const BackendOf<ShortConvFamily>& backend, const ShortConvMirrorOptions& = {});

}  // namespace imbrex

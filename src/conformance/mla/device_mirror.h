#pragma once
// A GPU's plan of latent attention for callers whose tensors are in host memory, see conformance/mirror.h.
#include <memory>

#include "imbrex/mla.h"

namespace imbrex {

struct MlaMirrorOptions {
  // Where the plan is capturable(), run() captures its launches into a graph, and replays it as long as the tensors have the same places on
  // the device.
  bool in_graph = false;
};

// Arrays of every second batch are handed on as host memory, of the others as device memory. Calls of all mirrors of a device run one after
// the other.
std::unique_ptr<MlaPlan> device_mirror(std::unique_ptr<MlaPlan>, const DeviceInfo&, const MlaMirrorOptions& = {});
// Frees what mirrors keep from call to call: memory on devices, and the last plans, whose kernels stay loaded for the next ones.
void drop_mla_mirrors();

}  // namespace imbrex

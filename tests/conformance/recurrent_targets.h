#pragma once
// Which backends of recurrent layers run on which devices of this machine.
#include <string>
#include <vector>

#include "conformance/recurrent/judge.h"
#include "targets.h"

namespace imbrex::test {

struct RecurrentTarget {
  const BackendOf<RecurrentFamily>* backend = nullptr;
  DeviceInfo device;
  bool on_gpu() const { return device.device.type == DeviceType::cuda; }
  std::string name() const { return target_name(*backend, device); }
};

const std::vector<RecurrentTarget>& recurrent_targets();

}  // namespace imbrex::test

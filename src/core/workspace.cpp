// Workspaces of all devices. cuda/plan/workspace.cpp has those of GPUs.
#include "imbrex/workspace.h"

#include "core/check.h"

namespace imbrex {

std::shared_ptr<Workspace> make_cuda_workspace(const DeviceInfo&);  // cuda/plan/workspace.cpp
std::shared_ptr<Workspace> make_cuda_workspace(const DeviceInfo&, void* memory, int64_t bytes);

namespace {

class HostWorkspace final : public Workspace {
 public:
  Device device() const override { return {}; }
  int64_t bytes() const override { return 0; }
};

}  // namespace

std::shared_ptr<Workspace> make_workspace(const DeviceInfo& device) {
  check(device.present, "backend.device_absent", "expected a device of this machine, got {}", device.str());
  if (device.device.type == DeviceType::cuda) return make_cuda_workspace(device);
  return std::make_shared<HostWorkspace>();
}

std::shared_ptr<Workspace> make_workspace(const DeviceInfo& device, void* memory, int64_t bytes) {
  check(device.present, "backend.device_absent", "expected a device of this machine, got {}", device.str());
  if (device.device.type == DeviceType::cuda) return make_cuda_workspace(device, memory, bytes);
  return std::make_shared<HostWorkspace>();
}

}  // namespace imbrex

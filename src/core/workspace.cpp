// Workspaces of all devices: a CPU's, which hold nothing, and what a device's platform makes.
#include "imbrex/workspace.h"

#include "core/check.h"
#include "core/scratch_of_plans.h"
#include "imbrex/device_platform.h"

namespace imbrex {
namespace {

class ScratchOfPlans final : public Workspace {
 public:
  explicit ScratchOfPlans(const Device& device) : device_(device) {}
  Device device() const override { return device_; }
  int64_t bytes() const override { return 0; }

 private:
  Device device_;
};

}  // namespace

std::shared_ptr<Workspace> scratch_of_plans(const Device& device) { return std::make_shared<ScratchOfPlans>(device); }

std::shared_ptr<Workspace> make_workspace(const DeviceInfo& device) {
  check(device.present, "backend.device_absent", "expected a device of this machine, got {}", device.str());
  return device.device.type == DeviceType::cpu ? scratch_of_plans(device.device) : open_device(device)->make_workspace();
}

std::shared_ptr<Workspace> make_workspace(const DeviceInfo& device, void* memory, int64_t bytes) {
  check(device.present, "backend.device_absent", "expected a device of this machine, got {}", device.str());
  return device.device.type == DeviceType::cpu ? scratch_of_plans(device.device) : open_device(device)->make_workspace(memory, bytes);
}

}  // namespace imbrex

// See device_workspace.h.
#include "gpu/device_workspace.h"

#include <utility>

#include "core/check.h"
#include "core/tensor_format.h"
#include "gpu/plan_arrays.h"

namespace imbrex::gpu {

DeviceWorkspace::DeviceWorkspace(OpenDevicePtr device, uint64_t context)
    : device_(std::move(device)), context_(context), memory_(std::make_shared<ScratchMemory>()) {}

DeviceWorkspace::DeviceWorkspace(OpenDevicePtr device, uint64_t context, void* lent, int64_t bytes)
    : device_(std::move(device)), context_(context), lent_(true) {
  check(bytes >= 0 && (bytes == 0 || lent != nullptr) && reinterpret_cast<uintptr_t>(lent) % ArrayLayout::kAlignment == 0,
        "workspace.memory", "expected memory at a multiple of {} bytes and 0 bytes or more of it, got {} at {}", ArrayLayout::kAlignment,
        bytes, lent);
  memory_ = std::make_shared<ScratchMemory>(ScratchMemory{{std::shared_ptr<void>(), lent}, bytes});
}

std::shared_ptr<const ScratchMemory> DeviceWorkspace::memory() const {
  const std::lock_guard lock(mutex_);
  return memory_;
}

void DeviceWorkspace::reserve(int64_t bytes) {
  std::shared_ptr<const ScratchMemory> before;  // let go of without the lock: freeing it waits for the device
  const std::lock_guard lock(mutex_);
  check(!lent_ || bytes <= memory_->bytes, "workspace.room", "expected a workspace of at least {} bytes, got one of {}", bytes,
        memory_->bytes);
  if (bytes <= memory_->bytes) return;
  before = std::exchange(memory_, std::make_shared<ScratchMemory>(ScratchMemory{device_->allocate(bytes), bytes}));
}

std::shared_ptr<DeviceWorkspace> workspace_for(const OpenDevicePtr& device, uint64_t context, const std::shared_ptr<Workspace>& given) {
  if (given == nullptr) return std::make_shared<DeviceWorkspace>(device, context);
  auto workspace = std::dynamic_pointer_cast<DeviceWorkspace>(given);
  check(workspace != nullptr, "backend.workspace", "expected a workspace that make_workspace() has made, got another");
  check(workspace->context() == context, "backend.workspace",
        "expected a workspace of the context that the plan is made in, got one of another context of {}", given->device());
  return workspace;
}

}  // namespace imbrex::gpu

// See workspace.h.
#include "cuda/workspace.h"

#include "core/check.h"
#include "core/tensor_format.h"

namespace imbrex {
namespace cuda {

CudaWorkspace::CudaWorkspace(ContextPtr context) : context_(std::move(context)), memory_(std::make_shared<DeviceBuffer>(context_, 0)) {}

Device CudaWorkspace::device() const { return {DeviceType::cuda, context_->device()}; }

int64_t CudaWorkspace::bytes() const { return int64_t(memory()->bytes()); }

std::shared_ptr<const DeviceBuffer> CudaWorkspace::memory() const {
  const std::lock_guard lock(mutex_);
  return memory_;
}

void CudaWorkspace::reserve(size_t bytes) {
  std::shared_ptr<const DeviceBuffer> before;  // let go of without the lock: freeing it waits for the device
  const std::lock_guard lock(mutex_);
  if (bytes > memory_->bytes()) before = std::exchange(memory_, std::make_shared<DeviceBuffer>(context_, bytes));
}

std::shared_ptr<CudaWorkspace> workspace_for(const ContextPtr& context, const std::shared_ptr<Workspace>& given) {
  if (given == nullptr) return std::make_shared<CudaWorkspace>(context);
  auto workspace = std::dynamic_pointer_cast<CudaWorkspace>(given);
  check(workspace != nullptr, "backend.workspace", "expected a workspace that make_workspace() has made, got another");
  check(workspace->context().id() == context->id(), "backend.workspace",
        "expected a workspace of the context that the plan is made in, got one of another context of {}", given->device());
  return workspace;
}

}  // namespace cuda

std::shared_ptr<Workspace> make_cuda_workspace(const DeviceInfo& device) {
  return std::make_shared<cuda::CudaWorkspace>(cuda::Context::of_device(device.device.index));
}

}  // namespace imbrex

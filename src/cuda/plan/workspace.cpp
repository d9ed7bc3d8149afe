// See workspace.h.
#include "cuda/plan/workspace.h"

#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/plan/plan_arrays.h"

namespace imbrex::cuda {

CudaWorkspace::CudaWorkspace(ContextPtr context) : context_(std::move(context)), memory_(std::make_shared<DeviceBuffer>(context_, 0)) {}

CudaWorkspace::CudaWorkspace(ContextPtr context, void* lent, int64_t bytes) : context_(std::move(context)), lent_(true) {
  const auto address = reinterpret_cast<CUdeviceptr>(lent);
  check(bytes >= 0 && (bytes == 0 || address != 0) && address % ArrayLayout::kAlignment == 0, "workspace.memory",
        "expected memory at a multiple of {} bytes and 0 bytes or more of it, got {} at {}", ArrayLayout::kAlignment, bytes, lent);
  memory_ = std::make_shared<DeviceBuffer>(context_, address, size_t(bytes));
}

Device CudaWorkspace::device() const { return {DeviceType::cuda, context_->device()}; }

int64_t CudaWorkspace::bytes() const { return int64_t(memory()->bytes()); }

std::shared_ptr<const DeviceBuffer> CudaWorkspace::memory() const {
  const std::lock_guard lock(mutex_);
  return memory_;
}

void CudaWorkspace::reserve(size_t bytes) {
  std::shared_ptr<const DeviceBuffer> before;  // let go of without the lock: freeing it waits for the device
  const std::lock_guard lock(mutex_);
  check(!lent_ || bytes <= memory_->bytes(), "workspace.room", "expected a workspace of at least {} bytes, got one of {}", bytes,
        memory_->bytes());
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

}  // namespace imbrex::cuda

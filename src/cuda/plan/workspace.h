#pragma once
// Scratch of plans on a GPU: a buffer that grows, and that whoever has taken it keeps.
#include <mutex>

#include "cuda/driver/memory.h"
#include "imbrex/workspace.h"

namespace imbrex::cuda {

class CudaWorkspace final : public Workspace {
 public:
  explicit CudaWorkspace(ContextPtr);
  CudaWorkspace(ContextPtr, void* lent, int64_t bytes);  // never grows. Error workspace.memory for what is no memory
  Device device() const override;
  int64_t bytes() const override;

  const Context& context() const { return *context_; }
  // Afterwards memory() has at least so many bytes. Where there is no room, what there was stays. Error cuda.memory, workspace.room.
  void reserve(size_t bytes);
  std::shared_ptr<const DeviceBuffer> memory() const;  // never null

 private:
  ContextPtr context_;
  bool lent_ = false;
  mutable std::mutex mutex_;
  std::shared_ptr<const DeviceBuffer> memory_;
};

// The workspace of a plan's options, or a new one where there is none. Error backend.workspace for one of another context.
std::shared_ptr<CudaWorkspace> workspace_for(const ContextPtr&, const std::shared_ptr<Workspace>&);

}  // namespace imbrex::cuda

#pragma once
// Scratch of plans on a device: memory that grows, and that whoever has taken it keeps.
#include <cstdint>
#include <memory>
#include <mutex>

#include "imbrex/device_platform.h"

namespace imbrex::gpu {

struct ScratchMemory {
  std::shared_ptr<void> data;  // null where there are no bytes; lent memory belongs to somebody else
  int64_t bytes = 0;
};

class DeviceWorkspace final : public Workspace {
 public:
  // `context`: the number of the driver's context that the memory is in, which no other has: plans of other contexts cannot use it.
  DeviceWorkspace(OpenDevicePtr, uint64_t context);
  // Never grows. Error workspace.memory for what is no memory.
  DeviceWorkspace(OpenDevicePtr, uint64_t context, void* lent, int64_t bytes);
  Device device() const override { return device_->device(); }
  int64_t bytes() const override { return memory()->bytes; }

  uint64_t context() const { return context_; }
  // Afterwards memory() has at least so many bytes. Where there is no room, what there was stays. Error *.memory, workspace.room.
  void reserve(int64_t bytes);
  std::shared_ptr<const ScratchMemory> memory() const;  // never null

 private:
  OpenDevicePtr device_;
  uint64_t context_;
  bool lent_ = false;
  mutable std::mutex mutex_;
  std::shared_ptr<const ScratchMemory> memory_;
};

// The workspace of a plan's options, or a new one where there is none. Error backend.workspace for one of another context.
std::shared_ptr<DeviceWorkspace> workspace_for(const OpenDevicePtr&, uint64_t context, const std::shared_ptr<Workspace>& given);

}  // namespace imbrex::gpu

#pragma once
// Scratch memory that plans share. Without it each plan has its own, for the most that a batch within its limits needs.
#include <cstdint>
#include <memory>

#include "imbrex/device.h"

namespace imbrex {

// For plans of one device whose work is in one order, as that of one stream is: given as PlanOptions::workspace, it holds what the one
// that needs most asks for. Two plans that share it must not compute at the same time; they may be made, updated and freed on any thread.
// Memory grows when a plan is made. run() takes what there is then; a graph goes on with what it was captured with, which its plan keeps.
class Workspace {
 public:
  virtual ~Workspace() = default;
  virtual Device device() const = 0;
  virtual int64_t bytes() const = 0;  // held now, without what only graphs still have. Of a CPU, whose plans keep theirs: 0
};

// Empty at first. Error backend.device_absent for a device that is only described.
std::shared_ptr<Workspace> make_workspace(const DeviceInfo&);
// In memory of the device that the caller has and keeps until the last plan and graph that use it are gone: it never grows, and a plan that
// needs more is refused (Error workspace.room). BackendOf::workspace_bytes() says beforehand how much that is. The address is a multiple of
// 16. Of a CPU the memory is not used.
std::shared_ptr<Workspace> make_workspace(const DeviceInfo&, void* memory, int64_t bytes);

}  // namespace imbrex

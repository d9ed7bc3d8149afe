#pragma once
// Scratch memory that plans share. Without it each plan has scratch of its own, for the largest batch within its limits.
#include <cstdint>
#include <memory>

#include "imbrex/device.h"

namespace imbrex {

// For plans of one device whose work is in one order, as that of one stream is: given as PlanOptions::workspace, it is as large as the plan
// needs that needs most. Two plans that share it must not compute at the same time; they may be made, updated and freed on any thread.
// Memory grows when a plan is made. run() uses the memory that there is at the time; a graph goes on with the memory that it was captured
// with, which its plan keeps.
class Workspace {
 public:
  virtual ~Workspace() = default;
  virtual Device device() const = 0;
  virtual int64_t bytes() const = 0;  // held now, without memory that only graphs still use; 0 on a CPU, whose plans have their own scratch
};

// Makes an empty workspace. Error backend.device_absent for a device that is only described.
std::shared_ptr<Workspace> make_workspace(const DeviceInfo&);
// Makes a workspace of device memory that the caller owns, and keeps until the last plan and graph that use it are gone. It never grows: a
// plan that needs more is refused (Error workspace.room). BackendOf::workspace_bytes() tells beforehand how much a plan needs. The address
// is a multiple of 16. On a CPU the memory is not used.
std::shared_ptr<Workspace> make_workspace(const DeviceInfo&, void* memory, int64_t bytes);

}  // namespace imbrex

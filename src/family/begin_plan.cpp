// See begin_plan.h.
#include "family/begin_plan.h"

#include "core/check.h"
#include "core/log.h"
#include "core/tensor_format.h"

namespace imbrex {

void check_options(const PlanOptions& options) {
  constexpr int kMostWorkers = 1 << 16;
  options.limits.validate();
  check(options.threads.num_workers > 0 && options.threads.num_workers <= kMostWorkers, "threads.num_workers",
        "expected 1 to {} workers of PlanOptions::threads, got {}", kMostWorkers, options.threads.num_workers);
}

void check_request(const BasicBackend& backend, std::string_view spec, const std::vector<Reason>& reasons, const DeviceInfo& device,
                   const PlanOptions& options) {
  check_options(options);
  for (const Reason& reason : reasons)
    fail("backend.unsupported", "{} cannot run {} on {}: {}", backend.name(), spec, device.str(), reason.str());
}

void begin_plan(const BasicBackend& backend, std::string_view spec, const std::vector<Reason>& reasons, const DeviceInfo& device,
                const PlanOptions& options, std::string_view kernels) {
  check_request(backend, spec, reasons, device, options);
  check(options.workspace == nullptr || options.workspace->device() == device.device, "backend.workspace",
        "expected a workspace of {}, got one of {}", device.device, options.workspace == nullptr ? Device{} : options.workspace->device());
  check(device.present, "backend.device_absent", "{} cannot make a plan for {}, which is only described", backend.name(), device.str());
  log_info("plan: {}{}{}{} on {} for {}", backend.name(), kernels.empty() ? "" : " (", kernels, kernels.empty() ? "" : " kernels)",
           device.str(), spec);
}

}  // namespace imbrex

#pragma once
// The checks that a backend of any family makes before it makes a plan.
#include <string_view>
#include <vector>

#include "imbrex/family.h"

namespace imbrex {

void check_options(const PlanOptions&);  // Errors limits.*, threads.num_workers

// Checks options and reasons, also where only the size of a plan is asked for. `reasons` are those of unsupported(), `spec` is the spec in
// words. Errors of check_options(), backend.unsupported.
void check_request(const BasicBackend&, std::string_view spec, const std::vector<Reason>& reasons, const DeviceInfo&, const PlanOptions&);

// Checks that a plan can be made, and writes a line to the log in which the plan's kernels are called `kernels`. Errors of check_request(),
// backend.device_absent, backend.workspace.
void begin_plan(const BasicBackend&, std::string_view spec, const std::vector<Reason>& reasons, const DeviceInfo&, const PlanOptions&,
                std::string_view kernels);

}  // namespace imbrex

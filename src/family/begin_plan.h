#pragma once
// What every backend asks before it makes a plan, of whatever family.
#include <string_view>
#include <vector>

#include "imbrex/family.h"

namespace imbrex {

void check_options(const PlanOptions&);  // Errors limits.*, threads.num_workers

// What is wrong with a request whether a plan is made of it or not. `reasons` are those of unsupported(), `spec` is the spec in words.
// Errors of check_options(), backend.unsupported.
void check_request(const BasicBackend&, std::string_view spec, const std::vector<Reason>& reasons, const DeviceInfo&, const PlanOptions&);

// Errors of check_request(), backend.device_absent, backend.workspace. Then the log gets a line, with `kernels` as what they are called.
void begin_plan(const BasicBackend&, std::string_view spec, const std::vector<Reason>& reasons, const DeviceInfo&, const PlanOptions&,
                std::string_view kernels);

}  // namespace imbrex

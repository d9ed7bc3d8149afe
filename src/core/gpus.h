#pragma once
// Figures of GPUs that are in data sheets and that no driver reports.
#include "imbrex/device.h"

namespace imbrex {

void add_peaks(DeviceInfo& probed);  // by the name that the driver gives; a GPU that is not in the table keeps zeros

}  // namespace imbrex

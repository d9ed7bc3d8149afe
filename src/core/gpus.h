#pragma once
// What data sheets say of GPUs and no driver does.
#include "imbrex/device.h"

namespace imbrex {

void add_peaks(DeviceInfo& probed);  // by the name that the driver gives; a GPU that is not in the table keeps zeros

}  // namespace imbrex

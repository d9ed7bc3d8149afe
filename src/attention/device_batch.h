#pragma once
// Batches of attention whose lengths are on a device, as far as the host sees them.
#include <span>

#include "imbrex/attention.h"

namespace imbrex {

// Checks shapes, types and places of a batch's arrays, and returns them under requests that have no query tokens and no keys: what these
// are is for the device's kernel to check. zeros: at least one more than there are requests, and kept while the result is used. Errors
// batch.*, update.device.
Batch arrays_of(const DeviceBatch&, const AttentionSpec&, const PlanLimits&, Device, std::span<const int32_t> zeros);

}  // namespace imbrex

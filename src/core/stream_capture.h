#pragma once
// Whether a stream runs the work that it is given, or records it for a graph.
#include "imbrex/device.h"

namespace imbrex {

bool is_captured(const Device&, Stream);  // false for a CPU's and for the null stream. Error cuda.*

}  // namespace imbrex

#pragma once
// Whether what a stream is given is run, or recorded for a graph.
#include "imbrex/device.h"

namespace imbrex {

bool is_captured(const Device&, Stream);  // false for a CPU's and for the null stream. Error cuda.*; in cuda/driver/memory.cpp

}  // namespace imbrex

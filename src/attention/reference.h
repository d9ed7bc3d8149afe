#pragma once
// The reference backend of attention: it defines what every other backend has to compute. The registry lists it last; tests and `imbrex
// verify` compare with it.
#include "imbrex/attention.h"

namespace imbrex {

// Double precision, plain loops, every feature of the spec; no speed. Runs on any CPU, with caches of any format.
// Reads only keys and values that a query sees, and only memory that the batch's requests own.
const BackendOf<AttentionFamily>& reference_backend();

}  // namespace imbrex

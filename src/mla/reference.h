#pragma once
// The reference backend of MLA: it defines what every other one has to compute.
#include "imbrex/mla.h"

namespace imbrex {

// Double precision, plain loops, keys and values of all heads as the definition has them. Runs on any CPU.
const BackendOf<MlaFamily>& mla_reference();

}  // namespace imbrex

#pragma once
// The reference backend of the short convolution: it defines what every other one has to compute.
#include "imbrex/short_conv.h"

namespace imbrex {

// Double precision, plain loops. Runs on any CPU.
const BackendOf<ShortConvFamily>& short_conv_reference();

}  // namespace imbrex

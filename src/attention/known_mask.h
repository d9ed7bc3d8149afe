#pragma once
// Masks of the user's that spec.h has names for: kernels that know them are faster, and run beside more.
#include "imbrex/spec.h"

namespace imbrex {

// The same layer with its mask_mod said by `mask`, if that is possible: one that is nothing but causality and windows in any spelling, such
// as "kv <= q & q - kv < 128", or abs(q - kv) <= 4. Any other layer as it is.
AttentionSpec with_known_mask(const AttentionSpec&);

}  // namespace imbrex

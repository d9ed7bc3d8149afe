#pragma once
// The definition behind Mask, one query and one key at a time: what `reference` computes and kernels are tested against.
#include <cstdint>

#include "imbrex/spec.h"

namespace imbrex {

constexpr int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Whether a query at position p sees the key at position j, the custom mask apart.
inline bool mask_allows(const Mask& mask, int64_t p, int64_t j) {
  if (mask.causal && j > p) return false;
  if (mask.window_left >= 0 && j < p - mask.window_left) return false;
  if (mask.window_right >= 0 && j > p + mask.window_right) return false;
  if (mask.chunk > 0 && floor_div(j, mask.chunk) != floor_div(p, mask.chunk)) return false;
  return true;
}

}  // namespace imbrex

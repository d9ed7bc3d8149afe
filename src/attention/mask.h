#pragma once
// The definition of Mask, one query and one key at a time: `reference` computes it, and kernels are tested against that. Also the range of
// keys that a query may see.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "imbrex/spec.h"

namespace imbrex {

constexpr int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Whether a query at position p sees the key at position j, the custom mask apart.
inline bool mask_allows(const Mask& mask, int64_t p, int64_t j) {
  if (mask.causal && j > p) return false;
  if (mask.window_left >= 0 && j < p - mask.window_left) return false;
  if (mask.window_right >= 0 && j > p + mask.window_right) return false;
  if (mask.chunk > 0) {
    const int64_t chunks_back = floor_div(p, mask.chunk) - floor_div(j, mask.chunk);
    if (chunks_back < 0 || chunks_back > mask.chunk_lookback) return false;
  }
  return true;
}

// The number of tokens before its own chunk that a query sees: chunk_lookback chunks, at most INT_MAX.
inline int lookback_tokens(const Mask& mask) {
  return int(std::min<int64_t>(int64_t(mask.chunk) * mask.chunk_lookback, std::numeric_limits<int>::max()));
}

// Whether there are earlier keys that a query does not see, the custom mask apart.
inline bool forgets(const Mask& mask) { return mask.window_left >= 0 || mask.chunk > 0; }

// The largest number of keys before its own position that any query may see, the custom mask apart.
inline int64_t most_earlier_keys(const Mask& mask) {
  int64_t most = std::numeric_limits<int>::max();
  if (mask.window_left >= 0) most = mask.window_left;
  if (mask.chunk > 0) most = std::min<int64_t>(most, int64_t(mask.chunk) - 1 + lookback_tokens(mask));
  return most;
}

// The first key that a query at position p >= 0 may see, the custom mask apart. Never falls when p rises.
inline int64_t first_visible_key(const Mask& mask, int64_t p) {
  int64_t first = 0;
  if (mask.window_left >= 0) first = std::max(first, p - mask.window_left);
  if (mask.chunk > 0) first = std::max(first, p / mask.chunk * mask.chunk - lookback_tokens(mask));
  return first;
}

}  // namespace imbrex

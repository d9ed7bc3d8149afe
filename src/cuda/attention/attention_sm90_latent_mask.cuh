#pragma once
// Which tiles of keys the kernels for latents have to mask.
#include "attention_item.cuh"

namespace imbrex::cuda {

// The first key that all rows of an item see, where positions rise with the rows, and the end of these keys. In a tree of drafts they end
// with those in front of the request's own: so a tile that has none of these costs nothing more than in a causal layer.
DEVICE int first_of_all(const AttentionParams& p, const Item& item) {
  if constexpr (kTree) return item.all_first;
  return visible_keys(p, item.position_of(item.num_rows - 1)).lo;
}
DEVICE int end_of_all(const AttentionParams& p, const Item& item) {
  if constexpr (kTree) return min(item.first_bit, item.own_key(0) + 1);
  return visible_keys(p, item.position_of(0)).hi;
}

}  // namespace imbrex::cuda

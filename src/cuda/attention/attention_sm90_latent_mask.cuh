#pragma once
// Which tiles of keys the kernels for latents have to mask.
#include "attention_item.cuh"

namespace imbrex::cuda {

// Keys that all rows of an item see, where positions rise with the rows. Of a tree of drafts, those in front of the request's own: so a
// tile that has none of these costs nothing more than in a causal layer.
DEVICE KeyRange seen_by_all(const AttentionParams& p, const Item& item) {
  if constexpr (kTree) return {item.all_first, min(item.first_bit, item.own_key(0) + 1)};
  return {visible_keys(p, item.position_of(item.num_rows - 1)).lo, visible_keys(p, item.position_of(0)).hi};
}

}  // namespace imbrex::cuda

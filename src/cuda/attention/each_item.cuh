#pragma once
// The items that a warp of attention_sm90_stream.cuh finds, as the warps that load, multiply or store take them.
#include "attention_sm90_stream.cuh"

namespace imbrex::cuda {

// Does `verb` to each of the shared items, in their order.
template <class Shared, class Verb>
DEVICE void each_item(Shared& shared, const Verb& verb) {
  Ring<Shared::kItemSlots> slot;
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&shared.item_full[slot.at]), slot.parity);
    const Item& item = shared.item[slot.at];
    if (item.num_rows == kNoItem) break;
    verb(item);
    report(shared.item_empty[slot.at]);
  }
}

}  // namespace imbrex::cuda

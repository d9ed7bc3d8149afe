#pragma once
// Which keys of an item a mask_mod shows at all: tiles that it hides from every query of the item are neither read nor computed.
#include "imbrex/batch.h"
#include "imbrex/schedule.h"
#include "imbrex/spec.h"

namespace imbrex::cuda {

// Gives the items of Schedule::work, which begin at multiples of tile_q of their request's queries, stretches of whole tiles of keys. Items
// whose stretches are not among the first `room` of the list stay as they are. Errors expression.tensor for the batch's mask_tensors.
void find_mask_stretches(const Batch&, const AttentionSpec&, int tile_q, int tile_kv, size_t room, Schedule&);

}  // namespace imbrex::cuda

#pragma once
// Which keys of an item a mask_mod shows at all: tiles that it hides from every query of the item are neither read nor computed.
#include "imbrex/batch.h"
#include "imbrex/bound_expression.h"
#include "imbrex/schedule.h"
#include "imbrex/spec.h"

namespace imbrex {

// The q heads that a layer's mask_mod may differ in: 1 where it does not depend on the head.
int mask_mod_heads(const AttentionSpec&);

// Gives the items of Schedule::work, which are of one piece and begin at multiples of tile_q of their request's queries, stretches of whole
// tiles of keys: shown ones are seen by every query of the item in every head. Items whose stretches are not among the first `room` of the
// list stay as they are. `mask`: the layer's mask_mod with the batch's tensors.
void find_mask_mod_stretches(const BoundExpression& mask, const AttentionSpec&, const Batch&, int tile_q, int tile_kv, size_t room,
                             Schedule&);

}  // namespace imbrex

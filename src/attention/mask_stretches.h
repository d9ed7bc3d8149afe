#pragma once
// Which keys of an item a custom mask shows at all: tiles that it hides from every query of the item are neither read nor computed.
#include <span>

#include "imbrex/schedule.h"

namespace imbrex {

// Gives items of a list that schedule() has made the stretches of their keys that Batch::custom_mask shows to one of their queries, tile by
// tile of tile_kv keys. Items under whose mask every tile is seen in part stay as they are. mask_start: the first byte of each request.
void find_stretches(const Batch&, std::span<const long> mask_start, int tile_kv, Schedule&);

}  // namespace imbrex

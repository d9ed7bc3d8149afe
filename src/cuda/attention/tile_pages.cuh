#pragma once
// The boxes in which TMA brings a tile of keys, one for each page of it. Pages that no box of a whole swizzle fits into come row by row
// (tile_rows.cuh).
#include "attention_item.cuh"

namespace imbrex::cuda {

constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
// The number of parts in which attention_sm90_widen.cuh loads a tile; a box is within one of them.
constexpr int kWidenedParts = kPrefill && kKvType == kE4m3 && kQType != kE4m3 ? 4 : 1;
constexpr int kBlockKeys = kTileKeys / kCluster / kWidenedParts;  // of a tile, that a thread block loads, give or take half a box
constexpr int kCommonKeys = common_divisor(kBlockSize, kTileKeys);
constexpr bool kSmallPages = kBlockSize > 0 && kCommonKeys < 8;
constexpr int kPageRows = kCommonKeys < kBlockKeys ? kCommonKeys : kBlockKeys;  // of a box
constexpr int kPages = kTileKeys / kPageRows;                                   // boxes of a tile
static_assert(kSmallPages || kPages <= 32, "a lane loads a page");

}  // namespace imbrex::cuda

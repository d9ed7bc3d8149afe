#pragma once
// The boxes in which TMA brings a tile of keys, one for each page of it.
#include "attention_item.cuh"

namespace imbrex::cuda {

constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
constexpr int kBlockKeys = kTileKeys / kCluster;  // of a tile, that a thread block loads, give or take half a box
constexpr int kCommonKeys = common_divisor(kBlockSize, kTileKeys);
constexpr int kPageRows = kCommonKeys == kTileKeys ? kBlockKeys : kCommonKeys;  // of a box
constexpr int kPages = kTileKeys / kPageRows;                                   // boxes of a tile
static_assert(kPages <= 32, "a lane loads a page");

}  // namespace imbrex::cuda

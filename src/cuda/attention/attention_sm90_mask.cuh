#pragma once
// A custom mask as prefill with wgmma reads it: a bit for each query token and key, with the mask's other limits in it, and of each item
// the tiles of keys that it sees at all, and whole. pack_mask.cu makes them of the caller's bytes, in front of each layer.
#include "attention_sm90_parts.cuh"

namespace imbrex::cuda {

constexpr int kTeamTokens = kTeamRows / kGroup, kItemTokens = kTileRows / kGroup;
constexpr int kMaskWords = kTileKeys / 32;  // of a token and a tile
static_assert(!kCustomMask || (kTileKeys % 64 == 0 && kCluster == 1 && kRowBlocks == 1));

// The bits of a token of the batch: words of 32 keys, from key 0 on.
DEVICE u32* mask_row(const AttentionParams& p, int token) { return p.mask_bits + long(token) * p.mask_words; }

// A bit for each tile that rows of the item see something of: the item that begins with the token. Behind these words come those of tiles
// that all rows of a warpgroup see whole, for each warpgroup.
DEVICE u32* seen_tiles(const AttentionParams& p, int q_begin) {
  return p.seen_tiles + long(q_begin) * ((1 + kConsumers) * p.seen_tile_words);
}

// The next tile below one that is not the item's first: the next that some row sees.
DEVICE int tile_below(const AttentionParams& p, const Item& item, int tile) {
  if constexpr (!kCustomMask) return tile - 1;
  const u32* const words = seen_tiles(p, item.q_begin);
  int word = --tile / 32;
  u32 seen = words[word] & ((2u << tile % 32) - 1);
  while (seen == 0) seen = words[--word];
  return word * 32 + highest_bit(seen);
}
// Whether a walk from tile `before` to `tile` has come to tile `at`, or past it.
DEVICE bool comes_to(int at, int before, int tile) { return kCustomMask ? tile <= at && at < before : tile == at; }

// The number of a tile as the warp that loads its keys passes it to the consumers: below it, a bit for each warpgroup whose rows all see
// the tile whole.
constexpr int kToldBits = 3;
static_assert(kConsumers <= kToldBits);
DEVICE int told_tile(const AttentionParams& p, const Item& item, int tile) {
  int told = tile << kToldBits;
#pragma unroll
  for (int wg = 0; wg < kConsumers; ++wg)
    told |= int(seen_tiles(p, item.q_begin)[(1 + wg) * p.seen_tile_words + tile / 32] >> tile % 32 & 1) << wg;
  return told;
}

// Takes tiles that no row sees from both ends of the item; with no other, it is left without keys. By all lanes of a warp.
DEVICE void take_off_hidden_tiles(const AttentionParams& p, Item& item) {
  if (item.hi <= item.lo) return;
  const Tiles tiles = tiles_of(item);
  const u32* const words = seen_tiles(p, item.q_begin);
  int first = -1, last = -1;
  for (int base = tiles.first / 32; base * 32 < tiles.end; base += 32) {
    const int word = base + lane_id(), below = tiles.first - word * 32, left = tiles.end - word * 32;
    u32 seen = left > 0 ? words[word] : 0;
    if (below > 0) seen &= below < 32 ? ~0u << below : 0;
    if (left > 0 && left < 32) seen &= (1u << left) - 1;
    const u32 lanes = __ballot_sync(kFullWarp, seen != 0);
    if (lanes == 0) continue;
    const int low = lowest_bit(lanes), high = highest_bit(lanes);
    if (first < 0) first = (base + low) * 32 + lowest_bit(shuffle(seen, low));
    last = (base + high) * 32 + highest_bit(shuffle(seen, high));
  }
  if (first < 0) {
    item.hi = item.lo;
  } else {
    item.lo = max(item.lo, first * kTileKeys), item.hi = min(item.hi, (last + 1) * kTileKeys);
  }
}

// The words of a tile of the thread's row `row` + 8 h of the item.
DEVICE const u32* mask_words(const AttentionParams& p, const Item& item, int row, int h, int tile) {
  return mask_row(p, item.token_of(min(row + 8 * h, item.num_rows - 1))) + tile * kMaskWords;
}
DEVICE void prefetch_mask(const AttentionParams& p, const Item& item, int row, int tile) {
#pragma unroll
  for (int h = 0; h < 2; ++h) prefetch_l1(mask_words(p, item, row, h, tile));
}

// Hides the scores that a custom mask hides. An item without keys has no words of the mask.
DEVICE void hide_masked(const AttentionParams& p, const Item& item, int row, int tile, Scores& s) {
  const bool has_keys = item.hi > item.lo;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u64* const pairs = reinterpret_cast<const u64*>(mask_words(p, item, row, h, tile));
#pragma unroll
    for (int i = 0; i < kMaskWords / 2; ++i) {
      const u64 pair = has_keys ? pairs[i] : 0;
      const u32 words[2] = {u32(pair) >> first_column(), u32(pair >> 32) >> first_column()};  // bit 8 j + c: the lane's keys
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if ((words[j / 4] & 1u << (8 * (j % 4) + c)) == 0) at(s, 8 * i + j, h, c) = -infinity();
      }
    }
  }
}

}  // namespace imbrex::cuda

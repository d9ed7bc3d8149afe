#pragma once
// What attention_sm90_latent.cu and attention_sm90_latent_pair.cu share: weights in shared memory, made by one warpgroup and multiplied by
// values by others, with a note for each tile; and how the matrix unit finds tiles.
#include "attention_sm90_latent_mask.cuh"
#include "attention_sm90_parts.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

// Log2 units that a row's maximum may outgrow its reference by.
constexpr float kSlack = 8.f;

constexpr int kScoreWarps = 4, kOutputWarps = 4 * kConsumers;

// Queries, in chunks of 64 dims, and the steps of a product over them.
constexpr int kQSteps = (kHeadDimQk + 15) / 16, kQChunkBytes = kTileRows * 128;

// A warpgroup copies a chunk of queries to another place in shared memory.
DEVICE void move_queries(u32 from, u32 to) {
#pragma unroll
  for (int i = int(threadIdx.x) % 128 * 16; i < kQChunkBytes; i += 128 * 16) store_shared(to + i, load_shared(from + i));
}

// A tile's weights are parts of 16 keys, what a product sums over: each has 32 bytes of a row, with a swizzle of that width.
constexpr int kWeightRow = 32, kWeightPartBytes = kTileRows * kWeightRow, kWeightBytes = kTileKeys / 16 * kWeightPartBytes;

// Two weights as an operand of a product.
DEVICE u32 packed(const float2& weights) { return kQType == kBf16 ? pack_bf16(weights.x, weights.y) : pack_f16(weights.x, weights.y); }

// What belongs to the weights of a tile, or of a step of several tiles.
struct Note {
  enum : u32 { kEnds = 1, kLast = 2, kEdge = 4, kHasFactors = 8, kNumber = 16 };
  u32 bits;
  DEVICE Note(u32 bits) : bits(bits) {}
  DEVICE Note(int number, bool ends, bool last, bool edge)
      : bits(u32(number) * kNumber | (ends ? kEnds : 0) | (last ? kLast : 0) | (edge ? kEdge : 0)) {}
  DEVICE u32 with_factors() const { return bits | kHasFactors; }
  DEVICE bool ends() const { return (bits & kEnds) != 0; }               // a piece
  DEVICE bool is_last() const { return (bits & kLast) != 0; }            // of the item
  DEVICE bool is_edge() const { return (bits & kEdge) != 0; }            // whether there may be keys in it that are not the item's
  DEVICE bool has_factors() const { return (bits & kHasFactors) != 0; }  // that sums so far are to be multiplied by
  DEVICE int number() const { return int(bits / kNumber); }              // of the tile, or step
};

// Hides from a thread's rows, `row` and `row` + 8 of the item, what they do not see of the tile whose keys begin at `begin`.
DEVICE void hide_keys(const AttentionParams& p, const Item& item, int row, int begin, const Rows& rows, Scores& s) {
  if constexpr (kTree) {
    hide_in_tree(p, item, row, begin, s);
  } else {
    hide(begin, rows, s);
  }
}

// The low half of the descriptors of tiles in shared memory: the address in units of 16 bytes. The high half is the same in all of a kind.
DEVICE u32 tile_at(u32 address, u32 leading) { return u32(wgmma_descriptor(address, leading, 0, 0)); }
DEVICE u64 descriptor(u32 tile, int bytes) { return wgmma_descriptor(0, 0, 1024, 1) | u32(tile + bytes / 16); }
DEVICE u64 weight_descriptor(u32 tile, int bytes) { return wgmma_descriptor(0, 0, 8 * kWeightRow, 3) | u32(tile + bytes / 16); }

// As store_rows() does, with fewer registers: there are none to turn pairs of dims into longer pieces.
template <int kDims, class Out>
DEVICE void store_pairs(const AttentionParams& p, const Item& item, int first_row, const float (&reference)[2], const float (&total)[2],
                        const Out& out, int first_dim) {
  const int lane = computed_here(int(threadIdx.x)) % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + 8 * h;
    if (row >= item.num_rows) continue;
    const bool first = lane % 4 == 0 && first_dim == 0;
    const int dim = first_dim + lane % 4 * 2;
    if (item.partial >= 0) {
      const long at = partial_row(p, item, row);
      if (first) reinterpret_cast<float2*>(p.partial_state)[at] = {reference[h], total[h]};
      float2* const to = reinterpret_cast<float2*>(p.partial_out + at * kHeadDimV + dim);
#pragma unroll
      for (int tile = 0; tile < kDims / 8; ++tile) to[4 * tile] = pair(out, tile, h);
    } else {
      const int token = item.token_of(row), head = item.head_of(row);
      const RowEnd end = row_end(p, head, reference[h], total[h]);
      const float factor = end.factor * kv_scale(p.v, item.kv_head);
      if (first) store_lse(p, token, head, end.lse);
      char* const to = out_row(p, token, head) + dim * element_bytes(kOutType);
      const bool wide = out_is_wide(p);
#pragma unroll
      for (int tile = 0; tile < kDims / 8; ++tile) {
        const float2 x = pair(out, tile, h);
        store_pair(to + 8 * tile * element_bytes(kOutType), wide, {ended(x.x, factor), ended(x.y, factor)});
      }
    }
  }
}

}  // namespace imbrex::cuda

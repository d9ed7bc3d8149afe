#pragma once
// What the wgmma kernels have in common: places in rings of shared memory, tiles of keys, and what a thread of a warpgroup does with the
// scores and the output of its two rows, which lie in registers as wgmma.cuh says.
#include "async.cuh"
#include "attention_item.cuh"
#include "attention_output.cuh"

namespace imbrex::cuda {

// A place in a ring of `size` and the parity of its current phase.
template <int size>
struct Ring {
  int at = 0;
  u32 parity = 0;
  DEVICE void next() {
    if (++at == size) at = 0, parity ^= 1;
  }
};

struct Tiles {
  int first, end;  // of kTileKeys keys, that some row of the item sees; one at least
};
DEVICE Tiles tiles_of(const Item& item) {
  const int first = item.lo / kTileKeys;
  return {first, max(first + 1, (item.hi + kTileKeys - 1) / kTileKeys)};
}

struct Rows {  // what a thread knows of its two rows
  RowTerms terms[2];
  KeyRange seen[2];
  int position[2];
};

template <bool>
struct Edge {};

// Without a window, what a row does not see is behind it: an item's keys begin with a tile.
DEVICE void hide(int begin, const Rows& rows, float (&s)[kTileKeys / 2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int first = begin + 2 * (lane_id() % 4), lo = rows.seen[h].lo - first, hi = rows.seen[h].hi - first;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int key = 8 * j + c;
        if (key >= hi || (kWindow && key < lo)) s[4 * j + 2 * h + c] = -infinity();
      }
    }
  }
}

DEVICE void modify(const AttentionParams& p, int begin, const Rows& rows, float (&s)[kTileKeys / 2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int distance = begin + 2 * (lane_id() % 4) - rows.position[h];
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * j + 2 * h + c];
        x = modified(p, rows.terms[h], x, distance + 8 * j + c);
      }
    }
  }
}

template <int n>
DEVICE void pin(float (&x)[n]) {
#pragma unroll
  for (float& element : x) wgmma_pin(element);
}

DEVICE void store_rows(const AttentionParams& p, const Item& item, int row, const float (&reference)[2], const float (&total)[2],
                       const float (&out)[kHeadDimV / 2]) {
  const float v_scale = kv_scale(p.v, item.kv_head);
  const bool wide = out_is_wide(p);
  const int quad_lane = lane_id() % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool exists = row + 8 * h < item.num_rows;
    const int r = exists ? row + 8 * h : 0, token = item.token_of(r), head = item.head_of(r);
    if (item.partial >= 0) {
      if (!exists) continue;
      const long at = partial_row(p, item, r);
      if (quad_lane == 0) reinterpret_cast<float2*>(p.partial_state)[at] = {reference[h], total[h]};
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        *reinterpret_cast<float2*>(p.partial_out + at * kHeadDimV + 8 * j + 2 * quad_lane) = {out[4 * j + 2 * h] * v_scale,
                                                                                              out[4 * j + 2 * h + 1] * v_scale};
      }
      continue;
    }
    const RowEnd end = row_end(p, head, reference[h], total[h]);
    if (quad_lane == 0 && exists) store_lse(p, token, head, end.lse);
    char* const to = out_row(p, token, head);
    const auto at = [&](int j, int c) __attribute__((always_inline)) { return ended(out[4 * j + 2 * h + c], end.factor * v_scale); };
    if (kOutType == kF32 || !wide) {
      if (!exists) continue;
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        store_pair(to + (8 * j + 2 * quad_lane) * element_bytes(kOutType), wide, at(j, 0), at(j, 1));
      }
    } else {
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; j += 4) {  // the four lanes of a row change what they have of 32 dims into 8 neighbours each
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pairs[i] = kOutType == kBf16 ? pack_bf16(at(j + i, 0), at(j + i, 1)) : pack_f16(at(j + i, 0), at(j + i, 1));
        }
        transpose_quad(pairs);
        if (exists) *reinterpret_cast<uint4*>(to + (8 * j + 8 * quad_lane) * 2) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
}

}  // namespace imbrex::cuda

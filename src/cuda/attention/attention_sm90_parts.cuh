#pragma once
// The parts that the wgmma kernels share: a thread's work on the scores and the output of its two rows, which are in registers as
// fragment.cuh says.
#include "async.cuh"
#include "attention_expression.cuh"
#include "attention_item.cuh"
#include "attention_output.cuh"
#include "finish.cuh"
#include "fragment.cuh"
#include "tile_pages.cuh"

namespace imbrex::cuda {

// Warpgroups that compute, and the rows of each: 64, or, where TMA brings queries, as many of these as whole tokens have. What it computes
// for those behind them is anything, and stays within their rows. In verify there are two, which need not share out an item's rows.
constexpr int kTeamRows = kPrefill ? 64 / kGroup * kGroup : 64, kConsumers = kPrefill ? kTileRows / kTeamRows : 2;
static_assert(kTeamRows > 0 && kTileRows % kTeamRows == 0);

// The first of a thread's two rows; the other one is 8 further on. As the matrix unit counts, and as the item does.
DEVICE int matrix_row() { return warp_id() % 4 * 16 + lane_id() / 4; }
DEVICE int item_row() { return warp_id() / 4 * kTeamRows + matrix_row(); }

struct Rows {         // what a thread knows of its two rows
  RowTerms terms[2];  // slopes in units of the row's factor
  KeyRange seen[2];
  int position[2];
  operations::AffineScore affine[2];  // kScoreAffine: of the tile
};

// Sets the visible keys of rows `row` and `row` + 8 of the item, or of its last row where it has fewer.
DEVICE void set_seen(Rows& rows, const AttentionParams& p, const Item& item, int row) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const KeyRange seen = seen_by(p, item, min(row + 8 * h, item.num_rows - 1));
    rows.seen[h] = {max(seen.lo, item.lo), min(seen.hi, item.hi)};
  }
}

// `scale`: of the item's logits.
DEVICE void set_rows(Rows& rows, const AttentionParams& p, const Item& item, int row, float scale) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = min(row + 8 * h, item.num_rows - 1);
    rows.terms[h] = row_terms(p, item.head_of(r), scale);
    if constexpr (kAlibi) rows.terms[h].slope *= reciprocal_approx(factor_of(p, rows.terms[h]));
    rows.position[h] = item.position_of(r);
  }
  set_seen(rows, p, item, row);
}

// What a thread has of a tile's scores, then of its weights; and these as operands of a product, with values of a type.
using Scores = Fragment<kTileKeys>;
template <int type>
using WeightsOf = u32[kTileKeys / (type == kE4m3 ? 32 : 16)][4];

template <bool>
struct Edge {};

// Hides keys from rows. Without a window, hidden keys are those after the row's last one, since an item's keys begin with a tile.
template <class S>
DEVICE void hide(int begin, const Rows& rows, S& s) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int first = begin + first_column(), lo = rows.seen[h].lo - first, hi = rows.seen[h].hi - first;
    each_of_row(s, h, [=](float& x, int key) {
      if (key >= hi || (kWindow && key < lo)) x = -infinity();
    });
  }
}

// Hides from rows `row` and `row` + 8 of a tree of drafts what they do not see. All that says it is read and computed here, since few tiles
// need it, and registers are few in all of them.
template <class S>
DEVICE void hide_in_tree(const AttentionParams& p, const Item& item, int row, int begin, S& s) {
  constexpr int kWords = (kTileKeys + 63) / 64;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u64 word = item.word_of(p, row + 8 * h);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int first = begin + first_column() + 64 * i;  // the numbers of further keys are constants
      u64 seen = item.first_bit == kFar ? low_bits(item.own_key(row + 8 * h) + 1 - first) : word_from(word, first - item.first_bit);
      if constexpr (kWindow) seen &= ~low_bits(item.first_seen(p, row + 8 * h) - first);
      each_of_row(s, h, [=](float& x, int key) {
        if (key / 64 == i && (seen >> key % 64 & 1) == 0) x = -infinity();
      });
    }
  }
}

// Scores become logits, but for what weigh() does to all that a thread has of a row: it multiplies by the row's factor, and adds what
// ALiBi adds to the first of them. What it adds to the others on top takes a multiply-add each, whose numbers of keys are constants.
DEVICE void modify(const Rows& rows, Scores& s) {
  each(s, [&](float& x, int h, int key) {
    x = bent(rows.terms[h], x);
    if constexpr (kAlibi) x = fmaf(rows.terms[h].slope, float(key), x);
  });
}

// Scores of a tile whose keys begin at `begin` become weights relative to each row's reference. True where a row's sums must be multiplied
// by `factor` first; `slack` and `fresh` as in move_reference().
DEVICE bool weigh(const AttentionParams& p, int begin, const Rows& rows, Scores& s, float (&reference)[2], float (&sum)[2],
                  float (&factor)[2], float slack, float fresh) {
  bool moved = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = greatest(s, h);
    const float scale = kScoreAffine ? rows.affine[h].number * kLog2e : kScoreMod ? kLog2e : factor_of(p, rows.terms[h]);
    constexpr bool kShifted = kAlibi || kScoreAffine;
    float first = 0.f;  // what ALiBi, or what score_mod, adds to all
    if constexpr (kScoreAffine) first = rows.affine[h].rest * kLog2e;
    if constexpr (kAlibi) first = scale * rows.terms[h].slope * float(begin + first_column() - rows.position[h]);
    top = kShifted ? max_over<4>(fmaf(top, scale, first)) : max_over<4>(top) * scale;
    const bool moves = move_reference(reference[h], top, slack, fresh, factor[h]);
    moved = moved || moves;
    sum[h] *= factor[h];
    const float added = kShifted ? first - reference[h] : -reference[h];
    float part[2] = {0.f, 0.f};
    each_of_row(s, h, [=, &part](float& x, int key) {
      x = exp2_approx(fmaf(x, scale, added));
      part[key % 2] += x;
    });
    sum[h] += part[0] + part[1];
  }
  return any_lane(moved);
}

// Weights become operands. Bytes are in the order in which turn_values() of attention_sm90_fp8_load.cuh has keys in a row: word i of a
// product's four has those of row i % 2 for keys 16 (i / 2) + 2 t, + 1, + 8 and + 9 of its 32.
template <int type>
DEVICE void pack_weights(const Scores& s, WeightsOf<type>& weights) {
  if constexpr (type == kE4m3) {
#pragma unroll
    for (int i = 0; i < kTileKeys / 8; ++i) {
      const float2 low = pair(s, i / 2 * 2, i % 2), high = pair(s, i / 2 * 2 + 1, i % 2);
      weights[i / 4][i % 4] = pack_e4m3(low.x, low.y) | pack_e4m3(high.x, high.y) << 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTileKeys / 4; ++i) {
      const float2 x = pair(s, i / 2, i % 2);
      weights[i / 4][i % 4] = type == kBf16 ? pack_bf16(x.x, x.y) : pack_f16(x.x, x.y);
    }
  }
}

// Values of keys outside of [lo, hi), counted from the tile's first, may be anything, and zero times NaN is NaN. A warpgroup clears those
// that it reads, `chunks` of 64 16-bit dims from `v` on, without waiting for the others, and meets at a barrier of its own then.
template <int chunks, int chunk_bytes>
DEVICE void clear_values(u32 v, int lo, int hi) {
#pragma unroll 1
  for (int i = int(threadIdx.x) % 128; i < kTileKeys * chunks * 8; i += 128) {
    const int row = i / 8 % kTileKeys, chunk = i / 8 / kTileKeys;
    if (row < lo || row >= hi) store_shared(v + chunk * chunk_bytes + row * 128 + i % 8 * 16, uint4{0, 0, 0, 0});
  }
  async_proxy_fence();
}

// Writes the item's rows: their dims from first_dim on, as many of kStoredDims as there are. What is in `out` afterwards is of no use.
template <int kStoredDims = kHeadDimV, class Out>
DEVICE void store_rows(const AttentionParams& p, const Item& item, int row, const float (&reference)[2], const float (&total)[2], Out& out,
                       int first_dim = 0) {
  const bool partial = item.partial >= 0, wide = out_is_wide(p);
  const auto has_dims = [&](int d) { return kStoredDims == kHeadDimV || first_dim + d < kHeadDimV; };
  const int quad_lane = lane_id() % 4, end = kTeamRows == 64 ? item.num_rows : min(item.num_rows, row - matrix_row() + kTeamRows);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const bool exists = row + 8 * h < end, writes_state = exists && quad_lane == 0 && first_dim == 0;
    const int r = exists ? row + 8 * h : 0, token = item.token_of(r), head = item.head_of(r);
    float factor = 1.f;
    char* to;
    if (partial) {
      const long at = partial_row(p, item, r);
      to = reinterpret_cast<char*>(p.partial_out + at * kHeadDimV + first_dim);
      if (writes_state) reinterpret_cast<float2*>(p.partial_state)[at] = {reference[h], total[h]};
    } else {
      const RowEnd end = row_end(p, head, reference[h], total[h]);
      to = out_row(p, token, head) + first_dim * element_bytes(kOutType);
      factor = end.factor * kv_scale(p.v, item.kv_head);
      if (writes_state) store_lse(p, token, head, end.lse);
    }
#pragma unroll
    for (int j = 0; j < kStoredDims / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        at(out, j, h, c) = ended(at(out, j, h, c), factor);
        wgmma_pin(at(out, j, h, c));  // here, once, and not anew in each branch
      }
    }
    if (partial) {
#pragma unroll
      for (int j = 0; j < kStoredDims / 8; ++j) {
        if (exists && has_dims(8 * j)) reinterpret_cast<float2*>(to)[4 * j + quad_lane] = pair(out, j, h);
      }
    } else if (kOutType == kF32 || !wide) {
#pragma unroll
      for (int j = 0; j < kStoredDims / 8; ++j) {
        char* const place = to + (8 * j + 2 * quad_lane) * element_bytes(kOutType);
        if (exists && has_dims(8 * j)) store_pair(place, wide, pair(out, j, h));
      }
    } else {
#pragma unroll
      for (int j = 0; j < kStoredDims / 8; j += 4) {  // the four lanes of a row change what they have of 32 dims into 8 neighbours each
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = j + i < kTilesOf<Out> ? pair(out, j + i, h) : pair(out, 0, 0);  // not stored if there is none
          pairs[i] = kOutType == kBf16 ? pack_bf16(x.x, x.y) : pack_f16(x.x, x.y);
        }
        transpose_quad(pairs);
        if (exists && 8 * (j + quad_lane) < kStoredDims && has_dims(8 * (j + quad_lane)))
          *reinterpret_cast<uint4*>(to + (8 * j + 8 * quad_lane) * 2) = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
}

}  // namespace imbrex::cuda

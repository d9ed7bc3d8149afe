#pragma once
// The user's score_mod in attention_sm90.cu: what it makes of a thread's scores of its two rows.
//
// What the keys of a row or the rows of a key have in common (src/expression/score_parts.h) is computed once a tile, while the products of
// its scores are under way: the values of a row by each thread that has it, those of a key by one thread of the warpgroup, which writes
// them to shared memory. A score is left with what depends on both. Where all of score_mod() is an AffineScore, that is a value of a row.
#include "attention_sm90_parts.cuh"

namespace imbrex::cuda {

// Their text is there if kScoreMod and not kScoreAffine. The first two write the bits of values to arrays of ints.
void score_columns(const ExpressionInputs&, int* columns);
void score_rows(const ExpressionInputs&, int* rows);
float score_of_parts(const ExpressionInputs&, const int* columns, const int* rows);

constexpr bool kScoreParts = kScoreColumns + kScoreRows > 0;
constexpr int kPlainColumns = kScoreColumns - kScoreHeadColumns;
// Numbers of a key: of those that differ between heads one for each head. Keys that eight lanes read at once are in as many banks.
constexpr int kColumnNumbers = kPlainColumns + kScoreHeadColumns * kGroup, kColumnPitch = kTileKeys + 8;
// Whether a thread's two rows are of the same head.
constexpr bool kSameHead = 8 % kGroup == 0;

template <int numbers>
struct ScoreColumns {  // in shared memory
  alignas(16) int columns[kConsumers][numbers][kColumnPitch];
  DEVICE int* columns_of(int wg) { return columns[wg][0]; }
};
template <>
struct ScoreColumns<0> {
  DEVICE int* columns_of(int) { return nullptr; }
};
constexpr int kColumnBytes = 4 * kConsumers * kColumnNumbers * kColumnPitch;

// What a thread has of its two rows.
using RowValues = int[2][kScoreRows > 0 ? kScoreRows : 1];

DEVICE void keep_here(float& x) { wgmma_pin(x); }
DEVICE void keep_here(int& x) { wgmma_pin(reinterpret_cast<u32&>(x)); }

// Computes the values of the thread's rows `row` and `row` + 8.
DEVICE void ready_row_values(const AttentionParams& p, const Item& item, int row, int begin, Rows& rows, RowValues& values) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const ExpressionInputs in = expression_inputs(p, item, row + 8 * h, p.score_tensors);
    if constexpr (kScoreAffine) {
      operations::AffineScore& affine = rows.affine[h];
      affine = affine_score(of_logit(in, begin + first_column(), 0, 0.f, rows.terms[h].scale));
      keep_here(affine.number), keep_here(affine.step), keep_here(affine.rest);
    } else if constexpr (kScoreRows > 0) {
      score_rows(in, values[h]);
#pragma unroll
      for (int& value : values[h]) keep_here(value);
    }
  }
}

// Writes the values of the tile's keys to `columns`: a thread of the warpgroup those of one key. Without a branch, which would have to wait
// for the products: threads without a key write what the last one's does.
DEVICE void ready_columns(const AttentionParams& p, const Item& item, int begin, int* columns) {
  static_assert(kTileKeys <= 128);
  const int key = min(int(threadIdx.x) % 128, kTileKeys - 1);
  ExpressionInputs in = of_logit(expression_inputs(p, item, 0, p.score_tensors), begin + key, 0, 0.f, 1.f);
#pragma unroll
  for (int g = 0; g < (kScoreHeadColumns > 0 ? kGroup : 1); ++g) {
    int values[kScoreColumns > 0 ? kScoreColumns : 1];
    in.head = item.kv_head * kGroup + g;
    score_columns(in, values);
#pragma unroll
    for (int c = 0; c < kScoreColumns; ++c) {
      const int number = c < kPlainColumns ? c : kPlainColumns + (c - kPlainColumns) * kGroup + g;
      if (c >= kPlainColumns || g == 0) columns[number * kColumnPitch + key] = values[c];
    }
  }
}

// Scores become what score_mod() makes of logits, but for what weigh() does to all that a thread has of a row.
DEVICE void modify_by_score_mod(const AttentionParams& p, const Item& item, int row, int begin, const Rows& rows, const RowValues& values,
                                const int* columns, Scores& s) {
  if constexpr (kScoreAffine) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float step = rows.affine[h].step * reciprocal_approx(rows.affine[h].number);
      each_of_row(s, h, [=](float& x, int key) { x = fmaf(step, float(key), x); });
    }
    return;
  }
  const int first = begin + first_column();
  const ExpressionInputs in[2] = {expression_inputs(p, item, row, p.score_tensors), expression_inputs(p, item, row + 8, p.score_tensors)};
  const int* of_head[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    of_head[h] = columns + first_column() + (item.row_begin + row + 8 * h) % kGroup * (kScoreHeadColumns > 0 ? kColumnPitch : 0);
    // Key by key, so that what both rows need of it is read once.
#pragma unroll
  for (int tile = 0; tile < kTilesOf<Scores>; ++tile) {
    uint2 found[2][kScoreColumns > 0 ? kScoreColumns : 1];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int c = 0; c < kScoreColumns; ++c) {
        const bool plain = c < kPlainColumns;
        const int number = plain ? c : kPlainColumns + (c - kPlainColumns) * kGroup;
        const int* const from = (plain ? columns + first_column() : of_head[h]) + number * kColumnPitch + 8 * tile;
        found[h][c] = h == 1 && (plain || kSameHead) ? found[0][c] : *reinterpret_cast<const uint2*>(from);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = at(s, tile, h, c);
        const ExpressionInputs of = of_logit(in[h], first, 8 * tile + c, x, rows.terms[h].scale);
        if constexpr (kScoreParts) {
          int of_key[kScoreColumns > 0 ? kScoreColumns : 1];
#pragma unroll
          for (int i = 0; i < kScoreColumns; ++i) of_key[i] = int(c == 0 ? found[h][i].x : found[h][i].y);
          x = score_of_parts(of, of_key, values[h]);
        } else {
          x = score_mod(of);
        }
      }
    }
  }
}

}  // namespace imbrex::cuda

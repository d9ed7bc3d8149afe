#pragma once
// The user's score_mod in attention_sm90.cu: what it makes of a thread's scores of its two rows.
//
// What the keys of a row or the rows of a key have in common (src/expression/score_parts.h) is not computed for each score. The values of a
// row are computed by each thread that has it, once an item, and those of a key by one thread of the warpgroup, which writes them to shared
// memory: they take loads that are far away, so they are computed a tile ahead. A score is left with what depends on both. Where all of
// score_mod() is an AffineScore, that is a value of a row and a tile.
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
struct ScoreColumns {  // in shared memory: of a tile whose keys are in a stage
  alignas(16) int columns[kConsumers][kStages][numbers][kColumnPitch];
  DEVICE int* columns_of(int wg, int stage) { return columns[wg][stage][0]; }
};
template <>
struct ScoreColumns<0> {
  DEVICE int* columns_of(int, int) { return nullptr; }
};
constexpr int kColumnBytes = 4 * kConsumers * kStages * kColumnNumbers * kColumnPitch;

// What a thread has of one key of the tile that comes next.
using ColumnValues = int[kColumnNumbers > 0 ? kColumnNumbers : 1];
// What a thread has of its two rows.
using RowValues = int[2][kScoreRows > 0 ? kScoreRows : 1];

// What all keys of the thread's rows `row` and `row` + 8 have in common.
DEVICE void set_row_values(const AttentionParams& p, const Item& item, int row, RowValues& values) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if constexpr (kScoreRows > 0) score_rows(expression_inputs(p, item, row + 8 * h, p.score_tensors), values[h]);
}

// Computes, for one key of the tile that begins at `begin`, the values of the key. Without a branch, which would have to wait for products
// that are under way: threads without a key compute what the last one does.
DEVICE void compute_columns(const AttentionParams& p, const Item& item, int begin, ColumnValues& found) {
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
      if (c >= kPlainColumns || g == 0) found[c < kPlainColumns ? c : kPlainColumns + (c - kPlainColumns) * kGroup + g] = values[c];
    }
  }
}
// Where a key's numbers are put at two places of the loop, no other thread may put what the last key's thread does.
DEVICE void put_columns(const ColumnValues& found, int* columns) {
  const int key = min(int(threadIdx.x) % 128, kTileKeys - 1);
  if (kHeadDimQk > 128 && int(threadIdx.x) % 128 >= kTileKeys) return;
#pragma unroll
  for (int i = 0; i < kColumnNumbers; ++i) columns[i * kColumnPitch + key] = found[i];
}

// Scores become what score_mod() makes of logits, but for what weigh() does to all that a thread has of a row.
DEVICE void modify_by_score_mod(const AttentionParams& p, const Item& item, int row, int begin, Rows& rows, const RowValues& values,
                                const int* columns, Scores& s) {
  if constexpr (kScoreAffine) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const ExpressionInputs in = expression_inputs(p, item, row + 8 * h, p.score_tensors);
      rows.affine[h] = affine_score(of_logit(in, begin + first_column(), 0, 0.f, rows.terms[h].scale));
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

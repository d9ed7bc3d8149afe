#pragma once
// One warp of attention_sm80.cu: its rows of scores and output in registers.
#include "attention_products.cuh"

namespace imbrex::cuda {

constexpr int kWarpDims = kVDims / kDimWarps, kDimTiles = kWarpDims / 8;

// Whether the fragments of queries fit the registers beside scores and output, and beside what loads positions that are given.
constexpr bool kQInRegisters = kQRegisters + kRowTiles * (kDimTiles + kKeyTiles) * 4 <= (kPositions ? 168 : 176) && kQRegisters <= 64;

class Warp {
 public:
  DEVICE Warp(const AttentionParams& p, const Item& item, const ItemSlot& slot, u32 q, float scale, int warp)
      : scores_(p, item, slot, q, scale, warp % kRowWarps * kWarpRows),
        lane_(computed_here(lane_id())),
        dim_(warp / kRowWarps % kDimWarps * kWarpDims) {
    v_lane_ = PaddedRows::lane(lane_ % 16, lane_ / 16, PaddedRows::kVRow) + dim_ * kStoredBytes + kVBegin;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) reference_[m][h] = kEmptyReference, sum_[m][h] = 0.f;
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
        for (float& x : out_[m][n]) x = 0.f;
      }
    }
  }

  // Called when the item's queries are in shared memory.
  DEVICE void begin() { scores_.begin(); }

  // Computes with keys [begin, begin + kTeamKeys) and their values, which are in shared memory at `stage`.
  DEVICE void step(int begin, u32 stage) {
    if (!scores_.sees(begin)) return;
    ScoreTile s;
    scores_.compute(begin, stage, s);
    weigh(s);
    add_values(stage + v_lane_, s);
  }

  // The sum of a row's weights, which lanes 4g to 4g + 3 share; all four get it.
  DEVICE float total(int m, int h) const { return sum_over<4>(sum_[m][h]); }
  DEVICE float reference(int m, int h) const { return reference_[m][h]; }
  // Row of the item's tile, and dims, that this lane holds. Of each row there are kDimTiles pairs of neighbours.
  DEVICE int row_of(int m, int h) const { return scores_.row_of(m, h); }
  DEVICE int dim_of(int pair) const { return dim_ + dim_of_pair(pair); }
  DEVICE float2 pair_of(int m, int h, int pair) const { return imbrex::cuda::pair_of(out_[m], h, pair); }
  DEVICE bool has_first_dims() const { return dim_ == 0; }

 private:
  using ScoreTile = float[kRowTiles][kKeyTiles][4];

  // Scores become weights relative to each row's reference; where a maximum outgrows it by too much, the row's sums are rescaled.
  DEVICE void weigh(ScoreTile& s) {
    float factor[kRowTiles][2], scale[kRowTiles][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = -infinity();
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        top = max_over<4>(top);
        top *= scale[m][h] = scores_.factor_left(row_of(m, h));
        const bool moves = move_reference(reference_[m][h], top, kSlack, 0.f, factor[m][h]);
        moved = moved || moves;
      }
    }
    if (any_lane(moved)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        sum_[m][0] *= factor[m][0], sum_[m][1] *= factor[m][1];
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
          out_[m][n][0] *= factor[m][0], out_[m][n][1] *= factor[m][0];
          out_[m][n][2] *= factor[m][1], out_[m][n][3] *= factor[m][1];
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = s[m][n][i], reference = reference_[m][i / 2];
          s[m][n][i] = exp2_approx(fmaf(x, scale[m][i / 2], -reference));
          sum_[m][i / 2] += s[m][n][i];
        }
      }
    }
  }

  DEVICE void add_values(u32 v, const ScoreTile& s) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      u32 a[kRowTiles][kQPlanes][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pack_planes(s[m][n + i / 2][i % 2 * 2], s[m][n + i / 2][i % 2 * 2 + 1], i, a[m]);
      }
      add_products<PaddedRows>(a, v + n * 8 * PaddedRows::kVRow, out_);
    }
  }

  Scores<PaddedRows, kQInRegisters> scores_;
  const int lane_, dim_;  // first dim of the output that is this warp's
  u32 v_lane_;            // where this lane's rows of the fragments begin
  float out_[kRowTiles][kDimTiles][4], reference_[kRowTiles][2], sum_[kRowTiles][2];
};

}  // namespace imbrex::cuda

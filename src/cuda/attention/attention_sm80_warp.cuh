#pragma once
// One warp of attention_sm80.cu: its rows of scores and output in registers.
#include "attention_products.cuh"
#include "row_sums.cuh"

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
      fill(out_[m], 0.f);
    }
  }

  // Called when the item's queries are in shared memory.
  DEVICE void begin() { scores_.begin(); }

  // Computes with keys [begin, begin + kTeamKeys) and their values, which are in shared memory at `stage`. `shown`: mask_mod() hides none.
  DEVICE void step(int begin, u32 stage, bool shown) {
    if (!scores_.sees(begin)) return;
    ScoreTile s;
    scores_.compute(begin, stage, s, shown);
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
  // Writes the rows of the item, for a warp that has all sums of its rows.
  DEVICE void store(const AttentionParams& p, const Item& item) const {
    const bool aligned = out_is_wide(p);
    const float v_scale = value_scale(p, item.kv_head);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int m = i / 2, h = i % 2, row = row_of(m, h);
      const float sum = total(m, h);
      if (row < item.num_rows)
        store_row(p, item, row, reference_[m][h], sum, out_[m], h, dim_, has_first_dims() && lane_id() % 4 == 0, aligned, v_scale);
    }
  }

 private:
  using ScoreTile = TiledFragment<kTeamKeys>[kRowTiles];

  // Scores become weights relative to each row's reference; where a maximum outgrows it by too much, the row's sums are rescaled.
  DEVICE void weigh(ScoreTile& s) {
    float factor[kRowTiles][2], scale[kRowTiles][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = max_over<4>(greatest(s[m], h));
        top *= scale[m][h] = scores_.factor_left(row_of(m, h));
        const bool moves = move_reference(reference_[m][h], top, kSlack, 0.f, factor[m][h]);
        moved = moved || moves;
      }
    }
    if (any_lane(moved)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) rescale(factor[m], sum_[m], out_[m]);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      each(s[m], [&](float& x, int h, int) {
        x = exp2_approx(fmaf(x, scale[m][h], -reference_[m][h]));
        sum_[m][h] += x;
      });
    }
  }

  DEVICE void add_values(u32 v, const ScoreTile& s) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      u32 a[kRowTiles][kQPlanes][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pack_planes(pair(s[m], n + i / 2, i % 2), i, a[m]);
      }
      add_products<PaddedRows>(a, v + n * 8 * PaddedRows::kVRow, out_);
    }
  }

  Scores<PaddedRows, kQInRegisters> scores_;
  const int lane_, dim_;  // first dim of the output that is this warp's
  u32 v_lane_;            // where this lane's rows of the fragments begin
  TiledFragment<kWarpDims> out_[kRowTiles];
  float reference_[kRowTiles][2], sum_[kRowTiles][2];
};

}  // namespace imbrex::cuda

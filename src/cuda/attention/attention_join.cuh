#pragma once
// The end of an item whose keys several teams of warps have shared out: their parts meet in shared memory and are added in the order of
// the teams. Where the item is a piece of a longer one, the sums go to memory, and the thread block whose piece comes last joins all
// pieces (attention_fold.cuh): no second launch, and the same bits whoever is last.
#include "attention_fold.cuh"
#include "attention_sm80_warp.cuh"

namespace imbrex::cuda {

// `part(team, row, dim)` is where a team's sum of a row lies, with the three dims behind a multiple of four.
template <class Part>
DEVICE void put_part(const Warp& warp, int team, const Part& part, float2 (&state)[kTeams][kTileRows]) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int m = i / 2, h = i % 2, row = warp.row_of(m, h);
    const float sum = warp.total(m, h);
    if (warp.has_first_dims() && lane_id() % 4 == 0) state[team][row] = {warp.reference(m, h), sum};
#pragma unroll
    for (int pair = 0; pair < kDimTiles; ++pair) *reinterpret_cast<float2*>(part(team, row, warp.dim_of(pair))) = warp.pair_of(m, h, pair);
  }
}

// Adds up the teams' parts. Called by `threads` threads when all parts are in shared memory.
template <int threads, class Part>
DEVICE void join_parts(const AttentionParams& p, const Item& item, const Part& part, const float2 (&state)[kTeams][kTileRows]) {
  const bool wide = out_is_wide(p);
  const float v_scale = value_scale(p, item.kv_head);
  for (int i = computed_here(int(threadIdx.x)) % threads; i < item.num_rows * kEights; i += threads) {
    const int row = i / kEights, d = first_dim_of(i);
    RowSums sums;
#pragma unroll
    for (int t = 0; t < kTeams; ++t) sums.reference = fmaxf(sums.reference, state[t][row].x);
#pragma unroll
    for (int t = 0; t < kTeams; ++t) {
      const float weight = exp2_approx(state[t][row].x - sums.reference);
      sums.sum += state[t][row].y * weight;
      const float4 low = *reinterpret_cast<const float4*>(part(t, row, d));
      const float4 high = *reinterpret_cast<const float4*>(part(t, row, d + kHighDims));
      const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int k = 0; k < 8; ++k) sums.x[k] += values[k] * weight;
    }
    if (item.partial < 0) {
      sums.store(p, item.token_of(row), item.head_of(row), d, v_scale, wide);
    } else {
      sums.leave(p, partial_row(p, item, row), d);
    }
  }
}

}  // namespace imbrex::cuda

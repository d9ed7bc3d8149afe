#pragma once
// The end of an item whose keys several teams of warps have shared out: their parts meet in shared memory and are added in the order of
// the teams.
#include "attention_output.cuh"
#include "attention_sm80_warp.cuh"

namespace imbrex::cuda {

DEVICE void store_state(const AttentionParams& p, const Item& item, int row, float reference, float sum) {
  float2* const state = reinterpret_cast<float2*>(p.partial_state);
  state[partial_row(p, item, row)] = {reference, sum};
}

// `part(team, row, dim)` is where a team's sums of a row lie, eight dims at a time.
template <class Layout, class Part>
DEVICE void put_part(const Warp<Layout>& warp, int team, const Part& part, float2 (&state)[kTeams][kTileRows]) {
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int m = i / 2, h = i % 2, row = warp.row_of(m, h);
    const float sum = warp.total(m, h);
    if (warp.has_first_dims() && lane_id() % 4 == 0) state[team][row] = {warp.reference(m, h), sum};
#pragma unroll
    for (int pair = 0; pair < kDimTiles; ++pair) *reinterpret_cast<float2*>(part(team, row, warp.dim_of(pair))) = warp.pair_of(m, h, pair);
  }
}

// By `threads` threads, when all parts are there.
template <int threads, class Part>
DEVICE void join_parts(const AttentionParams& p, const Item& item, const Part& part, const float2 (&state)[kTeams][kTileRows]) {
  constexpr int kEights = kHeadDimV / 8;
  const bool wide = out_is_wide(p);
  const float v_scale = kv_scale(p.v, item.kv_head);
  for (int i = computed_here(int(threadIdx.x)) % threads; i < item.num_rows * kEights; i += threads) {
    const int row = i / kEights, d = i % kEights * 8;
    float reference = kEmptyReference, sum = 0.f, x[8] = {};
#pragma unroll
    for (int t = 0; t < kTeams; ++t) reference = fmaxf(reference, state[t][row].x);
#pragma unroll
    for (int t = 0; t < kTeams; ++t) {
      const float weight = exp2_approx(state[t][row].x - reference);
      const float4* const from = reinterpret_cast<const float4*>(part(t, row, d));
      const float4 low = from[0], high = from[1];
      const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      sum += state[t][row].y * weight;
#pragma unroll
      for (int k = 0; k < 8; ++k) x[k] += values[k] * weight;
    }
    if (item.partial >= 0) {
      if (d == 0) store_state(p, item, row, reference, sum);
      float4* const out = reinterpret_cast<float4*>(p.partial_out + partial_row(p, item, row) * kHeadDimV + d);
      out[0] = {x[0] * v_scale, x[1] * v_scale, x[2] * v_scale, x[3] * v_scale};
      out[1] = {x[4] * v_scale, x[5] * v_scale, x[6] * v_scale, x[7] * v_scale};
    } else {
      const int token = item.token_of(row), head = item.head_of(row);
      const RowEnd end = row_end(p, head, reference, sum);
      if (d == 0) store_lse(p, token, head, end.lse);
#pragma unroll
      for (float& value : x) value = ended(value, end.factor * v_scale);
      store_out(out_row(p, token, head) + d * element_bytes(kOutType), wide, x);
    }
  }
}

}  // namespace imbrex::cuda

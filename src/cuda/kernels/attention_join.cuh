#pragma once
// The end of an item whose keys several teams of warps have shared out: their parts meet in shared memory and are added in the order of
// the teams. Where the item is a piece of a longer one, the sums go to memory, and the thread block whose piece comes last adds up all
// pieces, in their order: no second launch, and the same bits whoever is last.
#include "attention_output.cuh"
#include "attention_sm80_warp.cuh"

namespace imbrex::cuda {

// `part(team, row, dim)` is where a team's sum of a row lies, with the three dims behind a multiple of four.
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

// Eight dims of a row, from `d` on: its sums so far, and what they are relative to.
struct RowSums {
  float reference = kEmptyReference, sum = 0.f, x[8] = {};

  DEVICE void add(float2 state, float4 low, float4 high) {
    const float weight = exp2_approx(state.x - reference);
    const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    sum += state.y * weight;
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] += values[k] * weight;
  }

  DEVICE void store(const AttentionParams& p, const Item& item, int row, int d, float scale, bool wide) {
    const int token = item.token_of(row), head = item.head_of(row);
    const RowEnd end = row_end(p, head, reference, sum);
    if (d == 0) store_lse(p, token, head, end.lse);
#pragma unroll
    for (float& value : x) value = ended(value, end.factor * scale);
    store_out(out_row(p, token, head) + d * element_bytes(kOutType), wide, x);
  }
};

// By `threads` threads, when all parts are there.
template <int threads, class Part>
DEVICE void join_parts(const AttentionParams& p, const Item& item, const Part& part, const float2 (&state)[kTeams][kTileRows]) {
  constexpr int kEights = kHeadDimV / 8;
  const bool wide = out_is_wide(p);
  const float v_scale = kv_scale(p.v, item.kv_head);
  for (int i = computed_here(int(threadIdx.x)) % threads; i < item.num_rows * kEights; i += threads) {
    const int row = i / kEights, d = i % kEights * 8;
    RowSums sums;
#pragma unroll
    for (int t = 0; t < kTeams; ++t) sums.reference = fmaxf(sums.reference, state[t][row].x);
#pragma unroll
    for (int t = 0; t < kTeams; ++t) {
      sums.add(state[t][row], *reinterpret_cast<const float4*>(part(t, row, d)), *reinterpret_cast<const float4*>(part(t, row, d + 4)));
    }
    if (item.partial < 0) {
      sums.store(p, item, row, d, v_scale, wide);
      continue;
    }
    const long at = partial_row(p, item, row);
    if (d == 0) reinterpret_cast<float2*>(p.partial_state)[at] = {sums.reference, sums.sum};
    float4* const out = reinterpret_cast<float4*>(p.partial_out + at * kHeadDimV + d);
    const float(&x)[8] = sums.x;
    out[0] = {x[0] * v_scale, x[1] * v_scale, x[2] * v_scale, x[3] * v_scale};
    out[1] = {x[4] * v_scale, x[5] * v_scale, x[6] * v_scale, x[7] * v_scale};
  }
}

// After join_parts of a piece, by one thread that has seen all of them store: whether it was the last piece of its item.
DEVICE bool is_last_piece(const AttentionParams& p, const Item& item) {
  memory_fence();
  int& arrivals = p.arrivals[(item.merge * p.num_kv_heads + item.kv_head) * kRowBlocks + item.row_begin / kTileRows];
  if (atomicAdd(&arrivals, 1) != p.merges[item.merge].num_splits - 1) return false;
  arrivals = 0;
  memory_fence();
  return true;
}

// By `threads` threads, when that was so.
template <int threads>
DEVICE void join_pieces(const AttentionParams& p, const Item& item) {
  constexpr int kEights = kHeadDimV / 8;
  const MergeItem merge = p.merges[item.merge];
  const int heads = p.num_kv_heads * kGroup;
  const long stride = long(merge.q_end - merge.q_begin) * heads, to_first = long(merge.first_partial - item.partial) * heads;
  const bool wide = out_is_wide(p);
  for (int i = computed_here(int(threadIdx.x)) % threads; i < item.num_rows * kEights; i += threads) {
    const int row = i / kEights, d = i % kEights * 8;
    const long first = partial_row(p, item, row) + to_first;
    const float2* const state = reinterpret_cast<const float2*>(p.partial_state) + first;
    const float* const out = p.partial_out + first * kHeadDimV + d;
    RowSums sums;
#pragma unroll 8
    for (int s = 0; s < merge.num_splits; ++s) sums.reference = fmaxf(sums.reference, load_l2(state + s * stride).x);
#pragma unroll 4
    for (int s = 0; s < merge.num_splits; ++s) {
      const float4* const from = reinterpret_cast<const float4*>(out + s * stride * kHeadDimV);
      sums.add(load_l2(state + s * stride), load_l2(from), load_l2(from + 1));
    }
    sums.store(p, item, row, d, 1.f, wide);
  }
}

}  // namespace imbrex::cuda

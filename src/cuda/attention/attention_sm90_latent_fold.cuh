#pragma once
// What a warp does with nodes of the tree of pieces in attention_sm90_latent.cu: it writes its part of one to memory, and folds its sums
// with a part that has come back to shared memory.
#include "attention_sm90_latent_load.cuh"
#include "attention_sm90_runs.cuh"

namespace imbrex::cuda {

// Writes a warp's part of a node to `part`: for each 8 dims what its lanes have of them, and what these sums are relative to, with their
// totals.
template <class Out>
DEVICE void put_node(float* part, const float (&reference)[2], const float (&total)[2], const Out& out) {
  static_assert((kTilesOf<Out> + 1) * 4 * 32 == kNodePartFloats);
  float4* const to = reinterpret_cast<float4*>(part) + computed_here(int(threadIdx.x)) % 32;
  to[kTilesOf<Out> * 32] = {reference[0], reference[1], total[0], total[1]};
#pragma unroll
  for (int i = 0; i < kTilesOf<Out>; ++i) to[i * 32] = four(out, i);
}

// Folds the node whose part is in a stage at `from` with `out`, which has the sums of later keys.
template <class Out>
DEVICE void fold_staged(u32 from, float (&reference)[2], float (&total)[2], Out& out) {
  const auto load = [at = from + computed_here(int(threadIdx.x)) % 32 * 16](int i) {
    const uint4 x = load_shared(at + i * 512);
    return float4{float_of(x.x), float_of(x.y), float_of(x.z), float_of(x.w)};
  };
  const float4 state = load(kTilesOf<Out>);
  const Fold fold[2] = {{state.x, reference[0]}, {state.y, reference[1]}};
  total[0] = fold[0](state.z, total[0]), total[1] = fold[1](state.w, total[1]);
  reference[0] = fold[0].reference, reference[1] = fold[1].reference;
#pragma unroll
  for (int i = 0; i < kTilesOf<Out>; ++i) set_four(out, i, folded(fold, load(i), four(out, i)));
}

}  // namespace imbrex::cuda

#pragma once
// What a warp does with nodes of the tree of pieces in attention_sm90_latent.cu: it writes its part of one to memory, and folds its sums
// with a part that has come back to shared memory.
#include "attention_sm90_latent_load.cuh"
#include "attention_sm90_runs.cuh"

namespace imbrex::cuda {

static_assert(kTeamDims % 64 == 0);
constexpr int kEnd = kTeamDims / 16 + kTeamDims / 64;  // of a lane's pieces of a part, behind which are references and totals

// Writes a warp's part of a node to `part`, sixteen bytes a lane at a time: the upper bytes of what it has of each 16 dims, then the bits
// below these of 64 dims at a time, then what the sums are relative to, with their totals.
template <class Out>
DEVICE void put_node(float* part, const float (&reference)[2], const float (&total)[2], const Out& out) {
  static_assert((kEnd + 1) * 4 * 32 == kNodePartFloats);
  uint4* const to = reinterpret_cast<uint4*>(part) + computed_here(int(threadIdx.x)) % 32;
  to[kEnd * 32] = {bits_of(reference[0]), bits_of(reference[1]), bits_of(total[0]), bits_of(total[1])};
#pragma unroll
  for (int i = 0; i < kTilesOf<Out>; i += 8) {
    u32 below[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float4 a = four(out, i + 2 * k), b = four(out, i + 2 * k + 1);
      to[(i / 2 + k) * 32] = upper_bytes(a, b), below[k] = nibbles_below(a, b);
    }
    to[(kTilesOf<Out> / 2 + i / 8) * 32] = {below[0], below[1], below[2], below[3]};
    asm volatile("" ::: "memory");
  }
}

// Folds the node whose part is in a stage at `from` with `out`, which has the sums of later keys.
template <class Out>
DEVICE void fold_staged(u32 from, float (&reference)[2], float (&total)[2], Out& out) {
  const auto load = [at = from + computed_here(int(threadIdx.x)) % 32 * 16](int i) { return load_shared(at + i * 512); };
  const uint4 state = load(kEnd);
  const Fold fold[2] = {{float_of(state.x), reference[0]}, {float_of(state.y), reference[1]}};
  total[0] = fold[0](float_of(state.z), total[0]), total[1] = fold[1](float_of(state.w), total[1]);
  reference[0] = fold[0].reference, reference[1] = fold[1].reference;
  const OutputFold<true> output[2] = {OutputFold<true>(fold[0]), OutputFold<true>(fold[1])};
  const auto join = [&](int tile, const float4& node) {
    const float4 x = four(out, tile);
    set_four(
        out, tile,
        {output[0].of_kept(node.x, x.x), output[0].of_kept(node.y, x.y), output[1].of_kept(node.z, x.z), output[1].of_kept(node.w, x.w)});
  };
#pragma unroll
  for (int i = 0; i < kTilesOf<Out>; i += 8) {
    const uint4 rest = load(kTilesOf<Out> / 2 + i / 8);
    const u32 below[4] = {rest.x, rest.y, rest.z, rest.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 upper = load(i / 2 + k);
      join(i + 2 * k, four_of(upper.x, upper.y, below[k])), join(i + 2 * k + 1, four_of(upper.z, upper.w, below[k] << 4));
    }
  }
}

}  // namespace imbrex::cuda

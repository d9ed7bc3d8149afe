#pragma once
// Runs of pieces in the wgmma kernels. Registers hold the sums of one piece, so the nodes of the tree of pieces that are not complete lie
// in memory, where L2 keeps them: of a thread its own, which nobody else reads.
#include "attention_sm90_parts.cuh"
#include "row_sums.cuh"

namespace imbrex::cuda {

struct RunPiece {
  int number;  // within the run
  bool last;   // of the run, which may be the only one
};

// Many dims leave no registers for it: runs_in_prefill().
constexpr bool kRuns = runs_in_prefill(kHeadDimV);

// A run has kPiecesTogether nodes of as many pieces at most: two levels.
static_assert(kRunLevels == 2 && kMostInPrefillRun == kPiecesTogether * kPiecesTogether);

// Four sums of a thread, two of each of its rows.
DEVICE void fold_four(const Fold (&fold)[2], const float4& sums, float (&x)[4]) {
  x[0] = fold[0](sums.x, x[0]), x[1] = fold[0](sums.y, x[1]), x[2] = fold[1](sums.z, x[2]), x[3] = fold[1](sums.w, x[3]);
}

// A node of the tree that is not complete, as a thread of a warpgroup sees it, which computes kDims dims. kAtOnce: loads under way, as many
// as there are registers for.
template <int kDims, int kAtOnce, int kLevels = kRunLevels>
class RunNode {
 public:
  DEVICE RunNode(const AttentionParams& p, int level) {
    const int thread = computed_here(int(threadIdx.x)), warpgroup = int(blockIdx.x) * kConsumers + thread / 128;
    at_ = reinterpret_cast<float4*>(p.run_sums + (long(warpgroup) * kLevels + level) * kFloats) + thread % 128;
  }

  // `out`, with what it is relative to and its totals, becomes the node with it.
  template <int n>
  DEVICE void add_to(float (&reference)[2], float (&total)[2], float (&out)[n]) const {
    const float4 state = load_l2(at_ + n / 4 * 128);
    const Fold fold[2] = {{state.x, reference[0]}, {state.y, reference[1]}};
    total[0] = fold[0](state.z, total[0]), total[1] = fold[1](state.w, total[1]);
    reference[0] = fold[0].reference, reference[1] = fold[1].reference;
#pragma unroll
    for (int i = 0; i < n / 4; ++i) {
      float x[4] = {out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]};
      fold_four(fold, load_l2(at_ + i * 128), x);
#pragma unroll
      for (int c = 0; c < 4; ++c) out[4 * i + c] = x[c];
      if (i % kAtOnce == kAtOnce - 1) asm volatile("" ::: "memory");
    }
  }

  template <int n>
  DEVICE void put(const float (&reference)[2], const float (&total)[2], const float (&out)[n]) const {
    static_assert((n + 4) * 128 <= kFloats);
    at_[n / 4 * 128] = {reference[0], reference[1], total[0], total[1]};
#pragma unroll
    for (int i = 0; i < n / 4; ++i) at_[i * 128] = {out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]};
  }

 private:
  static constexpr long kFloats = run_node_floats(kDims);
  float4* at_;
};

// The sums of a piece join those of its run. True where it was the last one: they are the run's then.
template <int n>
DEVICE bool fold_piece(const AttentionParams& p, const RunPiece& piece, float (&reference)[2], float (&total)[2], float (&out)[n]) {
  if (!kRuns || (piece.number == 0 && piece.last)) return true;
  const int within = piece.number % kPiecesTogether;
  const bool completes = piece.last || within + 1 == kPiecesTogether;  // a node of the first level
#pragma unroll 1
  for (int level = 0; level < kRunLevels; ++level) {
    const RunNode<kHeadDimV, 4> node(p, level);
    if (level == 0 ? within > 0 : piece.number >= kPiecesTogether) node.add_to(reference, total, out);
    if (level == 0 ? completes : piece.last) continue;
    node.put(reference, total, out);
    return false;
  }
  return true;
}

}  // namespace imbrex::cuda

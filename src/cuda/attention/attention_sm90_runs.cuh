#pragma once
// Runs of pieces in the wgmma kernels. Registers hold the sums of one piece, so the nodes of the tree of pieces that are not complete lie
// in memory, where L2 keeps them. Each thread reads only what it has written itself.
#include "attention_sm90_parts.cuh"
#include "row_sums.cuh"

namespace imbrex::cuda {

struct RunPiece {
  int number;  // within the run
  bool last;   // of the run, which may be the only one
};

// Many dims leave no registers to fold in: there sums go to memory dim by dim, and come back when the run is complete.
constexpr bool kFoldsInMemory = kHeadDimV > 128;

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

  // The node with `out`, in memory.
  template <int n>
  DEVICE void fold_in(const float (&reference)[2], const float (&total)[2], const float (&out)[n]) const {
    const auto fold = fold_state<n>({reference[0], reference[1], total[0], total[1]});
#pragma unroll
    for (int i = 0; i < n / 4; i += kAtOnce) {
      float4 sums[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) sums[k] = load_in_order(at_ + (i + k) * 128);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        float x[4] = {out[4 * (i + k)], out[4 * (i + k) + 1], out[4 * (i + k) + 2], out[4 * (i + k) + 3]};
        fold_four(fold.rows, sums[k], x);
        store_in_order(at_ + (i + k) * 128, {x[0], x[1], x[2], x[3]});
      }
    }
  }
  // The node with another one, or that one alone where this one has none yet.
  template <int n>
  DEVICE void fold_in(const RunNode& other, bool exists) const {
    const float4 state = load_l2(other.at_ + n / 4 * 128);
    if (!exists) at_[n / 4 * 128] = {kEmptyReference, kEmptyReference, kNoSum, kNoSum};
    const auto fold = fold_state<n>(state);
#pragma unroll 1
    for (int i = 0; i < n / 4; i += kAtOnce) {
#pragma unroll
      for (int k = i; k < i + kAtOnce; ++k) {
        const float4 added = load_l2(other.at_ + k * 128);
        float x[4] = {added.x, added.y, added.z, added.w};
        if (exists) fold_four(fold.rows, load_l2(at_ + k * 128), x);
        at_[k * 128] = {x[0], x[1], x[2], x[3]};
      }
    }
  }
  template <int n>
  DEVICE void take(float (&reference)[2], float (&total)[2], float (&out)[n]) const {
    const float4 state = load_l2(at_ + n / 4 * 128);
    reference[0] = state.x, reference[1] = state.y, total[0] = state.z, total[1] = state.w;
#pragma unroll
    for (int i = 0; i < n / 4; ++i) {
      const float4 x = load_l2(at_ + i * 128);
      out[4 * i] = x.x, out[4 * i + 1] = x.y, out[4 * i + 2] = x.z, out[4 * i + 3] = x.w;
    }
  }

 private:
  struct Folds {
    Fold rows[2];
  };
  // Folds sums with those of a node with the state {references, totals}, which becomes the state of both.
  template <int n>
  DEVICE Folds fold_state(const float4& added) const {
    const float4 state = load_l2(at_ + n / 4 * 128);
    const Folds fold{{{state.x, added.x}, {state.y, added.y}}};
    at_[n / 4 * 128] = {fold.rows[0].reference, fold.rows[1].reference, fold.rows[0](state.z, added.z), fold.rows[1](state.w, added.w)};
    return fold;
  }

  static constexpr long kFloats = run_node_floats(kDims);
  float4* at_;
};

// The sums of a piece join those of its run. True where it was the last one: they are the run's then.
template <int n>
DEVICE bool fold_piece(const AttentionParams& p, const RunPiece& piece, float (&reference)[2], float (&total)[2], float (&out)[n]) {
  if (piece.number == 0 && piece.last) return true;
  const int within = piece.number % kPiecesTogether;
  const bool completes = piece.last || within + 1 == kPiecesTogether;  // a node of the first level
  if constexpr (kFoldsInMemory) {
    using Node = RunNode<kHeadDimV, 4>;
    if (within > 0) {
      Node(p, 0).fold_in(reference, total, out);
    } else {
      Node(p, 0).put(reference, total, out);
    }
    if (!completes) return false;
    const bool has_second = piece.number >= kPiecesTogether;
    if (has_second || !piece.last) Node(p, 1).template fold_in<n>(Node(p, 0), has_second);
    if (piece.last) Node(p, has_second).take(reference, total, out);
    return piece.last;
  } else {
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
}

}  // namespace imbrex::cuda

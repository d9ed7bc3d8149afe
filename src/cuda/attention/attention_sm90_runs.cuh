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

// What a thread has of a tile, with sums of earlier keys.
template <class Fold>
DEVICE float4 folded(const Fold (&fold)[2], const float4& sums, const float4& tile) {
  return {fold[0](sums.x, tile.x), fold[0](sums.y, tile.y), fold[1](sums.z, tile.z), fold[1](sums.w, tile.w)};
}

// A node of the tree that is not complete, as a thread of a warpgroup sees it, which computes kDims dims. kAtOnce: loads under way, as many
// as there are registers for.
template <int kDims, int kAtOnce, int kLevels = kRunLevels>
class RunNode {
 public:
  DEVICE RunNode(const AttentionParams& p, int level) {
    const u32 thread = u32(computed_here(int(threadIdx.x))), warpgroup = blockIdx.x * kConsumers + thread / 128;
    at_ = reinterpret_cast<float4*>(p.run_sums + (long(warpgroup) * kLevels + level) * kFloats) + thread % 128;
  }

  // `out`, with what it is relative to and its totals, becomes the node with it.
  template <bool is_short = false, class Out>
  DEVICE void add_to(float (&reference)[2], float (&total)[2], Out& out) const {
    const float4 state = load_l2(at_ + kTilesOf<Out> * 128);
    const Fold fold[2] = {{state.x, reference[0]}, {state.y, reference[1]}};
    total[0] = fold[0](state.z, total[0]), total[1] = fold[1](state.w, total[1]);
    reference[0] = fold[0].reference, reference[1] = fold[1].reference;
    const OutputFold<is_short> output[2] = {OutputFold<is_short>(fold[0]), OutputFold<is_short>(fold[1])};
#pragma unroll
    for (int i = 0; i < kTilesOf<Out>; ++i) {
      set_four(out, i, folded(output, load_l2(at_ + i * 128), four(out, i)));
      if (i % kAtOnce == kAtOnce - 1) asm volatile("" ::: "memory");
    }
  }

  template <class Out>
  DEVICE void put(const float (&reference)[2], const float (&total)[2], const Out& out) const {
    static_assert((kTilesOf<Out> + 1) * 4 * 128 <= kFloats);
    at_[kTilesOf<Out> * 128] = {reference[0], reference[1], total[0], total[1]};
#pragma unroll
    for (int i = 0; i < kTilesOf<Out>; ++i) at_[i * 128] = four(out, i);
  }

  // The node with `out`, in memory.
  template <class Out>
  DEVICE void fold_in(const float (&reference)[2], const float (&total)[2], const Out& out) const {
    const auto fold = fold_state<kTilesOf<Out>>({reference[0], reference[1], total[0], total[1]});
#pragma unroll
    for (int i = 0; i < kTilesOf<Out>; i += kAtOnce) {
      float4 sums[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) sums[k] = load_in_order(at_ + (i + k) * 128);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) store_in_order(at_ + (i + k) * 128, folded(fold.rows, sums[k], four(out, i + k)));
    }
  }
  // The node with another one, or that one alone where this one has none yet.
  template <int tiles>
  DEVICE void fold_in(const RunNode& other, bool exists) const {
    const float4 state = load_l2(other.at_ + tiles * 128);
    if (!exists) at_[tiles * 128] = {kEmptyReference, kEmptyReference, kNoSum, kNoSum};
    const auto fold = fold_state<tiles>(state);
#pragma unroll 1
    for (int i = 0; i < tiles; i += kAtOnce) {
#pragma unroll
      for (int k = i; k < i + kAtOnce; ++k) {
        float4 tile = load_l2(other.at_ + k * 128);
        if (exists) tile = folded(fold.rows, load_l2(at_ + k * 128), tile);
        at_[k * 128] = tile;
      }
    }
  }
  template <class Out>
  DEVICE void take(float (&reference)[2], float (&total)[2], Out& out) const {
    const float4 state = load_l2(at_ + kTilesOf<Out> * 128);
    reference[0] = state.x, reference[1] = state.y, total[0] = state.z, total[1] = state.w;
#pragma unroll
    for (int i = 0; i < kTilesOf<Out>; ++i) set_four(out, i, load_l2(at_ + i * 128));
  }

 private:
  struct Folds {
    Fold rows[2];
  };
  // Folds sums with those of a node with the state {references, totals}, which becomes the state of both.
  template <int tiles>
  DEVICE Folds fold_state(const float4& added) const {
    const float4 state = load_l2(at_ + tiles * 128);
    const Folds fold{{{state.x, added.x}, {state.y, added.y}}};
    at_[tiles * 128] = {fold.rows[0].reference, fold.rows[1].reference, fold.rows[0](state.z, added.z), fold.rows[1](state.w, added.w)};
    return fold;
  }

  static constexpr long kFloats = run_node_floats(kDims);
  float4* at_;
};

// The sums of a piece join those of its run. True where it was the last one: they are the run's then.
template <class Out>
DEVICE bool fold_piece(const AttentionParams& p, const RunPiece& piece, float (&reference)[2], float (&total)[2], Out& out) {
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
    if (has_second || !piece.last) Node(p, 1).template fold_in<kTilesOf<Out>>(Node(p, 0), has_second);
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

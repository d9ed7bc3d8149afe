#pragma once
// The tree of a run's pieces in attention_sm90_latent_pair.cu and attention_sm90_latent_spread.cu: where registers hold the output of a
// piece and the sums of those before it, and where they hold one alone.
#include "attention_sm90_runs.cuh"

namespace imbrex::cuda {

constexpr int kTreeLevels = kLatentPairLevels + 1;
static_assert(kPiecesTogether == 4 && kMostInRun == 1 << 2 * kTreeLevels);
// Nodes that are complete in a node of this level, of so many pieces. Level 0 has pieces, and the last one is not full before the run ends.
DEVICE int nodes_in(int level, int pieces) { return pieces >> 2 * level & (level + 1 < kTreeLevels ? 3 : ~0); }

// Of the tree's three levels the nodes that are not complete: that of the first level is in registers, the others are in memory, where L2
// keeps them. A level has two bits of the number of pieces, which say how many complete nodes of the level below are in it.
// is_short: sums so far are shortened() where others join them, as attention_sm90_latent.cu does.
template <class Sums, int kDims, bool is_short = false>
class StoredTree {
 public:
  DEVICE StoredTree() { node_.clear(kNoSum); }

  DEVICE void add(const Sums& piece) {
    node_.fold(piece);
    ++pieces_;
  }
  // Another piece will come: until then a complete node stays where it is, since most runs end with one.
  DEVICE void go_on(const AttentionParams& p) {
    if (pieces_ == 0 || nodes_in(0, pieces_) != 0) return;
#pragma unroll 1
    for (int level = 1; level < kTreeLevels; ++level) {
      const Node stored(p, level - 1);
      if (nodes_in(level, pieces_ - 1) > 0) stored.template add_to<is_short>(node_.reference, node_.sum, node_.out);
      if (nodes_in(level, pieces_) == 0 && level + 1 < kTreeLevels) continue;
      stored.put(node_.reference, node_.sum, node_.out);
      break;
    }
    node_.clear(kNoSum);
  }
  // What all pieces are together.
  DEVICE Sums& end(const AttentionParams& p) {
#pragma unroll 1
    for (int level = 1; level < kTreeLevels; ++level)
      if (nodes_in(level, pieces_ - 1) > 0) Node(p, level - 1).template add_to<is_short>(node_.reference, node_.sum, node_.out);
    return node_;
  }

 private:
  using Node = RunNode<kDims, 4, kTreeLevels - 1>;

  Sums node_;
  int pieces_ = 0;
};

// The same with the nodes of all levels in memory.
template <class Sums, int kDims>
class MemoryTree {
 public:
  // The sums of the next piece become those of what is complete with it: of all pieces where it is the last one.
  DEVICE void add(const AttentionParams& p, bool last, Sums& piece) {
    ++pieces_;
#pragma unroll 1
    for (int level = 0; level < kTreeLevels; ++level) {
      const RunNode<kDims, 4, kTreeLevels> node(p, level);
      if (nodes_in(level, pieces_ - 1) > 0) node.template add_to<true>(piece.reference, piece.sum, piece.out);
      if (last || (nodes_in(level, pieces_) == 0 && level + 1 < kTreeLevels)) continue;
      node.put(piece.reference, piece.sum, piece.out);
      break;
    }
  }

 private:
  int pieces_ = 0;
};

}  // namespace imbrex::cuda

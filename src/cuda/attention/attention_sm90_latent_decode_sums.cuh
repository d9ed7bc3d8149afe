#pragma once
// The sums of attention_sm90_latent_decode.cu. Products have dims for rows there, and rows of the item for columns: the output is
// transposed.
#include "attention_sm90_latent_decode_load.cuh"
#include "finish.cuh"
#include "row_sums.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

// A thread has, of each block of 64 dims that its team computes, two dims of kColumns rows: columns 2 t and 2 t + 1 of each eight, with
// t = lane_id() % 4. A team's blocks are every second one.
constexpr int kColumns = kTileRows / 4, kBlocksEach = kHeadDimV / 64 / kTeams;
using Column = float[kTileRows / 2];  // Fragment of wgmma: of a block, all that a thread has
DEVICE int row_of_column(int column) { return column / 2 * 8 + first_column() + column % 2; }
// What a thread has of a column, of dim g (h = 0) and g + 8 (h = 1) of its warp's 16, with g = lane_id() / 4.
template <class T, int n>
DEVICE T& of_column(T (&x)[n], int column, int h) {
  return at(x, column / 2, h, column % 2);
}

// Sums over keys, relative to a reference for each row.
struct Sums {
  float reference[kColumns], sum[kColumns];
  Column out[kBlocksEach];

  DEVICE void clear(float none) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) reference[k] = kEmptyReference, sum[k] = none;
#pragma unroll
    for (Column& block : out) fill(block, none);
  }
  DEVICE void rescale(const float (&factor)[kColumns]) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      sum[k] *= factor[k];
#pragma unroll
      for (Column& block : out) of_column(block, k, 0) *= factor[k], of_column(block, k, 1) *= factor[k];
    }
  }
  // Later keys join.
  DEVICE void fold(const Sums& others) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const Fold fold(reference[k], others.reference[k]);
      reference[k] = fold.reference, sum[k] = fold(sum[k], others.sum[k]);
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) of_column(out[b], k, h) = fold(of_column(out[b], k, h), of_column(others.out[b], k, h));
      }
    }
  }
};

// A node of the tree of pieces in memory, where L2 keeps it: of higher levels, for which there are no registers, and which are needed
// once in many keys. Each thread reads only what it has written itself.
class StoredSums {
 public:
  DEVICE StoredSums(const AttentionParams& p, int level)
      : at_(reinterpret_cast<float4*>(p.run_sums) + (long(blockIdx.x) * kLatentDecodeLevels + level) * (kFours * kTeamThreads) +
            computed_here(int(threadIdx.x))) {}

  DEVICE void put(const Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
      at_[i * kTeamThreads] = {sums.reference[2 * i], sums.reference[2 * i + 1], sums.sum[2 * i], sums.sum[2 * i + 1]};
#pragma unroll
    for (int i = 0; i < kBlocksEach * kTilesOf<Column>; ++i)
      at_[(kColumns / 2 + i) * kTeamThreads] = four(sums.out[i / kTilesOf<Column>], i % kTilesOf<Column>);
  }
  // `sums`, of later keys, become those of the node and their own.
  DEVICE void fold_into(Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float4 state = load_l2(at_ + i * kTeamThreads);
      float4 x[kBlocksEach];  // of the two columns of tile i
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) x[b] = load_l2(at_ + (kColumns / 2 + b * kTilesOf<Column> + i) * kTeamThreads);
      const Fold fold[2] = {{state.x, sums.reference[2 * i]}, {state.y, sums.reference[2 * i + 1]}};
      sums.sum[2 * i] = fold[0](state.z, sums.sum[2 * i]), sums.sum[2 * i + 1] = fold[1](state.w, sums.sum[2 * i + 1]);
      sums.reference[2 * i] = fold[0].reference, sums.reference[2 * i + 1] = fold[1].reference;
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) {
        const float4 y = four(sums.out[b], i);
        set_four(sums.out[b], i, {fold[0](x[b].x, y.x), fold[1](x[b].y, y.y), fold[0](x[b].z, y.z), fold[1](x[b].w, y.w)});
      }
    }
  }

 private:
  static constexpr int kTeamThreads = 128 * kTeams, kFours = latent_decode_node_floats(kHeadDimV, kTileRows) / (4 * kTeamThreads);
  static_assert(kFours == kColumns / 2 + kBlocksEach * kTilesOf<Column>);
  float4* at_;
};

// The tree of a run's pieces: of its three levels the nodes that are not complete. Those of the first are in registers, and of the second
// too where a thread has few sums; the others are in memory. A level has two bits of the number of pieces, which say how many complete
// nodes of the level below are in it.
class Tree {
 public:
  DEVICE Tree() {
#pragma unroll
    for (Sums& node : nodes_) node.clear(kNoSum);
  }

  // A piece joins, and its sums are left empty.
  DEVICE void add(const AttentionParams& p, Sums& piece) {
    nodes_[0].fold(piece);
    piece.clear(0.f);
    ++pieces_;
    if constexpr (!kWaits) move_up(p);
  }
  // Another piece will come.
  DEVICE void go_on(const AttentionParams& p) {
    if (kWaits && pieces_ > 0) move_up(p);
  }
  // What all pieces are together.
  DEVICE const Sums& end(const AttentionParams& p) {
#pragma unroll
    for (int level = 0; level + 1 < kInRegisters; ++level) nodes_[level + 1].fold(nodes_[level]);
#pragma unroll 1
    for (int level = kInRegisters; level < kLevels; ++level)
      if (nodes_in(level, pieces_ - kWaits) > 0) StoredSums(p, level - kInRegisters).fold_into(nodes_[kInRegisters - 1]);
    return nodes_[kInRegisters - 1];
  }

 private:
  // Complete nodes become a part of those above them.
  DEVICE void move_up(const AttentionParams& p) {
#pragma unroll
    for (int level = 0; level + 1 < kInRegisters; ++level) {
      if (nodes_in(level, pieces_) != 0) return;
      nodes_[level + 1].fold(nodes_[level]);
      nodes_[level].clear(kNoSum);
    }
    Sums& node = nodes_[kInRegisters - 1];
    if (nodes_in(kInRegisters - 1, pieces_) != 0) return;
#pragma unroll 1
    for (int level = kInRegisters; level < kLevels; ++level) {
      const StoredSums stored(p, level - kInRegisters);
      if (nodes_in(level, pieces_ - 1) > 0) stored.fold_into(node);
      if (nodes_in(level, pieces_) == 0 && level + 1 < kLevels) continue;
      stored.put(node);
      break;
    }
    node.clear(kNoSum);
  }

  static constexpr int kLevels = 3, kInRegisters = kTileRows > 16 ? 1 : 2;
  static_assert(kPiecesTogether == 4 && kMostInRun == 1 << 2 * kLevels && kLevels - kInRegisters <= kLatentDecodeLevels);
  // Whether nodes stay where they are until another piece comes, since most runs end with one. That needs more registers.
  static constexpr bool kWaits = kInRegisters > 1;
  // Level 0 has pieces, and the last one is not full before the run ends.
  DEVICE static int nodes_in(int level, int pieces) { return pieces >> 2 * level & (level + 1 < kLevels ? 3 : ~0); }

  Sums nodes_[kInRegisters];
  int pieces_ = 0;
};

}  // namespace imbrex::cuda

#pragma once
// The sums of attention_sm90_latent_decode.cu. Products have dims for rows there, and rows of the item for columns: the output is
// transposed.
#include "attention_sm90_latent_decode_load.cuh"
#include "finish.cuh"
#include "row_sums.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

// A thread has, of each block of dims that its team computes, two dims of kColumns rows: columns 2 t and 2 t + 1 of each eight, with
// t = lane_id() % 4. A team's blocks of 16 bits are every second 64 dims; a warp has 16 of each. Where the cache has bytes, its dims are
// neighbours.
constexpr int kColumns = kTileRows / 4, kBlocksEach = kHeadDimV / 64 / kTeams;
using Column = float[kTileRows / 2];  // Fragment of wgmma: of a block, all that a thread has
DEVICE int row_of_column(int column) { return column / 2 * 8 + first_column() + column % 2; }
// Lines of 128 bytes.
DEVICE u64 descriptor(u32 address) { return wgmma_descriptor(address, 16, 1024, 1); }
// What a thread has of a column, of dim g (h = 0) and g + 8 (h = 1) of its warp's 16, with g = lane_id() / 4.
template <class T, int n>
DEVICE T& of_column(T (&x)[n], int column, int h) {
  return at(x, column / 2, h, column % 2);
}

// Over the eight keys of a warp and team: what lanes of the same columns have.
DEVICE float max_of_keys(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, shuffle_xor(x, lanes));
  return x;
}
DEVICE float sum_of_keys(float x) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) x += shuffle_xor(x, lanes);
  return x;
}
DEVICE void take_of_warps(const float (&of_row)[kConsumerWarps], float4& low, float4& high) {
  const float4* const from = reinterpret_cast<const float4*>(of_row);
  low = from[0], high = from[1];
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

// The tree of a run's pieces has three levels. In registers are the nodes of the first, of the second too where a thread has few sums, and
// none where scores of records need the registers; the others are in memory.
constexpr int kLevels = 3, kInRegisters = kTileRows == 16 ? 2 : kDsMla ? 0 : 1;
constexpr int kStoredLevels = kInRegisters > 0 ? kLatentDecodeLevels : kLevels;
static_assert(kPiecesTogether == 4 && kMostInRun == 1 << 2 * kLevels && kLevels - kInRegisters <= kStoredLevels);

// A node of the tree of pieces in memory, where L2 keeps it: of higher levels, for which there are no registers, and which are needed
// once in many keys. Each thread reads only what it has written itself.
class StoredSums {
 public:
  DEVICE StoredSums(const AttentionParams& p, int level)
      : at_(reinterpret_cast<float4*>(p.run_sums) + (long(blockIdx.x) * kStoredLevels + level) * (kFours * kTeamThreads) +
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

// The tree of a run's pieces: of its levels the nodes that are not complete. A level has two bits of the number of pieces, which say how
// many complete nodes of the level below are in it.
class Tree {
 public:
  DEVICE Tree() {
#pragma unroll
    for (Sums& node : nodes_) node.clear(kNoSum);
  }

  // A piece joins, and its sums are left empty, unless there is no register for them elsewhere.
  DEVICE void add(const AttentionParams& p, Sums& piece) {
    ++pieces_;
    if constexpr (kInRegisters > 0) {
      nodes_[0].fold(piece);
      piece.clear(0.f);
      if constexpr (!kWaits) move_up(p);
    }
  }
  // Another piece will come, behind the last one in `piece`, whose sums are left empty.
  DEVICE void go_on(const AttentionParams& p, Sums& piece) {
    if (!kWaits || pieces_ == 0) return;
    if constexpr (kInRegisters > 0) {
      move_up(p);
    } else {
      store(p, piece);
      piece.clear(0.f);
    }
  }
  // What all pieces are together, of which `piece` is the last one.
  DEVICE const Sums& end(const AttentionParams& p, Sums& piece) {
#pragma unroll
    for (int level = 0; level + 1 < kInRegisters; ++level) nodes_[level + 1].fold(nodes_[level]);
    Sums& all = top(piece);
#pragma unroll 1
    for (int level = kInRegisters; level < kLevels; ++level)
      if (nodes_in(level, pieces_ - kWaits) > 0) StoredSums(p, level - kInRegisters).fold_into(all);
    return all;
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
    store(p, node);
    node.clear(kNoSum);
  }
  // A complete node becomes a part of those in memory.
  DEVICE void store(const AttentionParams& p, Sums& node) {
#pragma unroll 1
    for (int level = kInRegisters; level < kLevels; ++level) {
      const StoredSums stored(p, level - kInRegisters);
      if (nodes_in(level, pieces_ - 1) > 0) stored.fold_into(node);
      if (nodes_in(level, pieces_) == 0 && level + 1 < kLevels) continue;
      stored.put(node);
      break;
    }
  }
  DEVICE Sums& top(Sums& piece) {
    if constexpr (kInRegisters == 0) return piece;
    return nodes_[kInRegisters > 0 ? kInRegisters - 1 : 0];
  }

  // Whether nodes stay where they are until another piece comes, since most runs end with one. That needs more registers.
  static constexpr bool kWaits = kInRegisters != 1;
  // Level 0 has pieces, and the last one is not full before the run ends.
  DEVICE static int nodes_in(int level, int pieces) { return pieces >> 2 * level & (level + 1 < kLevels ? 3 : ~0); }

  Sums nodes_[kInRegisters > 0 ? kInRegisters : 1];
  int pieces_ = 0;
};

// The end of an item, by warp `warp` of a team. Each thread stores two neighbouring dims. Those of bytes it has; others two lanes exchange.
DEVICE void store_sums(const AttentionParams& p, const Item& item, const Sums& sums, int team, int warp) {
  const int lane = lane_id(), g = lane / 4, odd = g % 2;
  constexpr int kBetween = kBytes ? 16 : 64 * kTeams;  // dims from one block to the next
  const int dim = (team * 4 + warp) * (kBytes ? 16 * kBlocksEach : 16) + (kBytes ? 2 * g : odd != 0 ? g + 7 : g);
  const bool first = team == 0 && warp == 0 && lane < 4, wide = out_is_wide(p);
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    const int row = row_of_column(k);
    const bool exists = row < item.num_rows;
    float2 pairs[kBlocksEach];
#pragma unroll
    for (int b = 0; b < kBlocksEach; ++b) {
      const float low = of_column(sums.out[b], k, 0), high = of_column(sums.out[b], k, 1);
      if constexpr (kBytes) {
        pairs[b] = {low, high};
      } else {
        const float got = shuffle_xor(odd != 0 ? low : high, 4);
        pairs[b] = odd != 0 ? float2{got, high} : float2{low, got};
      }
    }
    if (!exists) continue;
    if (item.partial >= 0) {
      const long at = partial_row(p, item, row);
      if (first) reinterpret_cast<float2*>(p.partial_state)[at] = {sums.reference[k], sums.sum[k]};
      float* const to = p.partial_out + at * kHeadDimV + dim;
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) *reinterpret_cast<float2*>(to + b * kBetween) = pairs[b];
    } else {
      const int token = item.token_of(row), head = item.head_of(row);
      const RowEnd end = row_end(p, head, sums.reference[k], sums.sum[k]);
      const float factor = end.factor * kv_scale(p.v, item.kv_head);
      if (first) store_lse(p, token, head, end.lse);
      char* const to = out_row(p, token, head) + dim * element_bytes(kOutType);
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b)
        store_pair(to + b * kBetween * element_bytes(kOutType), wide, {ended(pairs[b].x, factor), ended(pairs[b].y, factor)});
    }
  }
}

}  // namespace imbrex::cuda

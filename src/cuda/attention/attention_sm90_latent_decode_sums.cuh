#pragma once
// The sums of attention_sm90_latent_decode.cu and attention_sm90_latent_decode_spread.cu. Products have dims for rows there, and rows of
// the item for columns: the output is transposed.
#include "attention_sm90_latent_decode_parts.cuh"
#include "finish.cuh"
#include "row_sums.cuh"

namespace imbrex::cuda {

// A team's blocks are each 64 dims, every second one where there are two teams; a warp has 16 of each. Where the cache has bytes, its dims
// are neighbours.
constexpr int kBlocksEach = kOwnDims / 64 / kTeams;
constexpr bool kNeighbours = kKvType != kQType;
constexpr int kBetweenBlocks = kNeighbours ? 16 : 64 * kTeams;

// What each warp has of a row's maximum or sum in a tile: eight or sixteen of its keys.
constexpr int kParts = 8;
using Parts = float[kParts];

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
// What a warp's lanes have of the lane's own column, number lane / 4 modulo kColumns, joined by `joined`.
template <class Joined>
DEVICE float of_own_column(float (&x)[kColumns], const Joined& joined) {
  const int lane = computed_here(lane_id());
#pragma unroll
  for (int half = kColumns / 2; half > 0; half /= 2) {
    const bool upper = (lane & 4 * half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
      x[i] = joined(kept, shuffle_xor(given, 4 * half));
    }
  }
#pragma unroll
  for (int lanes = 4 * kColumns; lanes < 32; lanes *= 2) x[0] = joined(x[0], shuffle_xor(x[0], lanes));
  return x[0];
}
DEVICE float sum_of_own_column(float (&x)[kColumns]) {
  return of_own_column(x, [](float a, float b) { return a + b; });
}
DEVICE float max_of_own_column(float (&x)[kColumns]) {
  return of_own_column(x, [](float a, float b) { return fmaxf(a, b); });
}
DEVICE void take_of_warps(const Parts& of_row, float4& low, float4& high) {
  const float4* const from = reinterpret_cast<const float4*>(of_row);
  low = from[0], high = from[1];
}

DEVICE float sum_of_parts(const Parts& of_row) {
  float4 low, high;
  take_of_warps(of_row, low, high);
  return low.x + low.y + (low.z + low.w) + (high.x + high.y + (high.z + high.w));
}

// Sums over keys, relative to a reference for each row.
struct Sums {
  float reference[kColumns], sum[kColumns];
  Column out[kBlocksEach];

  DEVICE void clear() {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) reference[k] = kEmptyReference, sum[k] = 0.f;
#pragma unroll
    for (Column& block : out) fill(block, 0.f);
  }
  DEVICE void rescale(const float (&factor)[kColumns]) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      sum[k] *= factor[k];
#pragma unroll
      for (Column& block : out) of_column(block, k, 0) *= factor[k], of_column(block, k, 1) *= factor[k];
    }
  }
};

// Sums in the tree of pieces. What all lanes of a column have in common, each keeps of one column alone: registers are few.
struct Node {
  float reference, sum;  // of the lane's own column, as of_own_column() has it
  Column out[kBlocksEach];
};

DEVICE float of_own_column(const float (&of_columns)[kColumns]) {
  const int column = computed_here(lane_id()) / 4 % kColumns;  // or the compiler puts what it chooses from into memory
  float x = of_columns[0];
#pragma unroll
  for (int k = 1; k < kColumns; ++k) x = column == k ? of_columns[k] : x;
  return x;
}
// What the lanes have whose own column this is.
DEVICE float of_lanes(float own, int column) { return shuffle(own, column * 4 + computed_here(lane_id()) % 4); }
// The same for how sums are joined.
DEVICE Fold of_lanes(const Fold& own, int column) {
  Fold fold = own;
  fold.kept = of_lanes(own.kept, column), fold.added = of_lanes(own.added, column);
  return fold;
}

DEVICE float reference_of(const Node& node, int column) { return of_lanes(node.reference, column); }
DEVICE float reference_of(const Sums& sums, int column) { return sums.reference[column]; }
DEVICE float sum_of(const Node& node, int column) { return of_lanes(node.sum, column); }
DEVICE float sum_of(const Sums& sums, int column) { return sums.sum[column]; }
DEVICE void clear(Node& node) {
  node.reference = kEmptyReference, node.sum = kNoSum;
#pragma unroll
  for (Column& block : node.out) fill(block, kNoSum);
}
// Later keys join, whose sums are relative to `later_reference`.
DEVICE void join(Node& node, float later_reference, float later_sum, const Column (&later)[kBlocksEach]) {
  const Fold own(node.reference, later_reference);
  node.reference = own.reference, node.sum = own(node.sum, later_sum);
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    const Fold fold = of_lanes(own, k);
#pragma unroll
    for (int b = 0; b < kBlocksEach; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) of_column(node.out[b], k, h) = fold(of_column(node.out[b], k, h), of_column(later[b], k, h));
    }
  }
}
DEVICE void join(Node& node, const Node& later) { join(node, later.reference, later.sum, later.out); }
DEVICE void join(Node& node, const Sums& piece) { join(node, of_own_column(piece.reference), of_own_column(piece.sum), piece.out); }

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
            computed_here(int(threadIdx.x)) % kTeamThreads) {}

  DEVICE void put(const Node& node) const {
    *reinterpret_cast<float2*>(at_) = {node.reference, node.sum};
    put(node.out);
  }
  DEVICE void put(const Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kStateFours; ++i)
      at_[i * kTeamThreads] = {sums.reference[2 * i], sums.reference[2 * i + 1], sums.sum[2 * i], sums.sum[2 * i + 1]};
    put(sums.out);
  }
  // `node`, of later keys, becomes that of the stored keys and its own. All loads are under way before the first is used: where keys keep
  // the memory busy, one takes microseconds.
  DEVICE void fold_into(Node& node) const {
    const float2 stored = load_l2(reinterpret_cast<const float2*>(at_));
    float4 x[kOutFours];
#pragma unroll
    for (int i = 0; i < kOutFours; ++i) x[i] = load_l2(at_ + (kStateFours + i) * kTeamThreads);
    const Fold own(stored.x, node.reference);
    node.reference = own.reference, node.sum = own(stored.y, node.sum);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const Fold fold[2] = {of_lanes(own, 2 * i), of_lanes(own, 2 * i + 1)};
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) fold_four(fold, x[b * kTiles + i], node.out[b], i);
    }
  }
  // The same where registers are too few for that.
  DEVICE void fold_into(Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float4 state = load_l2(at_ + i * kTeamThreads);
      float4 x[kBlocksEach];
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) x[b] = load_l2(at_ + (kStateFours + b * kTiles + i) * kTeamThreads);
      const Fold fold[2] = {{state.x, sums.reference[2 * i]}, {state.y, sums.reference[2 * i + 1]}};
      sums.sum[2 * i] = fold[0](state.z, sums.sum[2 * i]), sums.sum[2 * i + 1] = fold[1](state.w, sums.sum[2 * i + 1]);
      sums.reference[2 * i] = fold[0].reference, sums.reference[2 * i + 1] = fold[1].reference;
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) fold_four(fold, x[b], sums.out[b], i);
    }
  }

 private:
  static constexpr int kTeamThreads = 128 * kTeams, kTiles = kTilesOf<Column>, kStateFours = kColumns / 2, kOutFours = kBlocksEach * kTiles;
  static constexpr int kFours = kStateFours + kOutFours;
  static_assert(kFours * kTeamThreads * 4 <= latent_decode_node_floats(kHeadDimV, kTileRows));

  DEVICE void put(const Column (&out)[kBlocksEach]) const {
#pragma unroll
    for (int i = 0; i < kOutFours; ++i) at_[(kStateFours + i) * kTeamThreads] = four(out[i / kTiles], i % kTiles);
  }
  DEVICE static void fold_four(const Fold (&fold)[2], const float4& earlier, Column& out, int i) {
    const float4 y = four(out, i);
    set_four(out, i, {fold[0](earlier.x, y.x), fold[1](earlier.y, y.y), fold[0](earlier.z, y.z), fold[1](earlier.w, y.w)});
  }

  float4* at_;
};

// The end of an item, by a warp whose dims begin at `first_dim`. Each thread stores two neighbouring dims. Those of bytes it has; others
// two lanes exchange. The item is read from shared memory in front of the first store, and not again behind each.
template <class NodeOrSums>
DEVICE void store_sums(const AttentionParams& p, const Item& item, const NodeOrSums& sums, int first_dim) {
  const int lane = lane_id(), g = lane / 4, odd = g % 2;
  const int dim = first_dim + (kNeighbours ? 2 * g : odd != 0 ? g + 7 : g);
  const bool first = first_dim == 0 && lane < 4;
  const Item own = item;
  // Calls `verb` for each of the rows, with what it is relative to, its sum, and pairs of dims.
  const auto each_row = [&](const auto& verb) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const float reference = reference_of(sums, k), sum = sum_of(sums, k);
      float2 pairs[kBlocksEach];
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) {
        const float low = of_column(sums.out[b], k, 0), high = of_column(sums.out[b], k, 1);
        if constexpr (kNeighbours) {
          pairs[b] = {low, high};
        } else {
          const float got = shuffle_xor(odd != 0 ? low : high, 4);
          pairs[b] = odd != 0 ? float2{got, high} : float2{low, got};
        }
      }
      const int row = row_of_column(k);
      if (row < own.num_rows) verb(row, reference, sum, pairs);
    }
  };
  if (own.partial >= 0) {
    each_row([&](int row, float reference, float sum, const float2(&pairs)[kBlocksEach]) {
      const long at = partial_row(p, own, row);
      if (first) reinterpret_cast<float2*>(p.partial_state)[at] = {reference, sum};
      float* const to = p.partial_out + at * kHeadDimV + dim;
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) *reinterpret_cast<float2*>(to + b * kBetweenBlocks) = pairs[b];
    });
  } else {
    const bool wide = out_is_wide(p);
    each_row([&](int row, float reference, float sum, const float2(&pairs)[kBlocksEach]) {
      const int token = own.token_of(row), head = own.head_of(row);
      const RowEnd end = row_end(p, head, reference, sum);
      const float factor = end.factor * kv_scale(p.v, own.kv_head);
      if (first) store_lse(p, token, head, end.lse);
      char* const to = out_row(p, token, head) + dim * element_bytes(kOutType);
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b)
        store_pair(to + b * kBetweenBlocks * element_bytes(kOutType), wide, {ended(pairs[b].x, factor), ended(pairs[b].y, factor)});
    });
  }
}

// The tree of a run's pieces: of its levels the nodes that are not complete. A level has two bits of the number of pieces, which say how
// many complete nodes of the level below are in it.
class Tree {
 public:
  DEVICE Tree() {
#pragma unroll
    for (Node& node : nodes_) clear(node);
  }

  // A piece joins, and its sums are left empty, unless there is no register for them elsewhere.
  DEVICE void add(Sums& piece) {
    ++pieces_;
    if constexpr (kInRegisters == 0) return;
    join(nodes_[0], piece);
    piece.clear();
  }
  // Another piece will come, behind the last one in `piece`, whose sums are left empty. Complete nodes stay where they are until then:
  // most runs end with one.
  DEVICE void go_on(const AttentionParams& p, Sums& piece) {
    if (pieces_ == 0) return;
    if constexpr (kInRegisters == 0) {
      store(p, piece);
      piece.clear();
    } else {
      move_up(p);
    }
  }
  // Stores what all pieces are together, of which `piece` is the last one.
  DEVICE void end(const AttentionParams& p, const Item& item, Sums& piece, int first_dim) {
    if constexpr (kInRegisters == 0) {
      end_with(p, item, piece, first_dim);
    } else {
#pragma unroll
      for (int level = 0; level + 1 < kInRegisters; ++level) join(nodes_[level + 1], nodes_[level]);
      end_with(p, item, nodes_[kLast], first_dim);
    }
  }

 private:
  template <class NodeOrSums>
  DEVICE void end_with(const AttentionParams& p, const Item& item, NodeOrSums& all, int first_dim) const {
#pragma unroll 1
    for (int level = kInRegisters; level < kLevels; ++level)
      if (nodes_in(level, pieces_ - 1) > 0) StoredSums(p, level - kInRegisters).fold_into(all);
    store_sums(p, item, all, first_dim);
  }
  // Complete nodes become a part of those above them.
  DEVICE void move_up(const AttentionParams& p) {
#pragma unroll
    for (int level = 0; level + 1 < kInRegisters; ++level) {
      if (nodes_in(level, pieces_) != 0) return;
      join(nodes_[level + 1], nodes_[level]);
      clear(nodes_[level]);
    }
    if (nodes_in(kLast, pieces_) != 0) return;
    store(p, nodes_[kLast]);
    clear(nodes_[kLast]);
  }
  // A complete node becomes a part of those in memory.
  template <class NodeOrSums>
  DEVICE void store(const AttentionParams& p, NodeOrSums& node) const {
#pragma unroll 1
    for (int level = kInRegisters; level < kLevels; ++level) {
      const StoredSums stored(p, level - kInRegisters);
      if (nodes_in(level, pieces_ - 1) > 0) stored.fold_into(node);
      if (nodes_in(level, pieces_) == 0 && level + 1 < kLevels) continue;
      stored.put(node);
      break;
    }
  }

  // Level 0 has pieces, and the last one is not full before the run ends.
  DEVICE static int nodes_in(int level, int pieces) { return pieces >> 2 * level & (level + 1 < kLevels ? 3 : ~0); }

  static constexpr int kLast = kInRegisters > 0 ? kInRegisters - 1 : 0;
  Node nodes_[kLast + 1];
  int pieces_ = 0;
};

}  // namespace imbrex::cuda

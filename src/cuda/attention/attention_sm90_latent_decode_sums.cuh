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
// Of lines of 128 bytes, the lower half of a descriptor, and the descriptor of those so many bytes further on. Descriptors of neighbouring
// products differ by a sum alone, so that the next one is there in time.
DEVICE u32 lines_at(u32 address) { return u32(wgmma_descriptor(address, 16, 1024, 1)); }
DEVICE u64 descriptor(u32 lines, int bytes) { return wgmma_descriptor(0, 0, 1024, 1) | u32(lines + bytes / 16); }
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
            computed_here(int(threadIdx.x))) {}

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
  static constexpr int kFours = latent_decode_node_floats(kHeadDimV, kTileRows) / (4 * kTeamThreads);
  static_assert(kFours == kStateFours + kOutFours);

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

// The end of an item, by warp `warp` of a team. Each thread stores two neighbouring dims. Those of bytes it has; others two lanes exchange.
// The item is read from shared memory in front of the first store, and not again behind each.
template <class NodeOrSums>
DEVICE void store_sums(const AttentionParams& p, const Item& item, const NodeOrSums& sums, int team, int warp) {
  const int lane = lane_id(), g = lane / 4, odd = g % 2;
  constexpr int kBetween = kBytes ? 16 : 64 * kTeams;  // dims from one block to the next
  const int dim = (team * 4 + warp) * (kBytes ? 16 * kBlocksEach : 16) + (kBytes ? 2 * g : odd != 0 ? g + 7 : g);
  const bool first = team == 0 && warp == 0 && lane < 4, wide = out_is_wide(p);
  const Item own = item;
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    const int row = row_of_column(k);
    const bool exists = row < own.num_rows;
    const float reference = reference_of(sums, k), sum = sum_of(sums, k);
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
    if (own.partial >= 0) {
      const long at = partial_row(p, own, row);
      if (first) reinterpret_cast<float2*>(p.partial_state)[at] = {reference, sum};
      float* const to = p.partial_out + at * kHeadDimV + dim;
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) *reinterpret_cast<float2*>(to + b * kBetween) = pairs[b];
    } else {
      const int token = own.token_of(row), head = own.head_of(row);
      const RowEnd end = row_end(p, head, reference, sum);
      const float factor = end.factor * kv_scale(p.v, own.kv_head);
      if (first) store_lse(p, token, head, end.lse);
      char* const to = out_row(p, token, head) + dim * element_bytes(kOutType);
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b)
        store_pair(to + b * kBetween * element_bytes(kOutType), wide, {ended(pairs[b].x, factor), ended(pairs[b].y, factor)});
    }
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
  DEVICE void end(const AttentionParams& p, const Item& item, Sums& piece, int team, int warp) {
    if constexpr (kInRegisters == 0) {
      end_with(p, item, piece, team, warp);
    } else {
#pragma unroll
      for (int level = 0; level + 1 < kInRegisters; ++level) join(nodes_[level + 1], nodes_[level]);
      end_with(p, item, nodes_[kLast], team, warp);
    }
  }

 private:
  template <class NodeOrSums>
  DEVICE void end_with(const AttentionParams& p, const Item& item, NodeOrSums& all, int team, int warp) const {
#pragma unroll 1
    for (int level = kInRegisters; level < kLevels; ++level)
      if (nodes_in(level, pieces_ - 1) > 0) StoredSums(p, level - kInRegisters).fold_into(all);
    store_sums(p, item, all, team, warp);
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

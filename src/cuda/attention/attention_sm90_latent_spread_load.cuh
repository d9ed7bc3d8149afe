#pragma once
// The shared memory of attention_sm90_latent_spread.cu, and the warps that fill it: one finds items, one brings queries and the keys that
// the block scores, one the values that it multiplies, and one copies weights to the cluster's other blocks.
#include "attention_sm90_latent_parts.cuh"
#include "attention_sm90_stream.cuh"
#include "each_item.cuh"
#include "find_items_together.cuh"

namespace imbrex::cuda {

static_assert(kValuesInKeys && kKvType == kQType && kTileRows == kTeamRows && kKeyWarps == 0 && kCrews == 1 && kMaps);
static_assert(kPlainLogits && !kWindow && !kCustomMask && !kPositions);

// Each thread block of a cluster has kOwnDims of the output, and the scores of two tiles of a step.
constexpr int kBlocksTogether = kHeadDimV / kOwnDims, kTilesEach = 2, kStepTiles = kBlocksTogether * kTilesEach;
static_assert(kHeadDimV % kOwnDims == 0 && kBlocksTogether <= 4, "a lane of each four tells a block");

DEVICE int rank_in_cluster() { return shuffle(int(cluster_rank()), 0); }

struct Step {
  int first, tiles;         // its first tile, and how many there are, kStepTiles at most
  bool begins, ends, last;  // a piece; of the item
  // Of the block with this number.
  DEVICE int tiles_of(int block) const { return min(max(tiles - block * kTilesEach, 0), kTilesEach); }
  DEVICE int parts() const { return (tiles + kTilesEach - 1) / kTilesEach; }  // blocks that have any
};
// Does `verb` to each step of an item: none has tiles of two pieces.
template <class Verb>
DEVICE void each_step(const Item& item, const Verb& verb) {
  const Tiles all = tiles_of(item);
  const int of_piece = item.piece > 0 ? item.piece / kTileKeys : kFar;
  int left = of_piece;
  bool begins = true;
#pragma unroll 1
  for (int first = all.first, tiles; first < all.end; first += tiles) {
    tiles = min(min(kStepTiles, left), all.end - first);
    left -= tiles;
    const bool last = first + tiles == all.end, ends = left == 0 || last;
    verb(Step{first, tiles, begins, ends, last});
    begins = ends;
    if (ends) left = of_piece;
  }
}

// Warpgroups: one computes scores and weights, one multiplies values, one loads.
constexpr int kThreads = 128 * 3, kValueWarps = 4;

// A stage of keys has some chunks of 64 dims, of two tiles or of 64 queries; one of values has the block's dims of two tiles.
constexpr int kPairBytes = kTilesEach * kChunkBytes;  // of a chunk
constexpr int kChunksEach = 3, kStageBytes = kChunksEach * kPairBytes, kStepStages = (kKChunks + kChunksEach - 1) / kChunksEach;
constexpr int kOwnChunks = kOwnDims / 64, kValueStageBytes = kOwnChunks * kPairBytes;
static_assert(kPairBytes == kQChunkBytes);
constexpr int chunks_of_stage(int stage) {
  return kKChunks - stage * kChunksEach < kChunksEach ? kKChunks - stage * kChunksEach : kChunksEach;
}

// What a block makes of its two tiles, and all get: weights, and of each lane that made them their sums.
struct Handed {
  alignas(1024) char weights[kTilesEach][kWeightBytes];
  float2 totals[kTilesEach][kScoreWarps][32];
};

struct SharedStorage {
  static constexpr int kItemSlots = 3, kSteps = 2;  // steps that are scored while others are multiplied
  alignas(1024) char stage[kStages][kStageBytes];
  alignas(1024) char values[kValueStages][kValueStageBytes];
  Handed handed[kSteps][kBlocksTogether];
  float2 tops[kSteps][kScoreWarps][kStepTiles][8];  // maxima of rows r and r + 8 in a tile
  float factor[kSteps][kStepTiles][kTileRows];      // that sums so far are to be multiplied by, where `moved` says so
  float reference[kSteps][kTileRows];               // at the end of a step
  u32 moved[kSteps][kScoreWarps];                   // a bit for each tile that moved a reference of the warp's rows
  Item item[kItemSlots];                            // none: kNoItem rows, and none will come
  ClusterNumbers numbers;
  u64 full[kStages], empty[kStages], values_full[kValueStages], values_empty[kValueStages];
  u64 made[kSteps], handed_full[kSteps][kBlocksTogether], handed_free[kSteps];  // handed_free: what this block makes may go to all
  u64 tops_full[kSteps][kScoreWarps], noted[kSteps], notes_read[kSteps], item_full[kItemSlots], item_empty[kItemSlots], item_wanted;
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

// How often each lane that loads reports a stage: once for each tile, unless TMA brings them.
constexpr int kReports = kLoaders > 1 ? kTilesEach : 1;

DEVICE void begin_barriers(SharedStorage& shared) {
  const auto begin = [](u64& barrier, int arrivals) { mbarrier_init(shared_address(&barrier), u32(arrivals)); };
  for (u64& full : shared.full) begin(full, kLoaders * kReports);
  for (u64& empty : shared.empty) begin(empty, kScoreWarps);
  for (u64& full : shared.values_full) begin(full, kLoaders * kReports);
  for (u64& empty : shared.values_empty) begin(empty, kValueWarps);
  for (u64& made : shared.made) begin(made, kScoreWarps);
  for (auto& of_step : shared.handed_full)
    for (u64& full : of_step) begin(full, 1);
  for (u64& free : shared.handed_free) begin(free, kBlocksTogether * kValueWarps);
  for (auto& of_step : shared.tops_full)
    for (u64& full : of_step) begin(full, 1);
  for (u64& noted : shared.noted) begin(noted, kScoreWarps);
  for (u64& read : shared.notes_read) begin(read, kValueWarps);
  begin(shared.item_wanted, 1);
  for (u64& full : shared.item_full) begin(full, 1);
  for (u64& empty : shared.item_empty) begin(empty, kScoreWarps + kValueWarps + 3);
  shared.numbers.begin(kBlocksTogether - 1);
  mbarrier_fence_init();
}

// Where the keys of tiles are, as their lanes know: the blocks of pages, or, where these are small, of a row of each of two tiles.
struct Places {
  Box box;
  RowBlocks rows[kTilesEach];

  // Of so many tiles from `first` on: kTilesEach at most where pages are small.
  DEVICE Places(const AttentionParams& p, const Item& item, int first, int tiles)
      : box{first * kTileKeys + lane_id() * kPageRows, 0, false, {}} {
    if constexpr (kSmallPages) {
#pragma unroll
      for (int tile = 0; tile < kTilesEach; ++tile) {
        const int begin = (first + tile) * kTileKeys;
        rows[tile] = row_blocks(p, item.first_block, begin, item.lo, tile < tiles ? item.hi : begin);
      }
    } else {
      box.loads = lane_id() < tiles * kPages && box.key < item.hi && box.key + kPageRows > item.lo;
      if (kBlockSize > 0 && box.loads) box.block = __ldg(block_id_of(p, item.first_block, box.key));
    }
  }
  // Leaves out all but the first ones.
  DEVICE void keep(int tiles) {
    box.loads = box.loads && lane_id() < tiles * kPages;
#pragma unroll
    for (int tile = 0; kSmallPages && tile < kTilesEach; ++tile) rows[tile].of[0] = tile < tiles ? rows[tile].of[0] : -1;
  }
};

constexpr int kRowGroups = 8;  // that are copied at a time: there are registers for all of a tile's

// Copies `bytes` from `dim` on of the rows of two tiles.
template <int bytes>
DEVICE void copy_tiles(const AttentionParams& p, const Item& item, const Places& places, u32 to, u32 full, int dim) {
  KvSide side = p.k;
  side.data += dim * 2;
#pragma unroll
  for (int tile = 0; tile < kTilesEach; ++tile)
    copy_rows<bytes, kPairBytes, kRowGroups>(side, item.kv_head, places.rows[tile],
                                             places.box.key - lane_id() * kPageRows + tile * kTileKeys, to + tile * kChunkBytes, full);
}

// Loads chunks of 64 dims, at most so many, from `dim` on, of two tiles, whose pages lanes from `first` on have.
template <int most_chunks>
DEVICE void load_chunks(const TensorMap& k_map, const Item& item, const Box& box, int first, u32 to, u32 full, int dim,
                        int chunks = most_chunks) {
  constexpr int kBoxes = kTilesEach * kPages;
  const u32 loads = __ballot_sync(kFullWarp, box.loads) >> first & ((1u << kBoxes) - 1);
  const int begin = box.key + (first - lane_id()) * kPageRows, head = item.kv_head;
  int block[kBoxes];
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) block[i] = shuffle(box.block, first + i);
  if (!elect_one()) return;
  mbarrier_arrive_expect(full, u32(__popc(loads)) * (kPageRows * 128) * u32(chunks));
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    const int row = row_of_key(item.first_block, begin + i * kPageRows);
#pragma unroll
    for (int c = 0; c < most_chunks; ++c)
      if (c < chunks && (loads >> i & 1) != 0)
        tma_load(to + c * kPairBytes + i * kPageRows * 128, k_map, full, l2_normal(), dim + c * 64, row, head, block[i]);
  }
}

DEVICE void load_queries(const TensorMap& q_map, const Item& item, int stage, u32 to, u32 full) {
  constexpr int kHeads = kGroup < kTileRows ? kGroup : kTileRows, kTokens = kTileRows / kHeads;  // of a box
  const int head = item.head_of(0), token = item.token_of(0);
  if constexpr (kLoaders > 1) {  // the last report is that of what TMA brings
    for (int i = lane_id() == 0 ? 1 : 0; i < kReports; ++i) mbarrier_arrive(full);
    __syncwarp();
  }
  if (kLoaders > 1 ? lane_id() != 0 : !elect_one()) return;
  mbarrier_arrive_expect(full, u32(chunks_of_stage(stage)) * (kTokens * kHeads * 128));
  for (int c = 0; c < chunks_of_stage(stage); ++c)
    tma_load(to + c * kPairBytes, q_map, full, l2_normal(), (stage * kChunksEach + c) * 64, head, token);
}

// Queries, and the keys that the block scores.
DEVICE void produce_keys(const AttentionParams& p, int rank, const TensorMap& q_map, const TensorMap& k_map, SharedStorage& shared) {
  Ring<kStages> stage;
  const auto load_next = [&](const auto& load) {
    mbarrier_wait(shared_address(&shared.empty[stage.at]), stage.parity ^ 1);
    __syncwarp();
    load(shared_address(shared.stage[stage.at]), shared_address(&shared.full[stage.at]));
    __syncwarp();
    stage.next();
  };
  each_item(shared, [&](const Item& item) {
    Places places(p, item, tiles_of(item).first + rank * kTilesEach, kTilesEach);
#pragma unroll 1
    for (int i = 0; i < kStepStages; ++i) load_next([&](u32 to, u32 full) { load_queries(q_map, item, i, to, full); });
    each_step(item, [&](const Step& step) {
      const Places next(p, item, step.first + step.tiles + rank * kTilesEach, kTilesEach);
      if (step.last) report(shared.item_wanted);
      places.keep(step.tiles_of(rank));
#pragma unroll 1
      for (int i = 0; i < kStepStages && step.tiles_of(rank) > 0; ++i)
        load_next([&](u32 to, u32 full) {
          const int dim = i * kChunksEach * 64;
          if constexpr (!kSmallPages) {
            load_chunks<kChunksEach>(k_map, item, places.box, 0, to, full, dim, chunks_of_stage(i));
          } else if (i + 1 < kStepStages) {
            copy_tiles<kChunksEach * 128>(p, item, places, to, full, dim);
          } else {
            copy_tiles<(kHeadDimQk - (kStepStages - 1) * kChunksEach * 64) * 2>(p, item, places, to, full, dim);
          }
        });
      places = next;
    });
  });
}

// The block's dims of all tiles.
DEVICE void produce_values(const AttentionParams& p, int rank, const TensorMap& k_map, SharedStorage& shared) {
  constexpr int kTilesAtOnce = kSmallPages ? kTilesEach : 8;  // that lanes know the places of
  Ring<kValueStages> stage;
  each_item(shared, [&](const Item& item) {
    each_step(item, [&](const Step& step) {
      Places places(p, item, step.first, min(step.tiles, kTilesAtOnce));
#pragma unroll 1
      for (int first = 0; first < step.tiles; first += kTilesAtOnce) {
        const int left = step.tiles - first - kTilesAtOnce;
        const Places next(p, item, step.first + first + kTilesAtOnce, min(max(left, 0), kTilesAtOnce));
#pragma unroll 1
        for (int tile = 0; tile < min(step.tiles - first, kTilesAtOnce); tile += kTilesEach, stage.next()) {
          mbarrier_wait(shared_address(&shared.values_empty[stage.at]), stage.parity ^ 1);
          __syncwarp();
          const u32 to = shared_address(shared.values[stage.at]), full = shared_address(&shared.values_full[stage.at]);
          if constexpr (kSmallPages) {
            copy_tiles<kOwnDims * 2>(p, item, places, to, full, rank * kOwnDims);
          } else {
            load_chunks<kOwnChunks>(k_map, item, places.box, tile * kPages, to, full, rank * kOwnDims);
          }
          __syncwarp();
        }
        places = next;
      }
    });
  });
}

// Copies what this block makes of its tiles to the others, and expects what they make: a lane for each of them.
DEVICE void hand_over_weights(int rank, SharedStorage& shared) {
  const int other = lane_id();
  u32 made = 0, got = 0;  // parities, a bit for each slot
  int slot = 0;
  each_item(shared, [&](const Item& item) {
    each_step(item, [&](const Step& step) {
      const int at = slot;
      slot = (slot + 1) % SharedStorage::kSteps;
      if (other < step.parts() && other != rank) {
        const u32 full = shared_address(&shared.handed_full[at][other]);
        mbarrier_wait(full, (got >> at & 1) ^ 1);  // what it made before has come
        mbarrier_arrive_expect(full, sizeof(Handed));
        got ^= 1u << at;
      }
      __syncwarp();
      if (step.tiles_of(rank) == 0) return;
      mbarrier_wait(shared_address(&shared.made[at]), made >> at & 1);
      made ^= 1u << at;
      const u32 from = shared_address(&shared.handed[at][rank]), full = shared_address(&shared.handed_full[at][rank]);
      if (elect_one()) {
        mbarrier_arrive(full);
#pragma unroll 1
        for (int i = 1; i < kBlocksTogether; ++i) {
          const u32 block = u32(rank + i) % kBlocksTogether;
          bulk_hand_over(block_address(from, block), from, sizeof(Handed), block_address(full, block));
        }
      }
      __syncwarp();
    });
  });
}

}  // namespace imbrex::cuda

#pragma once
// Steps of the kernels for latents whose thread blocks take the rows of a task together, all blocks of a cluster: each has some dims of the
// output, for which it needs the weights of all keys, and makes the weights of 64 keys of each step, for all blocks. Here are the warps
// that bring the keys that a block scores and the values that it multiplies.
#include "attention_sm90_stream.cuh"
#include "each_item.cuh"

namespace imbrex::cuda {

static_assert(kValuesInKeys && kKvType == kQType && kKeyWarps == 0 && kCrews == 1 && kMaps);
static_assert(kPlainLogits && !kWindow && !kCustomMask && !kPositions);

constexpr int kBlocksTogether = kHeadDimV / kOwnDims, kTilesEach = 64 / kTileKeys, kStepTiles = kBlocksTogether * kTilesEach;
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

// A stage of keys has some chunks of 64 dims of the block's tiles; one of values has the block's dims of 64 keys.
constexpr int kPairBytes = kTilesEach * kChunkBytes;  // of a chunk
constexpr int kChunksEach = 3, kStageBytes = kChunksEach * kPairBytes, kStepStages = (kKChunks + kChunksEach - 1) / kChunksEach;
constexpr int kOwnChunks = kOwnDims / 64, kValueStageBytes = kOwnChunks * kPairBytes;
constexpr int chunks_of_stage(int stage) {
  return kKChunks - stage * kChunksEach < kChunksEach ? kKChunks - stage * kChunksEach : kChunksEach;
}

// How often each lane that loads reports a stage: once for each tile, unless TMA brings them.
constexpr int kReports = kLoaders > 1 ? kTilesEach : 1;

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

// The keys that the block scores. In front of an item's `begin` brings its queries: with what fills the next stage, if they come that way.
template <class Shared, class Begin>
DEVICE void produce_keys(const AttentionParams& p, int rank, const TensorMap& k_map, Shared& shared, Begin begin) {
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
    begin(item, load_next);
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
template <class Shared>
DEVICE void produce_values(const AttentionParams& p, int rank, const TensorMap& k_map, Shared& shared) {
  constexpr int kTilesAtOnce = kSmallPages ? kTilesEach : 4 * kTilesEach;  // that lanes know the places of
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

}  // namespace imbrex::cuda

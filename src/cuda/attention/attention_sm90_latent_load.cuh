#pragma once
// The shared memory of attention_sm90_latent.cu, and the warps that fill it: one finds items, another one brings their queries, then their
// keys, and between pieces of a run the sums so far, all through one ring of stages. Rows of small pages are copied by two of them.
#include "attention_sm90_latent_boxes.cuh"
#include "attention_sm90_latent_parts.cuh"
#include "each_item.cuh"
#include "find_items_together.cuh"

namespace imbrex::cuda {

static_assert(kValuesInKeys && kKvType == kQType && kTileRows == kTeamRows && kKeyWarps == 0 && kCrews == 1);

// Where a token has rows for two tasks, two thread blocks of a cluster take them: each loads some chunks of a tile, to both. So their rings
// go the same way, stage by stage. Rows that lanes copy come to their own block, which hands them over when they are there.
constexpr int kRowCluster = kRowBlocks == 2 ? 2 : 1;
constexpr bool kHandsOver = kRowCluster > 1 && kMaps&& kSmallPages;
// Rows of small pages are copied by two warps, each some chunks of a tile, which report every stage.
constexpr int kLoadWarps = kMaps && kSmallPages ? 2 : 1;
constexpr int kReporters = kHandsOver ? 1 : kLoaders * kLoadWarps;  // lanes that report a stage
DEVICE int rank_in_cluster() { return kRowCluster == 1 ? 0 : shuffle(int(cluster_rank()), 0); }
// Reports a stage, which either block may load to next, once for a warp.
DEVICE void leave_to_all(u64& empty) {
  if constexpr (kRowCluster == 1) {
    report(empty);
  } else {
    __syncwarp();
    if (lane_id() < kRowCluster) mbarrier_arrive_at<false>(shared_address(&empty), u32(lane_id()));
  }
}

// Warpgroups: kConsumers multiply values, each for its dims; one computes scores and weights; one loads.
constexpr int kThreads = 128 * (kConsumers + 2);
constexpr int kTeamDims = kHeadDimV / kConsumers;
static_assert(kTeamDims == 64 || kTeamDims == 128 || kTeamDims == 192 || kTeamDims == 256);

constexpr int kQChunks = kKChunks;
constexpr int kStageBytes = latent_stage_bytes(kKChunks * kChunkBytes, kHeadDimV);
// Queries take the way of keys: so many chunks in a stage, in so many stages.
constexpr int kQChunksEach = kStageBytes / kQChunkBytes, kQStages = (kQChunks + kQChunksEach - 1) / kQChunksEach;
// Chunks of queries that are in registers while an item is computed: as many as fit. The others stay in shared memory.
constexpr int kQKept = kPlainLogits && !kWindow && kLoaders == 1 ? kQChunks * 7 / 9 : latent_kept_chunks(kQChunks),
              kQLeft = kQChunks - kQKept;

constexpr int kWeightSlots = kLatentWeightSlots;

// The tree of a run's pieces: registers hold the sums of one piece, so its nodes that are not complete are in memory, where L2 keeps them.
// They come back through the ring, behind the last tile of the piece that they are folded with: they are on their way while that is
// computed. A stage holds what a warp of rows has of a node, in both warpgroups of dims.
constexpr int kLevels = kLatentLevels, kRowWarps = kTileRows / 16;
constexpr int kNodePartFloats = short_node_words(kTeamDims), kNodePartBytes = kNodePartFloats * 4;  // of a warp and warpgroup
static_assert(kConsumers * kNodePartBytes <= kStageBytes);

DEVICE float* node_rows(const AttentionParams& p, int level, int row_warp) {
  return p.run_sums + ((long(blockIdx.x) * kLevels + level) * kRowWarps + row_warp) * (kConsumers * kNodePartFloats);
}
// That have rows of the item, or of that of the other block.
DEVICE int row_warps(const Item& item) { return kRowCluster > 1 ? kRowWarps : (item.num_rows + 15) / 16; }

// The sums of piece `number` of a run, counted from 1, become a part of the node of this level; or, if they are the `last`, of the run.
DEVICE int level_of_piece(int number, bool last) { return last ? kLevels : lowest_bit(u32(number)) / 2; }
// Whether they are folded with a node of that level first. A level has two bits of the number of earlier pieces: how many complete nodes of
// the level below are in it.
DEVICE bool joins_node(int number, bool last, int level) {
  static_assert(kPiecesTogether == 4);
  return level <= level_of_piece(number, last) && (number - 1 >> 2 * level & 3) != 0;
}
DEVICE int joined_nodes(int number, bool last) {
  int nodes = 0;
#pragma unroll
  for (int level = 0; level < kLevels; ++level) nodes += joins_node(number, last, level);
  return nodes;
}
DEVICE int tiles_of_piece(const Item& item) { return item.piece > 0 ? item.piece / kTileKeys : kFar; }

struct SharedStorage {
  static constexpr int kItemSlots = 3;  // of the item that is multiplied, of the one that is scored, and of the one that is loaded
  alignas(1024) char stage[kStages][kStageBytes];
  alignas(1024) char q[kQLeft][kQChunkBytes];
  alignas(1024) char weights[kWeightSlots][kWeightBytes];
  float factor[kWeightSlots][kTileRows];  // that sums so far are to be multiplied by, in warps whose note says so
  float2 end[kWeightSlots][kTileRows];    // of the last tile of a piece: reference and sum
  u32 note[kWeightSlots][4];              // of each warp of rows
  Item item[kItemSlots];                  // none: kNoItem rows, and none will come
  ClusterNumbers numbers;                 // where there are clusters
  u64 full[kStages], empty[kStages], weights_full[kWeightSlots], weights_empty[kWeightSlots];
  u64 item_full[kItemSlots], item_empty[kItemSlots], item_wanted, node_written;
  u64 copied[kHandsOver ? kStages : 1];  // this block's chunks of a tile
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

// Loads the queries of an item to a stage: its part `part`.
DEVICE void load_queries(const AttentionParams& p, const TensorMap& q_map, const Item& item, int part, u32 to, u32 full) {
  const int first = part * kQChunksEach, end = min(first + kQChunksEach, kQChunks);
  if constexpr (kMaps) {
    constexpr int kHeads = kGroup < kTileRows ? kGroup : kTileRows, kTokens = kTileRows / kHeads;  // of a box
    const int head = item.head_of(0), token = item.token_of(0);
    if (elect_one()) {
      mbarrier_arrive_expect(full, u32(end - first) * (kTokens * kHeads * 128));
      for (int c = first; c < end; ++c) tma_load(to + (c - first) * kQChunkBytes, q_map, full, l2_first_out(), c * 64, head, token);
    } else if (kReporters > 1) {
      mbarrier_arrive(full);
    }
  } else {
    copy_queries(p, item, first * 8, end * 8, kQChunkBytes, to);
    mbarrier_arrive(full);
  }
}

// Loads what a warp of rows has of a node to a stage.
DEVICE void load_node(const AttentionParams& p, int level, int row_warp, u32 to, u32 full) {
  constexpr u32 kBytes = kConsumers * kNodePartBytes;
  if (lane_id() == 0) {
    mbarrier_arrive_expect(full, kBytes);
    bulk_load(to, node_rows(p, level, row_warp), kBytes, full);
  } else if (kReporters > 1) {
    mbarrier_arrive(full);
  }
}

// Of a cluster each block brings some chunks of a tile to both: the first block these, the other one the others.
constexpr int kFirstChunks = (kKChunks + kRowCluster - 1) / kRowCluster;

// Copies chunks of a tile row by row, from `first` up to `end`.
template <int first, int end>
DEVICE void copy_chunks(const AttentionParams& p, const Item& item, const Box& box, u32 to, u32 full) {
  constexpr int kBytes = (end == kKChunks ? kHeadDimQk * 2 : end * 128) - first * 128;
  KvSide side = p.k;
  side.data += first * 128;
  copy_rows<kBytes, kChunkBytes, kUnrolled>(side, item.kv_head, box.rows, box.key - lane_id() * kPageRows, to + first * kChunkBytes, full);
}
// Copies what warp `loader` of the block has of its chunks of a tile.
DEVICE void copy_latent_tile(const AttentionParams& p, int loader, const Item& item, const Box& box, u32 to, u32 full) {
  constexpr int kFirst = kFirstChunks / 2, kSecond = kFirstChunks + (kKChunks - kFirstChunks) / 2;  // that the second warp has
  if (rank_in_cluster() == 0) {
    loader == 0 ? copy_chunks<0, kFirst>(p, item, box, to, full) : copy_chunks<kFirst, kFirstChunks>(p, item, box, to, full);
  } else {
    loader == 0 ? copy_chunks<kFirstChunks, kSecond>(p, item, box, to, full) : copy_chunks<kSecond, kKChunks>(p, item, box, to, full);
  }
}

// Loads a tile.
DEVICE void load_latent_tile(const TensorMap& k_map, const Item& item, const Box& box, u32 to, u32 full, u64 l2) {
  constexpr int kPagesAtOnce = 4;
  if (rank_in_cluster() == 0) {
    load_latents<kFirstChunks, 128, kPagesAtOnce, kRowCluster>(k_map, item, box, to, full, l2, 0, kKChunks);
  } else {
    load_latents<kKChunks - kFirstChunks, 128, kPagesAtOnce, kRowCluster>(k_map, item, box, to + kFirstChunks * kChunkBytes, full, l2,
                                                                          kFirstChunks * 64, kKChunks);
  }
}

// Warp `loader` of those that load: the first one loads all that is not rows of small pages.
DEVICE void produce_stages(const AttentionParams& p, int loader, const TensorMap& q_map, const TensorMap& k_map, SharedStorage& shared) {
  // Where a token has rows for several tasks, each of them reads the keys.
  const u64 l2 = kRowBlocks > 1 ? l2_normal() : l2_first_out();
  Ring<kStages> stage;
  u32 nodes_written = 0;
  const auto begin_stage = [&] { mbarrier_wait(shared_address(&shared.empty[stage.at]), stage.parity ^ 1); };
  const auto address = [&] { return shared_address(shared.stage[stage.at]); };
  const auto full = [&] { return shared_address(&shared.full[stage.at]); };
  // Whether another warp loads a stage, which this one reports all the same.
  const auto is_left_out = [&] {
    if (loader == 0) return false;
    if (kReporters > 1) mbarrier_arrive(full());
    return true;
  };
  each_item(shared, [&](const Item& item) {
    const Tiles tiles = tiles_of(item);
    Box box = box_of(p, item, tiles.first);
    int number = 1, left = tiles_of_piece(item);  // of the piece at work, from 1 on; its tiles
#pragma unroll 1
    for (int part = 0; part < kQStages; ++part, stage.next()) {
      begin_stage();
      if (!is_left_out()) load_queries(p, q_map, item, part, address(), full());
    }
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, stage.next()) {
      const Box next = box_of(p, item, tile + 1);
      begin_stage();
      if constexpr (kMaps && !kSmallPages) {
        load_latent_tile(k_map, item, box, address(), full(), l2);
      } else if constexpr (kMaps) {
        copy_latent_tile(p, loader, item, box, address(), kHandsOver ? shared_address(&shared.copied[stage.at]) : full());
      } else {
        load_tile<kHeadDimQk, kKChunks>(p, p.k, k_map, item, box, address(), full(), l2);
      }
      box = next;
      const bool last = tile + 1 == tiles.end;
      // The next item is wanted when the last tile is under way: the ring has tiles before it that are still to be computed. One lane says
      // so without report(), for which some kernels have no registers.
      if (last && loader == 0 && lane_id() == 0) mbarrier_arrive(shared_address(&shared.item_wanted));
      if (--left > 0 && !last) continue;
      if (number > 1 && loader == 0) mbarrier_wait(shared_address(&shared.node_written), nodes_written++ % 2);
#pragma unroll 1
      for (int level = 0; level < kLevels; ++level) {
        for (int warp = 0; joins_node(number, last, level) && warp < row_warps(item); ++warp) {
          stage.next();
          begin_stage();
          if (!is_left_out()) load_node(p, level, warp, address(), full());
        }
      }
      ++number, left = tiles_of_piece(item);
    }
  });
}

// Copies this block's chunks of each tile to the other block, when they are there.
DEVICE void hand_over_tiles(SharedStorage& shared) {
  const int rank = rank_in_cluster();
  const u32 other = u32(1 - rank), first = rank == 0 ? 0 : kFirstChunks * kChunkBytes,
            bytes = (rank == 0 ? kFirstChunks : kKChunks - kFirstChunks) * kChunkBytes;
  Ring<kStages> stage;
  u32 parities = 0;  // of the stages' copies
  each_item(shared, [&](const Item& item) {
    const Tiles tiles = tiles_of(item);
    int number = 1, left = tiles_of_piece(item);
    const auto skip = [&](int stages) {
#pragma unroll 1
      for (int i = 0; i < stages; ++i) stage.next();
    };
    skip(kQStages);
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, stage.next()) {
      mbarrier_wait(shared_address(&shared.copied[stage.at]), parities >> stage.at & 1);
      parities ^= 1u << stage.at;
      async_proxy_fence();
      if (elect_one()) {
        const u32 from = shared_address(shared.stage[stage.at]) + first, full = shared_address(&shared.full[stage.at]);
        mbarrier_arrive_expect(full, kKChunks * kChunkBytes - bytes);
        bulk_hand_over(block_address(from, other), from, bytes, block_address(full, other));
      }
      __syncwarp();
      const bool last = tile + 1 == tiles.end;
      if (--left > 0 && !last) continue;
      skip(joined_nodes(number, last) * row_warps(item));
      ++number, left = tiles_of_piece(item);
    }
  });
}

}  // namespace imbrex::cuda

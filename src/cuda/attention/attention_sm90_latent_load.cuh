#pragma once
// The shared memory of attention_sm90_latent.cu, and the warps that fill it: one finds items, another one brings their queries and then
// their keys, all through one ring of stages.
#include "attention_sm90_parts.cuh"
#include "attention_sm90_stream.cuh"

namespace imbrex::cuda {

static_assert(kValuesInKeys && kKvType == kQType && kTileRows == kTeamRows && kKeyWarps == 0 && kCrews == 1);

// Warpgroups: kConsumers multiply values, each for its dims; one computes scores and weights; one loads.
constexpr int kThreads = 128 * (kConsumers + 2);
constexpr int kTeamDims = kHeadDimV / kConsumers;
static_assert(kTeamDims == 64 || kTeamDims == 128 || kTeamDims == 192 || kTeamDims == 256);

constexpr int kQSteps = (kHeadDimQk + 15) / 16, kQChunks = kKChunks, kQChunkBytes = kTileRows * 128;
constexpr int kStageBytes = kKChunks * kChunkBytes;
// Queries take the way of keys: so many chunks in a stage, in so many stages.
constexpr int kQChunksEach = kStageBytes / kQChunkBytes, kQStages = (kQChunks + kQChunksEach - 1) / kQChunksEach;
// Chunks of queries that are in registers while an item is computed. The others stay in shared memory.
constexpr int kQKept = latent_kept_chunks(kQChunks), kQLeft = kQChunks - kQKept;

constexpr int kWeightSlots = kLatentWeightSlots, kWeightRow = 2 * kTileKeys, kWeightBytes = kTileRows * kWeightRow;
static_assert(kWeightRow == 64, "the swizzle of weights");

// What belongs to a tile's weights.
static_assert(kStages <= 16);
struct Note {
  enum : u32 { kBegins = 1, kEnds = 2, kLast = 4, kHasFactors = 8, kStage = 16, kTile = 256 };
  u32 bits;
  DEVICE Note(u32 bits) : bits(bits) {}
  DEVICE Note(int tile, int stage, bool begins, bool ends, bool last)
      : bits(u32(tile) * kTile | u32(stage) * kStage | (begins ? kBegins : 0) | (ends ? kEnds : 0) | (last ? kLast : 0)) {}
  DEVICE u32 with_factors() const { return bits | kHasFactors; }
  DEVICE bool begins() const { return (bits & kBegins) != 0; }           // a piece
  DEVICE bool ends() const { return (bits & kEnds) != 0; }               // a piece
  DEVICE bool is_last() const { return (bits & kLast) != 0; }            // of the item
  DEVICE bool has_factors() const { return (bits & kHasFactors) != 0; }  // that sums so far are to be multiplied by
  DEVICE int stage() const { return int(bits / kStage % (kTile / kStage)); }
  DEVICE int tile() const { return int(bits / kTile); }
};

// What a warp has multiplied: items, and pieces of the one at work. It is kept in shared memory, because registers are few.
struct Done {
  int items, pieces;
};

struct SharedStorage {
  static constexpr int kItemSlots = 3;  // of the item that is multiplied, of the one that is scored, and of the one that is loaded
  alignas(1024) char stage[kStages][kStageBytes];
  alignas(1024) char q[kQLeft][kQChunkBytes];
  alignas(1024) char weights[kWeightSlots][kWeightBytes];
  float factor[kWeightSlots][kTileRows];  // that sums so far are to be multiplied by, in warps whose note says so
  float2 end[kWeightSlots][kTileRows];    // of the last tile of a piece: reference and sum
  u32 note[kWeightSlots][4];              // of each warp of rows
  Done done[4 * kConsumers];              // by each warp that multiplies
  Item item[kItemSlots];                  // none: kNoItem rows, and none will come
  u64 full[kStages], empty[kStages], weights_full[kWeightSlots], weights_empty[kWeightSlots];
  u64 item_full[kItemSlots], item_empty[kItemSlots];
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

// Loads the queries of an item to a stage: its part `part`.
DEVICE void load_queries(const AttentionParams& p, const TensorMap& q_map, const Item& item, int part, u32 to, u32 full) {
  const int first = part * kQChunksEach, end = min(first + kQChunksEach, kQChunks);
  if constexpr (kMaps) {
    constexpr int kHeads = kGroup < kTileRows ? kGroup : kTileRows, kTokens = kTileRows / kHeads;  // of a box
    if (lane_id() == 0) {
      mbarrier_arrive_expect(full, u32(end - first) * (kTokens * kHeads * 128));
      for (int c = first; c < end; ++c)
        tma_load(to + (c - first) * kQChunkBytes, q_map, full, l2_first_out(), c * 64, item.head_of(0), item.token_of(0));
    } else if (kLoaders > 1) {
      mbarrier_arrive(full);
    }
  } else {
    copy_queries(p, item, first * 8, end * 8, kQChunkBytes, to);
    mbarrier_arrive(full);
  }
}

DEVICE void produce_stages(const AttentionParams& p, const TensorMap& q_map, const TensorMap& k_map, SharedStorage& shared) {
  // Where a token has rows for several tasks, each of them reads the keys.
  const u64 l2 = kRowBlocks > 1 ? l2_normal() : l2_first_out();
  Ring<SharedStorage::kItemSlots> slot;
  Ring<kStages> stage;
  const auto begin_stage = [&] { mbarrier_wait(shared_address(&shared.empty[stage.at]), stage.parity ^ 1); };
  const auto address = [&] { return shared_address(shared.stage[stage.at]); };
  const auto full = [&] { return shared_address(&shared.full[stage.at]); };
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&shared.item_full[slot.at]), slot.parity);
    const Item item = shared.item[slot.at];
    if (item.num_rows == kNoItem) break;
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared_address(&shared.item_empty[slot.at]));
    const Tiles tiles = tiles_of(item);
    Box box = box_of(p, item, tiles.first);
#pragma unroll 1
    for (int part = 0; part < kQStages; ++part, stage.next()) {
      begin_stage();
      load_queries(p, q_map, item, part, address(), full());
    }
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, stage.next()) {
      const Box next = box_of(p, item, tile + 1);
      begin_stage();
      load_tile<kHeadDimQk, kKChunks>(p, p.k, k_map, item, box, address(), full(), l2);
      box = next;
    }
  }
}

}  // namespace imbrex::cuda

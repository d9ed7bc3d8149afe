#pragma once
// The shared memory of attention_sm90_latent_decode.cu, and the warps that fill it: one finds items and brings their queries. Keys come
// into a ring of stages: of 16 bits a third of a tile to a stage, through a warp for each; of bytes a whole tile, as it lies in memory.
#include "attention/ds_mla.h"
#include "attention_sm90_latent_boxes.cuh"
#include "attention_sm90_latent_decode_parts.cuh"
#include "each_item.cuh"

namespace imbrex::cuda {

static_assert(kTeams == 2);
constexpr int kConsumerWarps = 4 * kTeams;  // of warpgroups that compute

// A stage of the ring holds a group of chunks of keys, so that a tile's first ones are free while its last are still multiplied.
constexpr int kGroupChunks = 3, kGroups = (kChunks + kGroupChunks - 1) / kGroupChunks;
constexpr int group_chunks(int group) {
  return kChunks - group * kGroupChunks < kGroupChunks ? kChunks - group * kGroupChunks : kGroupChunks;
}

// Bytes: e4m3, or records with scales for groups of dims. A key's lie in a row of an odd number of units of 16 bytes: so the units that
// eight neighbouring keys have at the same dims are in different banks. The last one may have nothing.
constexpr bool kBytes = kKvType != kQType;
static_assert(!kBytes || kKvType == kE4m3);
static_assert(!kDsMla || (kHeadDimQk == kDsMlaLatent + kDsMlaRope && kHeadDimV == kDsMlaLatent && kQType == kBf16));
constexpr int kRecordBytes = kDsMla ? kDsMlaBytes : kHeadDimQk, kRowBytes = kKWidth;

static_assert(!kBytes || (kRowBytes / 16 % 2 != 0 && kRowBytes >= kRecordBytes));
constexpr int kStageBytes = kBytes ? kTileKeys * kRowBytes : kGroupChunks * kChunkBytes;
constexpr int kTileStages = kBytes ? 1 : kGroups;
static_assert(kStages >= kTileStages, "a tile is multiplied when all of its stages are there");
// Warps that load: of bytes one, but for small pages, where they share out the keys.
constexpr int kLoadWarps = kBytes && kMaps && kSmallPages ? 3 : kTileStages;
constexpr int kThreads = 128 * (kTeams + 1);
constexpr int kStageArrivals = kBytes ? kLoaders * kLoadWarps : kLoaders;  // of lanes

struct SharedStorage {
  static constexpr int kItemSlots = 3;
  alignas(1024) char stage[kStages][kStageBytes];
  alignas(1024) char q[kChunks][kQChunkBytes];
  alignas(1024) char weights[kBytes ? 2 * kTeams : 1][kTileRows * 128];  // 64 of each row; bytes: of the tile of each team, in turns
  float4 scores[kTeams][kTileRows / 16][kBytes ? 1 : 128];               // 16 bits: that a team leaves to the other one
  // fp8_ds_mla: of the keys of each team's tile, for groups of dims; in turns.
  alignas(16) u16 scales[2 * kTeams][kDsMlaGroups][kDsMla ? kTileKeys : 1];
  alignas(16) float tops_of_warps[kTileRows][kConsumerWarps], sums_of_warps[kTileRows][kConsumerWarps];  // Parts
  float q_factor[kTileRows];  // bytes: what a row's queries have to be multiplied by
  Item item[kItemSlots];      // none: kNoItem rows, and none will come
  u64 full[kStages], empty[kStages], q_full, q_empty, sums_full, item_full[kItemSlots], item_empty[kItemSlots], item_wanted;
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

DEVICE void begin_barriers(SharedStorage& shared) {
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(shared_address(&shared.full[i]), kStageArrivals);
    mbarrier_init(shared_address(&shared.empty[i]), kConsumerWarps);
  }
  mbarrier_init(shared_address(&shared.q_full), kMaps ? 1 : 32);
  mbarrier_init(shared_address(&shared.q_empty), kConsumerWarps);
  mbarrier_init(shared_address(&shared.sums_full), kConsumerWarps);
  mbarrier_init(shared_address(&shared.item_wanted), 1);
  for (int i = 0; i < SharedStorage::kItemSlots; ++i) {
    mbarrier_init(shared_address(&shared.item_full[i]), 1);
    mbarrier_init(shared_address(&shared.item_empty[i]), kConsumerWarps + kLoadWarps);
  }
  mbarrier_fence_init();
}

// --- keys of 16 bits

// Loads a group of a tile's chunks to a stage.
template <int group>
DEVICE void load_group(const AttentionParams& p, const TensorMap& k_map, const Item& item, const Box& box, u64 l2, u32 to, u32 full) {
  constexpr int kFirst = group * kGroupChunks, kCount = group_chunks(group);
  constexpr int kFirstDim = kFirst * 64, kDims = kHeadDimQk - kFirstDim < kCount * 64 ? kHeadDimQk - kFirstDim : kCount * 64;
  const int begin = box.key - lane_id() * kPageRows;
  if constexpr (kMaps && !kSmallPages) {
    load_latents<kCount, 128, 1>(k_map, item, box, to, full, l2, kFirstDim);
  } else {
    KvSide side = p.k;
    side.data += kFirstDim * side.dim_stride;
    if constexpr (kMaps) {
      copy_rows<kDims * 2, kChunkBytes, kUnrolled>(side, item.kv_head, box.rows, begin, to, full);
    } else {
      load_elements<kDims, kCount, 128>(p, side, item, begin, to, full);
    }
  }
}

// A warp loads the same group of all tiles.
template <int group>
DEVICE void load_keys(const AttentionParams& p, const TensorMap& k_map, SharedStorage& shared) {
  // Where a token has rows for several tasks, each of them reads the keys.
  const u64 l2 = kRowBlocks > 1 ? l2_normal() : l2_first_out();
  Ring<kStages> stage;
  for (int i = 0; i < group; ++i) stage.next();
  each_item(shared, [&](const Item& item) {
    const Tiles tiles = tiles_of(item);
    Box box = box_of(p, item, tiles.first);
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile) {
      const Box next = box_of(p, item, tile + 1);
      if (group == 0 && wants_next(tiles, tile)) report(shared.item_wanted);
      mbarrier_wait(shared_address(&shared.empty[stage.at]), stage.parity ^ 1);
      load_group<group>(p, k_map, item, box, l2, shared_address(shared.stage[stage.at]), shared_address(&shared.full[stage.at]));
#pragma unroll
      for (int i = 0; i < kGroups; ++i) stage.next();
      box = next;
    }
  });
}

// --- bytes

// Loads the records of a tile's keys, each to the row of its key; warp number `warp` of kLoadWarps.
DEVICE void load_records(const AttentionParams& p, const TensorMap& k_map, const Item& item, int tile, const Box& box, int warp, u64 l2,
                         u32 to, u32 full) {
  const int lane = lane_id(), begin = tile * kTileKeys, lo = max(item.lo, begin), hi = min(item.hi, begin + kTileKeys);
  const char* const head = p.k.data + item.kv_head * p.k.head_stride;
  if constexpr (!kMaps) {
#pragma unroll 1
    for (int key = lo; key < hi; ++key) {
      const long at =
          kBlockSize == 0 ? ragged_offset(p.k, item.first_block, key) : offset_in_block(p.k, *block_id_of(p, item.first_block, key), key);
#pragma unroll 1
      for (int i = lane; i < kRecordBytes; i += 32) store_shared(to + (key - begin) * kRowBytes + i, u8(head[at + i * p.k.dim_stride]));
    }
    mbarrier_arrive(full);
  } else if constexpr (kSmallPages) {
    constexpr int kUnits = kRecordBytes / 16;  // no more: with kMaps
#pragma unroll
    for (int part = 0; part < kRowParts; ++part) {
      const int block = box.rows.of[part];
      const i64 at = block < 0 ? -1 : offset_in_block(p.k, block, begin + 32 * part + lane);
#pragma unroll 2
      for (int i = warp; i < 32; i += kLoadWarps) {
        const u32 low = shuffle(u32(at), i), high = shuffle(u32(u64(at) >> 32), i);
        const i64 from = i64(u64(high) << 32 | low);
        const u32 row = to + (32 * part + i) * kRowBytes;
#pragma unroll
        for (int first = 0; first < kUnits; first += 32)
          if (from >= 0 && first + lane < kUnits) copy_async<16>(row + (first + lane) * 16, head + from + (first + lane) * 16);
      }
    }
    mbarrier_arrive_after_copies(full);
  } else {
    load_latents<1, kRowBytes, 1>(k_map, item, box, to, full, l2);
  }
}

// A warp that loads records.
DEVICE void load_bytes(const AttentionParams& p, const TensorMap& k_map, int warp, SharedStorage& shared) {
  const u64 l2 = kRowBlocks > 1 ? l2_normal() : l2_first_out();
  Ring<kStages> stage;
  each_item(shared, [&](const Item& item) {
    const Tiles tiles = tiles_of(item);
    Box box = box_of(p, item, tiles.first);
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, stage.next()) {
      const Box next = box_of(p, item, tile + 1);
      if (warp == 0 && wants_next(tiles, tile)) report(shared.item_wanted);
      mbarrier_wait(shared_address(&shared.empty[stage.at]), stage.parity ^ 1);
      load_records(p, k_map, item, tile, box, warp, l2, shared_address(shared.stage[stage.at]), shared_address(&shared.full[stage.at]));
      box = next;
    }
  });
}

// What the other warps of the warpgroup do whose first one finds items, number `warp` of them.
DEVICE void bring_keys(const AttentionParams& p, const TensorMap& k_map, SharedStorage& shared, int warp) {
  if constexpr (kBytes) {
    if (warp < kLoadWarps) load_bytes(p, k_map, warp, shared);
  } else {
    static_assert(kGroups == 2 || kGroups == 3);
    if (warp == 0) load_keys<0>(p, k_map, shared);
    if (warp == 1) load_keys<1>(p, k_map, shared);
    if constexpr (kGroups > 2) {
      if (warp == 2) load_keys<2>(p, k_map, shared);
    }
  }
}

}  // namespace imbrex::cuda

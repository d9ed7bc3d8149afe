#pragma once
// The shared memory of attention_sm90_latent_decode.cu, and the warps that fill it: one finds items and brings their queries. Keys of 16
// bits come straight into a ring of stages, through a warp for each stage of a tile; bytes come as they lie in memory, through one warp,
// and four others widen them into the ring.
#include "attention/ds_mla.h"
#include "attention_sm90_stream.cuh"
#include "widen.cuh"

namespace imbrex::cuda {

constexpr int kTeams = 2, kConsumerWarps = 4 * kTeams;  // warpgroups that compute, and their warps
static_assert(kValuesInKeys && kCrews == 1 && kTileKeys == 64 && (kTileRows == 16 || kTileRows == 32));

// A tile of keys, widened, is chunks of 64 dims: lines of 128 bytes, as TMA's swizzle puts them. A stage of the ring holds a group of
// chunks, so that a tile's first ones are free while its last are still multiplied.
constexpr int kChunks = (kHeadDimQk + 63) / 64, kGroupChunks = 3, kGroups = (kChunks + kGroupChunks - 1) / kGroupChunks;
constexpr int group_chunks(int group) {
  return kChunks - group * kGroupChunks < kGroupChunks ? kChunks - group * kGroupChunks : kGroupChunks;
}
constexpr int kStageBytes = kGroupChunks * kChunkBytes;
static_assert(kStages >= kGroups, "a tile is multiplied when all of its groups are there");
constexpr int kQChunkBytes = kTileRows * 128;

// Bytes: e4m3, or records with scales for groups of dims.
constexpr bool kWidens = kKvType != kQType;
static_assert(!kWidens || kKvType == kE4m3);
static_assert(!kDsMla || (kHeadDimQk == kDsMlaLatent + kDsMlaRope && kHeadDimV == kDsMlaLatent && kQType == kBf16));
constexpr int kRecordBytes = kDsMla ? kDsMlaBytes : kHeadDimQk, kStagedTiles = 2;
constexpr int kWideners = 4, kLoadWarps = kWidens ? 1 + kWideners : kGroups;  // warps
constexpr int kThreads = 128 * (kTeams + (kWidens ? 2 : 1));
constexpr int kStageArrivals = kWidens ? kWideners : kLoaders;

struct SharedStorage {
  static constexpr int kItemSlots = 3;
  alignas(1024) char stage[kStages][kStageBytes];
  alignas(1024) char q[kChunks][kQChunkBytes];
  alignas(1024) char weights[kTileRows * 128];                                       // 64 weights of each row
  alignas(128) char staged[kStagedTiles][kWidens ? kTileKeys * kRecordBytes : 128];  // tiles of records as they lie in memory
  float4 scores[kTeams][kTileRows / 16][128];                                        // that a team leaves to the other one
  float of_warps[kTileRows][kConsumerWarps];                                         // what each warp has of a row
  Item item[kItemSlots];                                                             // none: kNoItem rows, and none will come
  u64 full[kStages], empty[kStages], staged_full[kStagedTiles], staged_empty[kStagedTiles], q_full, q_empty, item_full[kItemSlots],
      item_empty[kItemSlots];
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
  for (int i = 0; i < SharedStorage::kItemSlots; ++i) {
    mbarrier_init(shared_address(&shared.item_full[i]), 1);
    mbarrier_init(shared_address(&shared.item_empty[i]), kConsumerWarps + kLoadWarps);
  }
  if constexpr (kWidens) {
    for (u64& full : shared.staged_full) mbarrier_init(shared_address(&full), kMaps ? 1 : 32);
    for (u64& empty : shared.staged_empty) mbarrier_init(shared_address(&empty), kWideners);
  }
  mbarrier_fence_init();
}

// A box of queries, and how many of an item's rows are written whatever the item is.
constexpr int kBoxHeads = kGroup < kTileRows ? kGroup : kTileRows, kBoxTokens = kTileRows / kBoxHeads;
constexpr int kWrittenRows = kMaps ? kBoxHeads * kBoxTokens : 0;

// Queries that no load writes are zeros: scores of anything else would outgrow their references again and again. By all threads.
DEVICE void clear_queries(SharedStorage& shared) {
  if constexpr (kWrittenRows < kTileRows) {
    const u32 to = shared_address(shared.q);
    for (int i = int(threadIdx.x) * 16; i < int(sizeof(shared.q)); i += kThreads * 16) store_shared(to + i, uint4{0, 0, 0, 0});
    async_proxy_fence();
  }
}

// Loads the queries of an item.
DEVICE void load_queries(const AttentionParams& p, const TensorMap& q_map, const Item& item, SharedStorage& shared) {
  const u32 to = shared_address(shared.q), full = shared_address(&shared.q_full);
  if constexpr (kMaps) {
    if (lane_id() != 0) return;
    mbarrier_arrive_expect(full, u32(kChunks) * (kWrittenRows * 128));
    for (int c = 0; c < kChunks; ++c)
      tma_load(to + c * kQChunkBytes, q_map, full, l2_first_out(), c * 64, item.head_of(0), item.token_of(0));
  } else {
    copy_queries(p, item, 0, kChunks * 8, kQChunkBytes, to);
    async_proxy_fence();
    mbarrier_arrive(full);
  }
}

// Does `verb` to each of the shared items, in their order.
template <class Verb>
DEVICE void each_item(SharedStorage& shared, const Verb& verb) {
  Ring<SharedStorage::kItemSlots> slot;
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&shared.item_full[slot.at]), slot.parity);
    const Item& item = shared.item[slot.at];
    if (item.num_rows == kNoItem) break;
    verb(item);
    report(shared.item_empty[slot.at]);
  }
}

// --- keys of 16 bits

// Loads a group of a tile's chunks to a stage.
template <int group>
DEVICE void load_group(const AttentionParams& p, const TensorMap& k_map, const Item& item, const Box& box, u64 l2, u32 to, u32 full) {
  constexpr int kFirst = group * kGroupChunks, kCount = group_chunks(group);
  constexpr int kFirstDim = kFirst * 64, kDims = kHeadDimQk - kFirstDim < kCount * 64 ? kHeadDimQk - kFirstDim : kCount * 64;
  const int lane = lane_id(), begin = box.key - lane * kPageRows;
  if constexpr (kMaps && !kSmallPages) {
    const int boxes = __popc(__ballot_sync(kFullWarp, box.loads));
    if (lane == 0) mbarrier_arrive_expect(full, boxes * kPageRows * 128 * kCount);
    __syncwarp();
#pragma unroll
    for (int c = 0; box.loads && c < kCount; ++c)
      tma_load(to + lane * kPageRows * 128 + c * kChunkBytes, k_map, full, l2, kFirstDim + c * 64, first_row(item, box), item.kv_head,
               box.block);
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
      mbarrier_wait(shared_address(&shared.empty[stage.at]), stage.parity ^ 1);
      load_group<group>(p, k_map, item, box, l2, shared_address(shared.stage[stage.at]), shared_address(&shared.full[stage.at]));
#pragma unroll
      for (int i = 0; i < kGroups; ++i) stage.next();
      box = next;
    }
  });
}

// --- bytes

// Copies the records of a tile's keys, which are the item's, to `to`, each to the place of its key.
DEVICE void stage_records(const AttentionParams& p, const Item& item, int tile, const Box& box, u32 to, u32 full) {
  const int lane = lane_id(), begin = tile * kTileKeys, lo = max(item.lo, begin), hi = min(item.hi, begin + kTileKeys);
  const char* const head = p.k.data + item.kv_head * p.k.head_stride;
  if constexpr (!kMaps) {
#pragma unroll 1
    for (int key = lo; key < hi; ++key) {
      const long at =
          kBlockSize == 0 ? ragged_offset(p.k, item.first_block, key) : offset_in_block(p.k, *block_id_of(p, item.first_block, key), key);
#pragma unroll 1
      for (int i = lane; i < kRecordBytes; i += 32) store_shared(to + (key - begin) * kRecordBytes + i, u8(head[at + i * p.k.dim_stride]));
    }
    mbarrier_arrive(full);
    return;
  }
  if (lane == 0) mbarrier_arrive_expect(full, max(hi - lo, 0) * kRecordBytes);
  __syncwarp();
  if constexpr (kSmallPages) {
#pragma unroll
    for (int part = 0; part < kRowParts; ++part) {
      const int row = 32 * part + lane, block = box.rows.of[part];
      if (block >= 0) bulk_load(to + row * kRecordBytes, head + offset_in_block(p.k, block, begin + row), kRecordBytes, full);
    }
  } else if (box.loads) {
    // In a page, records are neighbours in most caches.
    const int first = max(box.key, lo), end = min(box.key + kPageRows, hi);
    const char* const from = head + offset_of_row(p.k, box.block, u32(first_row(item, box) + first - box.key));
    const u32 place = to + (first - begin) * kRecordBytes;
    if (p.k.token_stride == kRecordBytes) {
      bulk_load(place, from, u32(end - first) * kRecordBytes, full);
    } else {
#pragma unroll 1
      for (int row = 0; row < end - first; ++row) bulk_load(place + row * kRecordBytes, from + row * p.k.token_stride, kRecordBytes, full);
    }
  }
}

// The scale of a key's group of dims as factors of pairs of bf16. Most scales are bf16 numbers themselves: then `rest` is zero.
struct PairScale {
  u32 scale, rest;
  DEVICE PairScale(float x) {
    scale = pack_bf16(x, x);
    const float left = x - unpack_bf16(scale).x;
    rest = pack_bf16(left, left);
  }
};

// 16 dims of a key, of which `bytes` has the codes: their numbers, in two units of 16 bytes.
struct Widened {
  uint4 low, high;
  DEVICE Widened(const uint4& low, const uint4& high) : low(low), high(high) {}
  DEVICE explicit Widened(const uint4& b)
      : low{widened<kQType>(b.x, 0), widened<kQType>(b.x, 1), widened<kQType>(b.y, 0), widened<kQType>(b.y, 1)},
        high{widened<kQType>(b.z, 0), widened<kQType>(b.z, 1), widened<kQType>(b.w, 0), widened<kQType>(b.w, 1)} {}
  template <class Verb>
  DEVICE void each(const Verb& verb) {
    verb(low.x), verb(low.y), verb(low.z), verb(low.w), verb(high.x), verb(high.y), verb(high.z), verb(high.w);
  }
  DEVICE void multiply(float by) {
    const PairScale scale(by);
    if (any_lane(scale.rest << 1 != 0)) {
      each([&](u32& x) { x = multiply_add_bf16(x, scale.scale, multiply_bf16(x, scale.rest)); });
    } else {
      each([&](u32& x) { x = multiply_bf16(x, scale.scale); });
    }
  }
};

// Widens a warp's share of a group of chunks: two eights of keys. Four lanes have 64 dims of a key; the two keys of eight neighbouring
// lanes are those whose pieces lie in different banks, as bytes and as 16-bit numbers.
template <int group>
DEVICE void widen_group(int warp, u32 records, u32 to) {
  constexpr int kCount = group_chunks(group), kEights = kTileKeys / 8;
  const int lane = lane_id(), key = warp * 8 + (lane / 8 ^ lane / 4 % 2 * 5), piece = lane % 4;
  const u32 record = records + key * kRecordBytes, place = to + key * 128 + (2 * piece ^ key % 8) * 16;
#pragma unroll
  for (int eight = 0; eight < kEights; eight += kWideners) {
    uint4 x[kCount], more;
    float scale[kCount];
    const u32 from = record + eight * (8 * kRecordBytes);
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const int chunk = group * kGroupChunks + c;
      if (kDsMla && chunk == kDsMlaLatent / 64) {
        x[c] = load_shared(from + kDsMlaRopeAt + piece * 32), more = load_shared(from + kDsMlaRopeAt + piece * 32 + 16);
      } else {
        x[c] = load_shared(from + chunk * 64 + piece * 16);
        if constexpr (kDsMla) scale[c] = float_of(load_shared_element<4>(from + kDsMlaScalesAt + chunk * 64 / kDsMlaGroup * 4));
      }
    }
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      const u32 at = c * kChunkBytes + eight * 1024;
      const bool rope = kDsMla && group * kGroupChunks + c == kDsMlaLatent / 64;
      Widened wide = rope ? Widened(x[c], more) : Widened(x[c]);
      if (kDsMla && !rope) wide.multiply(scale[c]);
      store_shared(place + at, wide.low);
      store_shared((place ^ 16) + at, wide.high);
    }
  }
}

// The warp that loads records.
DEVICE void load_records(const AttentionParams& p, SharedStorage& shared) {
  Ring<kStagedTiles> staged;
  each_item(shared, [&](const Item& item) {
    const Tiles tiles = tiles_of(item);
    Box box = box_of(p, item, tiles.first);
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, staged.next()) {
      const Box next = box_of(p, item, tile + 1);
      mbarrier_wait(shared_address(&shared.staged_empty[staged.at]), staged.parity ^ 1);
      stage_records(p, item, tile, box, shared_address(shared.staged[staged.at]), shared_address(&shared.staged_full[staged.at]));
      box = next;
    }
  });
}

template <int group = 0>
DEVICE void widen_groups(SharedStorage& shared, int warp, u32 records, Ring<kStages>& stage) {
  if constexpr (group < kGroups) {
    mbarrier_wait(shared_address(&shared.empty[stage.at]), stage.parity ^ 1);
    widen_group<group>(warp, records, shared_address(shared.stage[stage.at]));
    async_proxy_fence();
    report(shared.full[stage.at]);
    stage.next();
    widen_groups<group + 1>(shared, warp, records, stage);
  }
}

// A warp that widens, number `warp` of them.
DEVICE void widen_keys(SharedStorage& shared, int warp) {
  Ring<kStages> stage;
  Ring<kStagedTiles> staged;
  each_item(shared, [&](const Item& item) {
    const Tiles tiles = tiles_of(item);
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, staged.next()) {
      mbarrier_wait(shared_address(&shared.staged_full[staged.at]), staged.parity);
      widen_groups(shared, warp, shared_address(shared.staged[staged.at]), stage);
      report(shared.staged_empty[staged.at]);
    }
  });
}

// What the other warps of the warpgroup do whose first one finds items, number `warp` of them.
DEVICE void bring_keys(const AttentionParams& p, const TensorMap& k_map, SharedStorage& shared, int warp) {
  if constexpr (kWidens) {
    if (warp == 0) load_records(p, shared);
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

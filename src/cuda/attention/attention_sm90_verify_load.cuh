#pragma once
// The shared memory of attention_sm90_verify.cu, and the warps that fill it: items with their queries, keys, values.
#include "attention_sm90_parts.cuh"
#include "attention_sm90_stream.cuh"
#include "tile_walk.cuh"
#include "widen.cuh"

namespace imbrex::cuda {

constexpr int kTeams = kConsumers / kCrews;   // warpgroups of a crew
constexpr bool kShareDims = kHeadDimV > 128;  // or rows
constexpr bool kWidens = kKvType != kQType;   // bytes for queries of 16 bits
static_assert(!kWidens || (kKvType == kE4m3 && kFromBytes));
// The warps of a crew that do not compute: one finds items, another one loads keys and values (or two, one each), and two more widen fp8.
constexpr int kProducers = kWidens && kCrews == 2 ? 2 : 1, kThreads = 128 * (kConsumers + kProducers);
static_assert(kTileRows == (kShareDims ? kTeamRows : kTeams * kTeamRows) && (!kShareDims || kTeams == 2));
constexpr int kQChunks = (kHeadDimQk + 63) / 64, kQSteps = (kHeadDimQk + 15) / 16, kQChunkBytes = kTileRows * 128;
constexpr int kTeamDims = kShareDims ? 128 : kHeadDimV <= 64 ? 64 : kHeadDimV;  // of the output that a warpgroup computes
// The numbers of chunks of 64 dims of a stage; a product may reach beyond the last chunk of values.
constexpr int kKRooms = kQChunks, kVRooms = kShareDims ? 4 : (kHeadDimV + 63) / 64;
constexpr bool kWarpForEachSide = kCrews == 1 && !kWidens;  // one loads keys and one values
constexpr int kLoadingWarps = kWidens ? 3 : kWarpForEachSide ? 2 : 1;
constexpr int kReports = kWidens ? 1 : kLoaders;  // of a tile that can be multiplied

// Stages of fp8 tiles before they are widened, and their barriers.
constexpr int kBytesStages = 2;
template <bool widens>
struct BytesTiles {
  alignas(1024) char k[kBytesStages][kKChunks * kChunkBytes];
  alignas(1024) char v[kBytesStages][kVChunks * kChunkBytes];
};
template <bool widens>
struct BytesBarriers {
  u64 k_full[kBytesStages], k_empty[kBytesStages], v_full[kBytesStages], v_empty[kBytesStages];
};
template <>
struct BytesTiles<false> {};
template <>
struct BytesBarriers<false> {};

// A tile of keys, as the warp that loads it tells those that multiply beside a mask_mod, which have no registers to walk over stretches.
struct ToldTile {
  int number, ended;  // ended: pieces that end between the tile before, or the item's beginning, and this one
  bool shown, last;   // whether mask_mod hides none of its keys; of the item
};
static_assert(!kMaskMod || !kWidens);
// Those that report keys: where copies report themselves, also the one that tells.
constexpr int kKeyReports = kReports + (kMaskMod && kLoaders > 1);

struct SharedStorage {                                             // of a crew
  static constexpr int kItemSlots = 2, kQSlots = kWidens ? 1 : 2;  // beside bytes there is room for one
  alignas(1024) char k[kStages][kKRooms * kChunkBytes];
  alignas(1024) char v[kValueStages][kVRooms * kChunkBytes];
  alignas(1024) char q[kQSlots][kQChunks * kQChunkBytes];
  BytesTiles<kWidens> bytes;
  Item item[kItemSlots];  // none: kNoItem rows, and none will come
  u64 k_full[kStages], k_empty[kStages], v_full[kValueStages], v_empty[kValueStages];
  u64 item_full[kItemSlots], item_empty[kItemSlots], item_wanted, q_full[kQSlots], q_empty[kQSlots];
  BytesBarriers<kWidens> bytes_barriers;
  ToldTile told[kMaskMod ? kStages : 1];
};
static_assert(kCrews * sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = kCrews * sizeof(SharedStorage);

// The stages that tiles are loaded to, in the type of the cache, and their barriers.
DEVICE auto& loaded_tiles(SharedStorage& shared) {
  if constexpr (kWidens) {
    return shared.bytes;
  } else {
    return shared;
  }
}
DEVICE auto& loaded_barriers(SharedStorage& shared) {
  if constexpr (kWidens) {
    return shared.bytes_barriers;
  } else {
    return shared;
  }
}
constexpr int kLoadedKeys = kWidens ? kBytesStages : kStages, kLoadedValues = kWidens ? kBytesStages : kValueStages;

// --- warps that load

// Finds items and loads their queries.
DEVICE void produce_items(const AttentionParams& p, const TensorMap& q_map, int crew, SharedStorage& shared) {
  constexpr int kTokens = kTileRows / kGroup;  // of a box
  Ring<SharedStorage::kQSlots> q;
  find_items(p, crew, shared, [&](const Item& item) {
    const u32 to = shared_address(shared.q[q.at]), full = shared_address(&shared.q_full[q.at]);
    if (SharedStorage::kQSlots < SharedStorage::kItemSlots) mbarrier_wait(shared_address(&shared.q_empty[q.at]), q.parity ^ 1);
    if constexpr (kMaps) {
      if (lane_id() == 0) {
        mbarrier_arrive_expect(full, kQChunks * kTokens * kGroup * 128);
#pragma unroll
        for (int c = 0; c < kQChunks; ++c)
          tma_load(to + c * kQChunkBytes, q_map, full, l2_first_out(), c * 64, item.kv_head * kGroup, item.q_begin);
      }
    } else {
      copy_queries(p, item, 0, kQSteps * 2, kQChunkBytes, to);  // with zeros where the last product lacks dims
      mbarrier_arrive(full);
    }
    q.next();
  });
}

// What a warp loads: keys, and values a tile behind them; or one of the two, where a crew has a warp for each.
enum class Sides { both, keys, values };

template <Sides sides>
DEVICE void produce_tiles(const AttentionParams& p, const TensorMap& k_map, const TensorMap& v_map, SharedStorage& shared) {
  const u64 l2 = l2_first_out();  // nobody else reads these keys
  Ring<SharedStorage::kItemSlots> slot;
  auto& to_tiles = loaded_tiles(shared);
  auto& barriers = loaded_barriers(shared);
  Ring<kLoadedKeys> k;
  Ring<kLoadedValues> v;
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&shared.item_full[slot.at]), slot.parity);
    const Item item = shared.item[slot.at];
    if (item.num_rows == kNoItem) break;
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared_address(&shared.item_empty[slot.at]));
    TileStream<kMaskMod> tiles(p, item);
    const auto load_keys = [&](const Box& box) {
      const u32 to = shared_address(to_tiles.k[k.at]), full = shared_address(&barriers.k_full[k.at]);
      mbarrier_wait(shared_address(&barriers.k_empty[k.at]), k.parity ^ 1);
      if constexpr (kMaskMod) {
        if (lane_id() == 0) {
          shared.told[k.at] = {tiles.tile(), tiles.ended_pieces(), tiles.is_shown(), tiles.count() + 1 == tiles.end()};
          if (kLoaders > 1) mbarrier_arrive(full);
        }
        __syncwarp();
      }
      load_tile<kHeadDimQk, kKChunks>(p, p.k, k_map, item, box, to, full, l2);
      k.next();
    };
    const auto load_values = [&](const Box& box) {
      const u32 to = shared_address(to_tiles.v[v.at]), full = shared_address(&barriers.v_full[v.at]);
      mbarrier_wait(shared_address(&barriers.v_empty[v.at]), v.parity ^ 1);
      load_tile<kHeadDimV, kVChunks>(p, p.v, v_map, item, box, to, full, l2);
      v.next();
    };
    Box box = box_of(p, item, tiles.tile()), before{};
#pragma unroll 1
    for (; tiles.count() < tiles.end(); tiles.next()) {
      const Box next = box_of(p, item, tiles.next_tile());
      if constexpr (sides == Sides::values) {
        load_values(box);
      } else {
        if (wants_next({tiles.first(), tiles.end()}, tiles.count())) report(shared.item_wanted);
        load_keys(box);
        if (sides == Sides::both && tiles.count() > tiles.first()) load_values(before);
      }
      before = box, box = next;
    }
    if constexpr (sides == Sides::both) load_values(before);
  }
}

// Widens a crew's keys to the queries' type, or its values to f16, which the weights are too.
template <bool keys>
DEVICE void widen_tiles(SharedStorage& shared) {
  constexpr int kDim = keys ? kHeadDimQk : kHeadDimV, kType = keys ? kQType : int(kF16), kRowsAtOnce = 16;
  constexpr int kPiecesAtOnce = kTileRows > 64 ? 1 : 4;  // as registers are there
  constexpr u32 kBytes = (keys ? kKChunks : kVChunks) * kChunkBytes, kStageBytes = (keys ? kKRooms : kVRooms) * kChunkBytes;
  auto& from_barriers = loaded_barriers(shared);
  const WidenedPlace place = widened_place<128>();
  const u32 from_begin = (keys ? shared_address(loaded_tiles(shared).k) : shared_address(loaded_tiles(shared).v)) + place.from;
  const u32 to_begin = (keys ? shared_address(shared.k) : shared_address(shared.v)) + place.to;
  const u32 bytes_full = shared_address(keys ? from_barriers.k_full : from_barriers.v_full);
  const u32 bytes_empty = shared_address(keys ? from_barriers.k_empty : from_barriers.v_empty);
  const u32 full = shared_address(keys ? shared.k_full : shared.v_full), empty = shared_address(keys ? shared.k_empty : shared.v_empty);
  Ring<SharedStorage::kItemSlots> slot;
  Ring<kBytesStages> bytes;
  Ring<keys ? kStages : kValueStages> stage;
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&shared.item_full[slot.at]), slot.parity);
    const Item& item = shared.item[slot.at];
    if (item.num_rows == kNoItem) break;
    const Tiles tiles = tiles_of(item);
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared_address(&shared.item_empty[slot.at]));
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, bytes.next(), stage.next()) {
      mbarrier_wait(bytes_full + bytes.at * 8, bytes.parity);
      mbarrier_wait(empty + stage.at * 8, stage.parity ^ 1);
      const u32 from = from_begin + bytes.at * kBytes, to = to_begin + stage.at * kStageBytes;
#pragma unroll 1
      for (int row = 0; row < kTileKeys; row += kRowsAtOnce)
        widen_rows<kType, kDim, kRowsAtOnce, 128, kChunkBytes, kChunkBytes, kPiecesAtOnce>(from + row * 128, to + row * 128);
      async_proxy_fence();
      __syncwarp();
      if (lane_id() == 0) {
        mbarrier_arrive(bytes_empty + bytes.at * 8);
        mbarrier_arrive(full + stage.at * 8);
      }
    }
  }
}

}  // namespace imbrex::cuda

#pragma once
// The shared memory of attention_sm90.cu, and the warpgroup that loads it: items, their queries, keys, values.
#include "attention_sm90_cluster.cuh"
#include "attention_sm90_mask.cuh"
#include "attention_sm90_score.cuh"
#include "attention_sm90_widen.cuh"
#include "tile_rows.cuh"

namespace imbrex::cuda {

// Numbers of chunks of 64 dims: 128 bytes, the width of the swizzle. The last chunk is filled up with zeros.
constexpr int kQChunks = (kHeadDimQk + 63) / 64, kVChunks = (kHeadDimV + 63) / 64;
constexpr int kQChunkBytes = 64 * 128, kKvChunkBytes = kTileKeys * 128;
// The numbers of lanes that report a tile: the one that starts TMA, those that copy rows, or one of each warp that widens them.
constexpr int kValueLoaders = kSmallPages && !kWidens ? 32 : 1;
constexpr int kKeyLoaders = kWidens ? kKeyWideners : kSmallPages ? kValueLoaders + kCustomMask : 1;

constexpr int kQBytes = kConsumers * kQChunks * kQChunkBytes, kKvBytes = kStages * (kQChunks + kVChunks) * kKvChunkBytes;
constexpr int kRoom = 226 * 1024;  // bytes of shared memory, without those for barriers and items
// With two slots, the next item's queries are loaded while an item is computed.
constexpr int kQSlots = 2 * kQBytes + kKvBytes + kStagedBytes + kColumnBytes + kConsumers * 64 * 8 <= kRoom ? 2 : 1;
constexpr int kItems = kQSlots + 3;  // a warpgroup ends an item when it has begun the next; keys are kQSlots ahead, and items one more

struct SharedStorage : Staging<kWidens>, ScoreColumns<kColumnNumbers> {
  alignas(1024) char q[kQSlots][kConsumers][kQChunks][kQChunkBytes];
  alignas(1024) char k[kStages][kQChunks][kKvChunkBytes];
  alignas(1024) char v[kStages][kVChunks][kKvChunkBytes];
  u64 q_full[kQSlots], q_empty[kQSlots], k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  u64 item_full[kItems], item_ends;
  HandedTasks handed;
  bool together[kItems];  // Found
  RunPiece piece[kItems];
  Item item[kItems];                   // kNoItem rows: no item, and none will come
  int told[kStages];                   // told_tile() of a stage's keys
  float2 ended_state[kConsumers][64];  // reference and sum of each row of the item whose output is to be stored
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

// --- each of these has a warp of its own, so that no warp waits for data that only another one needs

// Finds items and loads their queries. An item is found before all keys of the one in front are loaded, since finding it takes several
// loads, one after the other. Its number is not taken much earlier, because another block might begin it sooner.
DEVICE void produce_items(const AttentionParams& p, const TensorMap& q_map, SharedStorage& shared) {
  const int lane = lane_id();
  Ring<kItems> entry;
  u32 num_items = 0;
  for (Tasks tasks(p, shared.handed);; tasks.next()) {
    Item& item = shared.item[entry.at];
    Found found;
    // A block without a cluster skips tasks without rows in this inner loop. With `continue`, ptxas would keep the count of items in one
    // register for all lanes, although they diverge where one of them arrives at a barrier.
    while (kCluster == 1 && tasks.exists() && !tasks.find(num_items, found)) tasks.next();
    const bool exists = tasks.exists();
    if (exists) {
      const bool mine = kCluster == 1 || tasks.find(num_items, found);
      if constexpr (kCustomMask) take_off_hidden_tiles(p, found.item);
      if (lane == 0) item = found.item, shared.piece[entry.at] = found.piece, shared.together[entry.at] = found.together;
      __syncwarp();
      if (!mine) continue;
      if constexpr (kSmallPages) {
        const int key = (tiles_of(item).end - 1) * kTileKeys + lane * kRowParts;
        if (key < item.hi) prefetch_l1(block_id_of(p, item.first_block, key));
      } else if constexpr (kBlockSize > 0) {
        const int key = (tiles_of(item).end - 1) * kTileKeys + lane * kPageRows;
        if (lane < kPages && key < item.hi) prefetch_l1(block_id_of(p, item.first_block, key));
      }
    } else if (lane == 0) {
      item.num_rows = kNoItem;
    }
    if (lane == 0) mbarrier_arrive(shared_address(&shared.item_full[entry.at]));
    const auto q = ring_at<kQSlots>(num_items);
    const u32 q_full = shared_address(&shared.q_full[q.at]);
    mbarrier_wait(shared_address(&shared.q_empty[q.at]), q.parity ^ 1);
    if (!exists) {
      if (lane == 0) mbarrier_arrive(q_full);
      tasks.end();
      break;
    }
    if (lane == 0) {
      mbarrier_arrive_expect(q_full, kConsumers * kQChunks * kTeamRows * 128);
#pragma unroll
      for (int i = 0; i < kConsumers * kQChunks; ++i) {
        const int wg = i / kQChunks, c = i % kQChunks;
        tma_load(shared_address(shared.q[q.at][wg][c]), q_map, q_full, l2_first_out(), c * 64, item.kv_head * kGroup,
                 item.q_begin + item.row_begin / kGroup + wg * (kTeamRows / kGroup));
      }
    }
    mbarrier_wait(shared_address(&shared.item_ends), ring_at<1>(num_items).parity);
    ++num_items, entry.next();
  }
}

// Loads keys or values, tile by tile: each lane a page, in chunks of dims, or rows. `to`, `full` and `empty` are those of the first stage.
template <bool keys>
DEVICE void produce_tiles(const AttentionParams& p, const TensorMap& map, SharedStorage& shared, u32 to, u32 full, u32 empty) {
  constexpr int kChunks = keys ? kQChunks : kVChunks, kPageBytes = kPageRows * 128;
  const int lane = lane_id();
  Ring<kItems> entry;
  Ring<kStages> stage;
  for (;; entry.next()) {
    mbarrier_wait(shared_address(&shared.item_full[entry.at]), entry.parity);
    const Item& item = shared.item[entry.at];
    if (item.num_rows == kNoItem) break;
    const Tiles tiles = tiles_of(item);
    const volatile bool& together = shared.together[entry.at];  // read where needed: registers are few
    const int lo = item.lo, hi = item.hi, kv_head = item.kv_head;
    const long first_block = item.first_block;
    const auto block_of = [&](int tile) {
      if constexpr (kBlockSize == 0 || kSmallPages) return 0;
      const int key = tile * kTileKeys + lane * kPageRows;
      return lane < kPages && key < hi ? *block_id_of(p, first_block, key) : 0;
    };
    const auto rows_of = [&](int tile) { return row_blocks(p, first_block, tile * kTileKeys, lo, hi); };
    int block = block_of(tiles.end - 1);
    RowBlocks rows{};
    if constexpr (kSmallPages) rows = rows_of(tiles.end - 1);
    for (int tile = tiles.end - 1, before = tiles.end, next; tile >= tiles.first; before = tile, tile = next, stage.next()) {
      next = tile > tiles.first ? tile_below(p, item, tile) : tiles.first - 1;
      const int key = tile * kTileKeys + lane * kPageRows;
      const bool wanted = lane < kPages && key < hi && key + kPageRows > lo && hi > lo;
      const bool loads = wanted && (kCluster == 1 || !together || loads_page(lane));
      const int pages = __popc(__ballot_sync(kFullWarp, wanted));
      const int offset = row_of_key(first_block, key);
      const int next_block = tile > tiles.first ? block_of(next) : 0;
      const u32 barrier = full + stage.at * 8, stage_at = to + stage.at * (kChunks * kKvChunkBytes), at = stage_at + lane * kPageBytes;
      const int told = kCustomMask && keys ? told_tile(p, item, tile) : 0;
      mbarrier_wait(empty + stage.at * 8, stage.parity ^ 1);
      if (kCustomMask && keys && lane == 0) {
        shared.told[stage.at] = told;
        if (kSmallPages) mbarrier_arrive(barrier);  // copies report themselves alone
      }
      if (!kSmallPages && lane == 0) mbarrier_arrive_expect(barrier, pages * kPageBytes * kChunks);
      if (keys && lane == 0 && comes_to(tile_from_end(tiles, 3), before, tile)) mbarrier_arrive(shared_address(&shared.item_ends));
      __syncwarp();
      if constexpr (kSmallPages) {
        const RowBlocks next_rows = rows_of(next);
        copy_rows<2 * (keys ? kHeadDimQk : kHeadDimV), kKvChunkBytes, 2>(keys ? p.k : p.v, kv_head, rows, tile * kTileKeys, stage_at,
                                                                         barrier);
        rows = next_rows;
      } else {
#pragma unroll
        for (int c = 0; loads && c < kChunks; ++c)
          load_box(at + c * kKvChunkBytes, map, barrier, together, c * 64, offset, kv_head - p.first_kv_head, block);
      }
      block = next_block;
    }
  }
}

template <class Shared>
DEVICE void produce_keys(const AttentionParams& p, const TensorMap& map, Shared& shared, int share) {
  const u32 to = shared_address(shared.k), full = shared_address(shared.k_full), empty = shared_address(shared.k_empty);
  if constexpr (kWidens) {
    Widener<true, kKvChunkBytes, Shared>(p, map, shared, share * (kWidenedParts / kKeyWideners)).run(to, full, empty);
  } else {
    produce_tiles<true>(p, map, shared, to, full, empty);
  }
}
template <class Shared>
DEVICE void produce_values(const AttentionParams& p, const TensorMap& map, Shared& shared) {
  const u32 to = shared_address(shared.v), full = shared_address(shared.v_full), empty = shared_address(shared.v_empty);
  if constexpr (kWidens) {
    Widener<false, kKvChunkBytes, Shared>(p, map, shared, 0).run(to, full, empty);
  } else {
    produce_tiles<false>(p, map, shared, to, full, empty);
  }
}

}  // namespace imbrex::cuda

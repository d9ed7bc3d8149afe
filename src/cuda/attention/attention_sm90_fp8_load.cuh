#pragma once
// The shared memory of attention_sm90_fp8.cu, and the warpgroup that fills it: one warp loads, three transpose values.
#include "attention_sm90_cluster.cuh"
#include "tile_rows.cuh"

namespace imbrex::cuda {

constexpr int kTransposers = 3;  // warps
// Dims that products have: those that a row lacks are loaded as zeros, and not stored.
constexpr int kDims = sm90_fp8_dims(kHeadDimV);
static_assert(kHeadDimQk == kHeadDimV);
constexpr int kWidth = sm90_fp8_chunk(kHeadDimV);
constexpr int kChunks = (kDims + kWidth - 1) / kWidth;
constexpr int kQChunkBytes = 64 * kWidth, kKvChunkBytes = kTileKeys * kWidth;
constexpr int kTurnedWidth = kTileKeys % 128 == 0 ? 128 : kTileKeys % 64 == 0 ? 64 : 32;  // keys of a row of transposed values
constexpr int kTurnedChunkBytes = kDims * kTurnedWidth;

constexpr int kPageBytes = kPageRows * kWidth;
constexpr int kLoaders = kSmallPages ? 32 : 1;  // lanes that report a tile: the one that starts TMA, or those that copy its rows

constexpr int kQSlots = 2;           // the next item's queries load meanwhile
constexpr int kItems = kQSlots + 2;  // a warpgroup stores an item's output when it has begun the next, and the one after that is there

struct SharedStorage {
  alignas(1024) char q[kQSlots][kConsumers][kChunks][kQChunkBytes];
  alignas(1024) char k[kStages][kChunks][kKvChunkBytes];
  alignas(1024) char v[kStages][kChunks][kKvChunkBytes];
  alignas(1024) char turned[kStages][kTileKeys * kDims];  // values, [key / kTurnedWidth][dim][key]
  u64 q_full[kQSlots], q_empty[kQSlots], k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages], turned_full[kStages],
      turned_empty[kStages];
  HandedTasks handed;
  bool together[kItems];  // Found
  RunPiece piece[kItems];
  Item item[kItems];  // kNoItem rows: no item, and none will come
};
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

constexpr u32 swizzle_mode(int width) { return width == 128 ? 1 : width == 64 ? 2 : 3; }
// The swizzle: the number that the address of a unit of 16 bytes is XORed with, in rows of `width` bytes that begin at a multiple of 1024.
DEVICE u32 swizzle_of(int row, int width) { return u32(row * width / 128 % (width / 16) * 16); }
DEVICE u64 descriptor(const char* tile, int width) { return wgmma_descriptor(shared_address(tile), 16, 8 * width, swizzle_mode(width)); }

// --- one warp loads

// A lane's part of the load of a tile of keys and values: a page, or parts of rows where pages are too small for boxes.
struct Load {
  int begin, kv_head;  // the tile's first key
  bool together, loads;
  int pages, block, offset;  // pages: of all lanes
  RowBlocks rows;
};
DEVICE void load_tile(const AttentionParams& p, const KvSide& side, const TensorMap& map, u32 to, u32 full, const Load& tile) {
  if constexpr (kSmallPages) {
    copy_rows<kHeadDimV, kKvChunkBytes, 2, kWidth>(side, tile.kv_head, tile.rows, tile.begin, to, full);
  } else {
    if (lane_id() == 0) mbarrier_arrive_expect(full, tile.pages * kPageBytes * kChunks);
    __syncwarp();
#pragma unroll
    for (int c = 0; tile.loads && c < kChunks; ++c) {
      const u32 at = to + lane_id() * kPageBytes + c * kKvChunkBytes;
      load_box(at, map, full, tile.together, c * kWidth, tile.offset, tile.kv_head - p.first_kv_head, tile.block);
    }
  }
}

// An item is found while the last tiles of the one in front load.
DEVICE void produce(const AttentionParams& p, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map,
                    SharedStorage& shared) {
  const int lane = lane_id();
  Tasks tasks(p, shared.handed);
  u32 num_items = 0;
  Ring<kStages> kv;
  const auto find_item = [&](int at) {
    Found found{};
    while (tasks.exists() && !tasks.find(num_items, found)) tasks.next();
    if (!tasks.exists()) {
      found.item.num_rows = kNoItem;
      tasks.end();
    }
    if (lane == 0) shared.item[at] = found.item, shared.piece[at] = found.piece, shared.together[at] = found.together;
    ++num_items;
    __syncwarp();
  };
  find_item(0);
  for (;;) {
    const auto q = ring_at<kQSlots>(num_items - 1);
    const int entry = ring_at<kItems>(num_items - 1).at;
    const Item& item = shared.item[entry];
    const u32 q_full = shared_address(&shared.q_full[q.at]);
    mbarrier_wait(shared_address(&shared.q_empty[q.at]), q.parity ^ 1);
    if (item.num_rows == kNoItem) {
      if (lane == 0) mbarrier_arrive(q_full);
      break;
    }
    if (lane == 0) {
      mbarrier_arrive_expect(q_full, kConsumers * kChunks * kTeamRows * kWidth);
#pragma unroll
      for (int i = 0; i < kConsumers * kChunks; ++i) {
        const int wg = i / kChunks, c = i % kChunks;
        tma_load(shared_address(shared.q[q.at][wg][c]), q_map, q_full, l2_first_out(), c * kWidth, item.kv_head * kGroup,
                 item.q_begin + item.row_begin / kGroup + wg * (kTeamRows / kGroup));
      }
    }
    const Tiles tiles = tiles_of(item);
    const int lo = item.lo, hi = item.hi;
    const long first_block = item.first_block;
    const auto block_of = [&](int tile) {
      if constexpr (kBlockSize == 0 || kSmallPages) return 0;
      const int key = tile * kTileKeys + lane * kPageRows;
      return lane < kPages && key < hi ? *block_id_of(p, first_block, key) : 0;
    };
    const auto rows_of = [&](int tile) { return row_blocks(p, first_block, tile * kTileKeys, lo, hi); };
    const int find_at = tile_from_end(tiles, 2);
    Load next{.block = block_of(tiles.end - 1)};
    if constexpr (kSmallPages) next.rows = rows_of(tiles.end - 1);
    for (int tile = tiles.end - 1; tile >= tiles.first; --tile, kv.next()) {
      const int key = tile * kTileKeys + lane * kPageRows;
      const bool together = shared.together[entry], wanted = lane < kPages && key < hi && key + kPageRows > lo && hi > lo;
      const Load load{.begin = tile * kTileKeys,
                      .kv_head = item.kv_head,
                      .together = together,
                      .loads = wanted && (!together || loads_page(lane)),
                      .pages = __popc(__ballot_sync(kFullWarp, wanted)),
                      .block = next.block,
                      .offset = row_of_key(first_block, key),
                      .rows = next.rows};
      next.block = tile > tiles.first ? block_of(tile - 1) : 0;
      if constexpr (kSmallPages) next.rows = rows_of(tile - 1);
      mbarrier_wait(shared_address(&shared.k_empty[kv.at]), kv.parity ^ 1);
      load_tile(p, p.k, k_map, shared_address(shared.k[kv.at]), shared_address(&shared.k_full[kv.at]), load);
      mbarrier_wait(shared_address(&shared.v_empty[kv.at]), kv.parity ^ 1);
      load_tile(p, p.v, v_map, shared_address(shared.v[kv.at]), shared_address(&shared.v_full[kv.at]), load);
      if (tile == find_at) {
        tasks.next();
        find_item(ring_at<kItems>(num_items).at);
      }
    }
  }
}

// --- three warps transpose values

// The warp's keys of a tile of values to rows of dims. Keys outside of [lo, hi), counted from the tile's first, may be anything, and become
// zero: zero times NaN is NaN.
//
// A matrix of 8 keys x 16 dims, transposed as if of 16-bit elements, leaves a lane two keys of two dims, 2 g and 2 g + 1; two matrices make
// words of four keys for each dim: 2 t, 2 t + 1, 2 t + 8, 2 t + 9. In this order a lane of a consumer has its weights, so that they need
// not move. Lanes from 16 on swap their two dims: so the eight rows of a stored matrix fall into eight different bank groups.
DEVICE void turn_values(u32 from, u32 to, int warp, int lo, int hi) {
  const int lane = computed_here(lane_id()), matrix = lane / 8, row = lane % 8, dim = 2 * row + (matrix % 2 ^ row / 4);
  const u32 first = lane < 16 ? 0x6420 : 0x7531, second = first ^ 0x1111;
  for (int block = 32 * warp; block < kTileKeys; block += 32 * kTransposers) {
    const int key = block + lane;
    if (key < lo || key >= hi) {
#pragma unroll
      for (int i = 0; i < kChunks * kWidth / 16; ++i)  // whole rows, whichever of their pieces the swizzle has put where
        store_shared(from + i / (kWidth / 16) * kKvChunkBytes + key * kWidth + i % (kWidth / 16) * 16, uint4{0, 0, 0, 0});
    }
    __syncwarp();
    const u32 read = (from + key * kWidth) ^ swizzle_of(lane, kWidth);
    const u32 write = (to + block / kTurnedWidth * kTurnedChunkBytes + dim * kTurnedWidth) ^ swizzle_of(dim, kTurnedWidth) ^
                      u32(block % kTurnedWidth + matrix / 2 * 16);
    constexpr int kAtOnce = kDims % 64 == 0 ? 4 : 2;  // of 16 dims
#pragma unroll
    for (int d = 0; d < kDims / 16; d += kAtOnce) {
      u32 x[kAtOnce][4];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        constexpr int kPieces = kWidth / 16;
        load_matrix_transposed(x[i], (read ^ u32((d + i) % kPieces * 16)) + (d + i) / kPieces * kKvChunkBytes);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        store_matrix(write + (d + i) * 16 * kTurnedWidth, pick_bytes(x[i][0], x[i][1], first), pick_bytes(x[i][0], x[i][1], second),
                     pick_bytes(x[i][2], x[i][3], first), pick_bytes(x[i][2], x[i][3], second));
      }
    }
  }
}

DEVICE void transpose(const AttentionParams& p, SharedStorage& shared, int warp) {
  static_assert(kItems == 2 * kQSlots);
  Ring<kItems> entry;
  Ring<kStages> v, behind_skipped;
  Ring<kStages>& turned = kSkipped > 0 ? behind_skipped : v;
  for (;; entry.next()) {
    const auto slot = ring_at<kQSlots>(entry.at);
    mbarrier_wait(shared_address(&shared.q_full[slot.at]), slot.parity);
    const Item& item = shared.item[entry.at];
    if (item.num_rows == kNoItem) break;
    const int lo = item.lo, hi = item.hi, end = seen_end(p, item);
    const Tiles tiles = tiles_of(item);
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared_address(&shared.q_empty[slot.at]));
    for (int tile = tiles.end - 1; tile >= tiles.first; --tile, v.next()) {
      const int begin = tile * kTileKeys;
      if (kSkipped > 0 && tile >= end) {
        skip_stage(shared.v_full[v.at], v.parity, shared.v_empty[v.at], lane_id(), [] { __syncwarp(); });
        continue;
      }
      mbarrier_wait(shared_address(&shared.turned_empty[turned.at]), turned.parity ^ 1);
      mbarrier_wait(shared_address(&shared.v_full[v.at]), v.parity);
      turn_values(shared_address(shared.v[v.at]), shared_address(shared.turned[turned.at]), warp, lo - begin, hi - begin);
      async_proxy_fence();
      __syncwarp();
      if (lane_id() == 0) mbarrier_arrive(shared_address(&shared.turned_full[turned.at]));
      leave_stage<true>(shared.v_empty[v.at], lane_id());
      if constexpr (kSkipped > 0) turned.next();
    }
  }
}

}  // namespace imbrex::cuda

#pragma once
// A warp that streams the keys and values of items, tile by tile, into a ring of stages in shared memory: through TMA, row by row where
// pages are small, or element by element where no map describes a tensor. For kernels that wait for the memory, decode and verify.
#include "async.cuh"
#include "attention_item.cuh"
#include "eight.cuh"
#include "tile_rows.cuh"

namespace imbrex::cuda {

// A multiprocessor has room for kBlocks crews, each of which has a warp that loads and warps that compute. All crews of a multiprocessor
// are one thread block, so that the tasks of a lone request are on different multiprocessors, even where blocks of another launch still
// occupy some. The crews of a block share nothing else.
constexpr int kCrews = kBlocks;
constexpr int kStreamBytes = kKvType == kE4m3 || kKvType == kE5m2 ? 1 : 2, kStreamPiece = 16 / kStreamBytes;  // of an element; dims
// A row is loaded in chunks of a box's width: in chunks of 128 bytes, with a swizzle of that width; or in one chunk, of 64 bytes with a
// swizzle of 64, or of the row's own width without a swizzle. With chunks of 128 bytes of which the last is half empty, fewer useful bytes
// would be under way.
template <int width>
constexpr int kDimsOf = width / kStreamBytes;  // of a chunk
constexpr int kKChunks = (kHeadDimQk + kDimsOf<kKWidth> - 1) / kDimsOf<kKWidth>,
              kVChunks = (kHeadDimV + kDimsOf<kVWidth> - 1) / kDimsOf<kVWidth>;
template <int width>
constexpr int kBytesOf = width* kTileKeys;  // of a chunk of all rows
constexpr int kChunkBytes = kBytesOf<128>;
static_assert((kKWidth == 128 || kKChunks == 1) && (kVWidth == 128 || kVChunks == 1));
constexpr int kLoaders = kMaps && !kSmallPages ? 1 : 32;  // lanes that report a tile: the one that starts TMA, or those that write it

// A warp reports once, for all of its lanes.
DEVICE void report(u64& barrier) {
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(shared_address(&barrier));
}

DEVICE int first_task(int crew) { return crew * int(gridDim.x) + int(blockIdx.x); }

// How many groups of rows of small pages are loaded at a time: as many as the producer has registers for, where consumers have most of
// them.
constexpr int kUnrolled = kKeyWarps == 0 && (kCrews == 1 || kKvType != kQType) ? 2 : 8;

// The offset of a unit of 16 bytes: 128 bytes a row and chunk, with the units of a row exchanged by its number, as by TMA's swizzle.
DEVICE u32 swizzled_piece(int row, int piece, int chunk_bytes) { return piece / 8 * chunk_bytes + row * 128 + (piece % 8 ^ row % 8) * 16; }
// The offset of a unit of 16 bytes in a tile whose chunks are so many bytes wide.
template <int width>
DEVICE u32 place_of_piece(int row, int piece) {
  if constexpr (width == 128) return swizzled_piece(row, piece, kChunkBytes);
  if constexpr (width == 64) return row * 64 + (piece ^ row / 2 % 4) * 16;
  return row * width + piece * 16;
}

// A warp that finds items puts one, or none, into a slot of the ring shared.item.
template <class Shared>
DEVICE void publish_item(Shared& shared, int slot, bool exists, const Item& item) {
  if (lane_id() == 0) {
    if (exists) {
      shared.item[slot] = item;
    } else {
      shared.item[slot].num_rows = kNoItem;
    }
  }
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(shared_address(&shared.item_full[slot]));
}

// Whether the warp that loads keys says at a tile that it wants the next item: once in each item, near its end. Finding it takes several
// loads, one after the other, so it is found before it is needed. But its number is not taken much earlier: another crew might begin it
// sooner, and which crew ends first is not known until all are near the end.
DEVICE bool wants_next(const Tiles& tiles, int tile) {
  constexpr int kTilesAhead = 4;
  return tile == max(tiles.first, tiles.end - kTilesAhead);
}

// Finds a crew's first item in front of griddep_wait(), if no kernel in front may be writing lists; false: find_items() has to.
template <class Shared>
DEVICE bool find_first_item(const AttentionParams& p, int crew, Shared& shared) {
  const int first = first_task(crew);
  if (!p.lists_are_there || first >= num_tasks(p)) return false;
  publish_item(shared, 0, true, item_of(p, first));
  return true;
}

// Finds a crew's items, with a warp of its own, each when it is wanted. They go to the ring shared.item, behind the last one an item of
// kNoItem rows; `load` brings the queries of each. `found`: what find_first_item() said.
template <class Shared, class Load>
DEVICE void find_items(const AttentionParams& p, int crew, Shared& shared, const Load& load, bool found = false) {
  const int crews = kCrews * int(gridDim.x), first = first_task(crew);
  if (!found) prefetch_item(p, first);  // while the number of tasks is on its way
  const int tasks = num_tasks(p);
  const auto next_number = [&] { return shuffle(lane_id() == 0 ? take_number(p, crews, tasks) : 0, 0); };
  Ring<Shared::kItemSlots> slot;
  Ring<1> wanted;
  for (int number = first < tasks ? first : next_number();; slot.next(), wanted.next()) {
    Item item;
    if (found) {
      item = shared.item[slot.at], found = false;
    } else {
      mbarrier_wait(shared_address(&shared.item_empty[slot.at]), slot.parity ^ 1);
      const bool exists = number < tasks;
      if (exists) item = item_of(p, number);
      publish_item(shared, slot.at, exists, item);
      if (!exists) break;
    }
    load(item);
    mbarrier_wait(shared_address(&shared.item_wanted), wanted.parity);
    number = next_number();
  }
}

// Copies pieces of 16 bytes, from `first` on, of an item's queries to the places where TMA's swizzle would put them; those beyond
// kHeadDimQk are zeros. Memory after the last row may hold anything, since results of rows that do not exist are not stored.
DEVICE void copy_queries(const AttentionParams& p, const Item& item, int first, int end, int chunk_bytes, u32 to) {
  const int pieces = end - first;
#pragma unroll 1
  for (int i = lane_id(); i < item.num_rows * pieces; i += 32) {
    const int row = i / pieces, piece = i % pieces;
    const char* const from = p.q + item.token_of(row) * p.q_token_stride + item.head_of(row) * p.q_head_stride + (first + piece) * 16;
    Eight<kQType> e = {};
    if (first + piece < kHeadDimQk / 8) e = load_eight<kQType, false>(from, 2);
    store_shared(to + swizzled_piece(row, piece, chunk_bytes), uint4{e.words[0], e.words[1], e.words[2], e.words[3]});
  }
}

// A lane's part of the load of a tile: the keys of a page.
struct Box {
  int key, block;
  bool loads;
  RowBlocks rows;  // instead, where pages are small
};
// `load`: of its block's id.
template <class Load>
DEVICE Box whole_box(const AttentionParams& p, const Item& item, int tile, const Load& load) {
  Box box{tile * kTileKeys + lane_id() * kPageRows, 0, false, {}};
  box.loads = lane_id() < kPages && box.key < item.hi && box.key + kPageRows > item.lo;
  if (kMaps && kBlockSize > 0 && box.loads) box.block = load(block_id_of(p, item.first_block, box.key));
  return box;
}
DEVICE Box box_of(const AttentionParams& p, const Item& item, int tile) {
  if constexpr (kMaps && kSmallPages) {
    const int begin = tile * kTileKeys;
    return {begin + lane_id() * kPageRows, 0, false, row_blocks(p, item.first_block, begin, item.lo, item.hi)};
  } else {
    return whole_box(p, item, tile, [](const int* id) { return __ldg(id); });
  }
}
DEVICE int first_row(const Item& item, const Box& box) { return row_of_key(item.first_block, box.key); }

// Loads a tile of keys or of values with a warp, one box by each lane.
template <int chunks, int width>
DEVICE void load_boxes(const TensorMap& map, const Item& item, const Box& box, u32 to, u32 full, u64 l2) {
  const int lane = lane_id(), boxes = __popc(__ballot_sync(kFullWarp, box.loads));
  if (lane == 0) mbarrier_arrive_expect(full, boxes * kPageRows * width * chunks);
  __syncwarp();
  if (!box.loads) return;
#pragma unroll
  for (int c = 0; c < chunks; ++c)
    tma_load(to + lane * kPageRows * width + c * kBytesOf<width>, map, full, l2, c * kDimsOf<width>, first_row(item, box), item.kv_head,
             box.block);
}

// Prefetches the first tiles of a crew's first item into L2, `most_tiles` at most, with one warp and in front of griddep_wait(): while the
// last blocks of the kernel in front end, memory is not busy. That kernel may be writing these keys, or the ids of their blocks: so the
// prefetched bytes are not used, and an id that is not valid yet only prefetches the wrong bytes, or none. The lists are in L1 afterwards.
template <int most_tiles, int v_chunks>
DEVICE void fetch_ahead(const AttentionParams& p, const TensorMap& k_map, const TensorMap& v_map, int task) {
  if (!p.keys_are_there || task >= num_tasks(p)) return;
  const Item item = item_of(p, task);
  const Tiles tiles = tiles_of(item);
  if constexpr (!kMaps || kSmallPages) {
    if (kBlockSize > 0) prefetch_l2(block_id_of(p, item.first_block, tiles.first * kTileKeys));
  } else {
    const u64 l2 = l2_first_out();
#pragma unroll 1
    for (int tile = tiles.first; tile < min(tiles.end, tiles.first + most_tiles); ++tile) {
      const Box box = whole_box(p, item, tile, [](const int* id) { return load_l2(id); });
      if (!box.loads) continue;
#pragma unroll
      for (int c = 0; c < kKChunks; ++c) tma_prefetch(k_map, l2, c * kDimsOf<kKWidth>, first_row(item, box), item.kv_head, box.block);
#pragma unroll
      for (int c = 0; c < v_chunks; ++c) tma_prefetch(v_map, l2, c * kDimsOf<kVWidth>, first_row(item, box), item.kv_head, box.block);
    }
  }
}

// Of latents, whose values are a part of their keys. With a second tile several requests take longer.
DEVICE void fetch_latents_ahead(const AttentionParams& p, const TensorMap& map, int task) { fetch_ahead<1, 0>(p, map, map, task); }

// Loads a tile where no map describes the tensor: element by element.
template <int dim, int chunks, int width>
DEVICE void load_elements(const AttentionParams& p, const KvSide& side, const Item& item, int begin, u32 to, u32 full) {
  constexpr int kEights = chunks * kDimsOf<width> / 8;
  const char* const head = side.data + item.kv_head * side.head_stride;
#pragma unroll 1
  for (int i = lane_id(); i < kTileKeys * kEights; i += 32) {
    const int row = i / kEights, d = i % kEights * 8, key = begin + row;
    Eight<kKvType> e = {};
    if (d < dim && key >= item.lo && key < item.hi) {
      const char* from = head + d * side.dim_stride;
      if constexpr (kBlockSize == 0) {
        from += ragged_offset(side, item.first_block, key);
      } else {
        from += offset_in_block(side, *block_id_of(p, item.first_block, key), key);
      }
      e = load_eight<kKvType, false>(from, side.dim_stride);
    }
    const u32 at = to + place_of_piece<width>(row, d / kStreamPiece);
    if constexpr (kStreamBytes == 1) {
      store_shared(at + d % kStreamPiece, uint2{e.words[0], e.words[1]});
    } else {
      store_shared(at, uint4{e.words[0], e.words[1], e.words[2], e.words[3]});
    }
  }
  mbarrier_arrive(full);
}

// Loads a tile of keys or of values, of which each lane has a box.
template <int dim, int chunks, int width = 128>
DEVICE void load_tile(const AttentionParams& p, const KvSide& side, const TensorMap& map, const Item& item, const Box& box, u32 to,
                      u32 full, u64 l2) {
  const int begin = box.key - lane_id() * kPageRows;
  if constexpr (!kMaps) {
    load_elements<dim, chunks, width>(p, side, item, begin, to, full);
  } else if constexpr (kSmallPages) {
    copy_rows<dim * kStreamBytes, kBytesOf<width>, kUnrolled, width>(side, item.kv_head, box.rows, begin, to, full);
  } else {
    load_boxes<chunks, width>(map, item, box, to, full, l2);
  }
}

}  // namespace imbrex::cuda

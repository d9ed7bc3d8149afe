#pragma once
// How keys, values and queries get into the shared memory of attention_sm90_decode.cu: its layout, and the warp that fills it, through TMA,
// row by row where pages are small, or element by element where no map describes a tensor.
#include "async.cuh"
#include "attention_products.cuh"
#include "tile_rows.cuh"

namespace imbrex::cuda {

constexpr int kConsumers = kTeams * kRowWarps, kCrewWarps = kConsumers + 2;  // warps: and the producer, and who joins
// A multiprocessor has room for kBlocks crews. They are one thread block, so that a lone request's tasks come to lie on different ones,
// also where the block of another launch still occupies some. They have nothing in common but that.
constexpr int kCrews = kBlocks, kCrewThreads = 32 * kCrewWarps, kThreadsOfAll = kCrews * kCrewThreads;
constexpr int kChunkDims = 128 / kStoredBytes;  // of a box: the width of the swizzle
constexpr int kKChunks = (kHeadDimQk + kChunkDims - 1) / kChunkDims, kVChunks = (kHeadDimV + kChunkDims - 1) / kChunkDims;
constexpr int kChunkBytes = kTileKeys * 128;
constexpr int kWeightRow = row_bytes(kTileKeys / 8), kWeightBytes = kTileRows * kWeightRow;  // of weights in shared memory
// Of the output, a warp's dims: as many as one fragment of values has, times a power of two.
constexpr int kTeamDims = larger(16 * kLoadSteps, power_of_two_from((kHeadDimV + kTeams - 1) / kTeams)), kTeamDimTiles = kTeamDims / 8;
static_assert(kDirect && kDimWarps == 1 && kRowTiles == 1 && kTeams == 4);
// Whether an item's queries are taken to registers when it begins. Then one place in shared memory is enough for them: the next item's
// come while this one is computed.
constexpr bool kQKept = kRowWarps == 1 || kQRegisters + 12 * kTeamDimTiles <= 96;
constexpr int kQSlots = kQKept ? 1 : 2;
constexpr int kItemSlots = 4;  // the warp that joins may be some items behind

// 128 bytes a row and chunk, the pieces of a row exchanged by its number, as TMA's swizzle leaves them.
struct SwizzledRows {
  static constexpr int kKRow = 128, kVRow = 128;
  DEVICE static u32 lane(int row, int piece, int row_bytes) {
    return piece / 8 * kChunkBytes + row * row_bytes + (piece % 8 ^ row % 8) * 16;
  }
  DEVICE static u32 at(u32 lane, int pair) { return (lane ^ pair % 4 * 32) + pair / 4 * kChunkBytes; }
};

struct SharedStorage {  // of a crew
  alignas(1024) char k[kStages][kKChunks * kChunkBytes];
  alignas(1024) char v[kStages][kVChunks * kChunkBytes];
  alignas(16) char q[kQSlots][kQPlaneBytes];
  alignas(16) char weights[2][kWeightBytes];  // of a tile and of the one before
  float4 tops[2][kTileRows];                  // likewise: of each row, the maxima that the four warps have found
  float4 sums[2][kTileRows];                  // of the weights of a piece, after its last tile
  ItemSlot slot[kItemSlots];                  // of items that are computed or joined, and of those to come
  u64 k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  u64 q_empty[kQSlots], slot_full[kItemSlots], slot_empty[kItemSlots], stored[kItemSlots];
  bool more[kItemSlots];  // false: no item, and none will come
  int last_slot;          // of the crew's last item; -1: it had none
};
constexpr int kLoaders = kMaps && !kSmallPages ? 1 : 32;  // lanes that report a tile: those that have written it, or who has told TMA to
extern "C" __device__ const unsigned smem_bytes = kCrews * sizeof(SharedStorage);

// --- producer: a warp

// What a lane loads of a tile: the keys of a page.
struct Box {
  int key, block;
  bool loads;
  RowBlocks rows;  // instead, where pages are small
};
DEVICE Box box_of(const AttentionParams& p, const Item& item, int tile) {
  const int lane = lane_id();
  Box box{tile * kTileKeys + lane * kPageRows, 0, false, {}};
  if constexpr (kMaps && kSmallPages) {
    box.rows = row_blocks(p, item.first_block, tile * kTileKeys, item.lo, item.hi);
    return box;
  }
  box.loads = lane < kPages && box.key < item.hi && box.key + kPageRows > item.lo;
  if (kMaps && kBlockSize > 0 && box.loads) box.block = __ldg(p.block_ids + item.first_block + u32(box.key) / u32(kPage));
  return box;
}

// A tile of keys or of values by the warp, a box a lane.
template <int chunks>
DEVICE void load_boxes(const TensorMap& map, const Item& item, const Box& box, u32 to, u32 full, u64 l2) {
  const int lane = lane_id(), boxes = __popc(__ballot_sync(kFullWarp, box.loads));
  if (lane == 0) mbarrier_arrive_expect(full, boxes * kPageRows * 128 * chunks);
  __syncwarp();
  if (!box.loads) return;
  const int offset = kBlockSize == 0 ? int(item.first_block) + box.key : int(u32(box.key) % u32(kPage));
#pragma unroll
  for (int c = 0; c < chunks; ++c)
    tma_load(to + lane * kPageRows * 128 + c * kChunkBytes, map, full, l2, c * kChunkDims, offset, item.kv_head, box.block);
}

// Likewise where no map describes the tensor: element by element.
template <int dim, int chunks>
DEVICE void load_elements(const AttentionParams& p, const KvSide& side, const Item& item, int begin, u32 to, u32 full) {
  constexpr int kEights = chunks * kChunkDims / 8;
  const char* const head = side.data + item.kv_head * side.head_stride;
#pragma unroll 1
  for (int i = lane_id(); i < kTileKeys * kEights; i += 32) {
    const int row = i / kEights, d = i % kEights * 8, key = begin + row;
    Eight<kKvType> e = {};
    if (d < dim && key >= item.lo && key < item.hi) {
      const char* from = head + d * side.dim_stride;
      if constexpr (kBlockSize == 0) {
        from += (item.first_block + key) * side.token_stride;
      } else {
        from += p.block_ids[item.first_block + key / kPage] * side.block_stride + key % kPage * side.token_stride;
      }
      e = load_eight<kKvType, false>(from, side.dim_stride);
    }
    const u32 at = to + SwizzledRows::lane(row, d / kPieceDims, 128);
    if constexpr (kBytes) {
      store_shared(at + d % kPieceDims, uint2{e.words[0], e.words[1]});
    } else {
      store_shared(at, uint4{e.words[0], e.words[1], e.words[2], e.words[3]});
    }
  }
  mbarrier_arrive(full);
}

// The tile of a box, of keys or of values.
template <int dim, int chunks>
DEVICE void load_tile(const AttentionParams& p, const KvSide& side, const TensorMap& map, const Item& item, const Box& box, u32 to,
                      u32 full, u64 l2) {
  const int begin = box.key - lane_id() * kPageRows;
  if constexpr (!kMaps) {
    load_elements<dim, chunks>(p, side, item, begin, to, full);
  } else if constexpr (kSmallPages) {
    copy_rows<dim * kStoredBytes, kChunkBytes, 8>(side, item.kv_head, box.rows, begin, to, full);
  } else {
    load_boxes<chunks>(map, item, box, to, full, l2);
  }
}

// What is known of a task before its turn: four loads, each of which needs the one before. In the turn they would hold up those of keys.
struct Task {
  int number;
  Item item;
  Box first;  // of its first tile
};
DEVICE Task task_of(const AttentionParams& p, int number, int tasks) {
  Task task{number, {}, {}};
  if (number < tasks) {
    task.item = item_of(p, number);
    task.first = box_of(p, task.item, tiles_of(task.item).first);
  }
  return task;
}

DEVICE void produce(const AttentionParams& p, const TensorMap& k_map, const TensorMap& v_map, int crew, SharedStorage& shared) {
  const int crews = kCrews * int(gridDim.x), first = crew * int(gridDim.x) + int(blockIdx.x);
  prefetch_item(p, first);  // while the number of tasks is on its way
  const int lane = lane_id(), tasks = num_tasks(p), last = max(tasks - crews, 0) + crews - 1;
  const u64 l2 = l2_first_out();  // nobody else reads these keys
  Ring<kQSlots> q;
  Ring<kItemSlots> slot;
  Ring<kStages> k, v;
  for (Task task = task_of(p, first, tasks);; slot.next(), q.next()) {
    int fetched = 0;
    if (lane == 0 && (task.number < tasks || task.number == first)) {  // as often as attention_sm80 does
      fetched = atomicAdd(p.next_task, 1);
      if (fetched == last) *p.next_task = 0;
    }
    const u32 slot_full = shared_address(&shared.slot_full[slot.at]);
    mbarrier_wait(shared_address(&shared.slot_empty[slot.at]), slot.parity ^ 1);
    if (task.number >= tasks) {
      if (lane == 0) shared.more[slot.at] = false;
      mbarrier_arrive(slot_full);
      break;
    }
    const Item item = task.item;
    const Tiles tiles = tiles_of(item);
    const int full_ring = min(tiles.first + kStages, tiles.end) - 1;  // the tile after which there is time
    Box box = task.first, before{};
    ItemSlot& mine = shared.slot[slot.at];
    mbarrier_wait(shared_address(&shared.q_empty[q.at]), q.parity ^ 1);
    QLoader<32>::load(p, item, shared_address(shared.q[q.at]), mine.q_scale);
    copy_async_commit();
    if constexpr (!kOneScale) {
      const float scale = logit_scale(p, item.kv_head);
      for (int row = lane; row < kTileRows; row += 32) mine.terms[row] = row_terms(p, item.head_of(min(row, item.num_rows - 1)), scale);
    }
    if (lane == 0) {
      mine.item = item;
      shared.more[slot.at] = true;
    }
    const auto load_values = [&] {
      const u32 to = shared_address(shared.v[v.at]), full = shared_address(&shared.v_full[v.at]);
      mbarrier_wait(shared_address(&shared.v_empty[v.at]), v.parity ^ 1);
      load_tile<kHeadDimV, kVChunks>(p, p.v, v_map, item, before, to, full, l2);
      v.next();
    };
    // Values come a tile behind the keys, as they are asked for.
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, k.next()) {
      const u32 to = shared_address(shared.k[k.at]), full = shared_address(&shared.k_full[k.at]);
      const Box next = box_of(p, item, tile + 1);
      mbarrier_wait(shared_address(&shared.k_empty[k.at]), k.parity ^ 1);
      load_tile<kHeadDimQk, kKChunks>(p, p.k, k_map, item, box, to, full, l2);
      if (tile > tiles.first) {
        load_values();
      } else {
        copy_async_wait<0>();
        mbarrier_arrive(slot_full);
      }
      before = box, box = next;
      if (tile == full_ring) task = task_of(p, crews + shuffle(fetched, 0), tasks);
    }
    load_values();
  }
}

}  // namespace imbrex::cuda

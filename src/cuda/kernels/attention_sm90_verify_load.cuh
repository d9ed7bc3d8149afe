#pragma once
// The shared memory of attention_sm90_verify.cu, and the warps that fill it: items with their queries, keys, values.
#include "attention_sm90_parts.cuh"
#include "attention_sm90_stream.cuh"

namespace imbrex::cuda {

constexpr int kTeams = kConsumers / kCrews;       // warpgroups of a crew
constexpr bool kShareDims = kHeadDimV > 128;      // or rows
constexpr int kThreads = 128 * kConsumers + 128;  // of the last warpgroup, two or three warps load for a crew
static_assert(kTileRows == (kShareDims ? kTeamRows : kTeams * kTeamRows) && (!kShareDims || kTeams == 2));
constexpr int kQChunks = (kHeadDimQk + 63) / 64, kQSteps = (kHeadDimQk + 15) / 16, kQChunkBytes = kTileRows * 128;
constexpr int kTeamDims = kShareDims ? 128 : kHeadDimV <= 64 ? 64 : kHeadDimV;  // of the output that a warpgroup computes
constexpr int kVRooms = kShareDims ? 4 : kVChunks;                              // a product may reach beyond the last chunk
constexpr bool kTwoStreams = kCrews == 1;                                       // a warp for keys and one for values

struct SharedStorage {  // of a crew
  static constexpr int kItemSlots = 2;
  alignas(1024) char k[kStages][kKChunks * kChunkBytes];
  alignas(1024) char v[kValueStages][kVRooms * kChunkBytes];
  alignas(1024) char q[kItemSlots][kQChunks * kQChunkBytes];
  Item item[kItemSlots];  // none: kNoItem rows, and none will come
  u64 k_full[kStages], k_empty[kStages], v_full[kValueStages], v_empty[kValueStages];
  u64 item_full[kItemSlots], q_full[kItemSlots], item_empty[kItemSlots];
};
static_assert(kCrews * sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = kCrews * sizeof(SharedStorage);

// --- warps that load

// Rows to where TMA's swizzle would put them. What lies behind the last row may be anything: so are the results of rows that do not exist.
DEVICE void copy_queries(const AttentionParams& p, const Item& item, u32 to) {
  constexpr int kPieces = kHeadDimQk / 8, kAllPieces = kQSteps * 2;  // of a row; with zeros where the last product lacks dims
#pragma unroll 1
  for (int i = lane_id(); i < item.num_rows * kAllPieces; i += 32) {
    const int row = i / kAllPieces, piece = i % kAllPieces;
    const char* const from = p.q + item.token_of(row) * p.q_token_stride + item.head_of(row) * p.q_head_stride + piece * 16;
    Eight<kQType> e = {};
    if (piece < kPieces) e = load_eight<kQType, false>(from, 2);
    store_shared(to + swizzled_piece(row, piece, kQChunkBytes), uint4{e.words[0], e.words[1], e.words[2], e.words[3]});
  }
}

// Items and their queries. Finding an item takes several loads, one after the other: the next one is looked for while this one is computed.
DEVICE void produce_items(const AttentionParams& p, const TensorMap& q_map, int crew, SharedStorage& shared) {
  constexpr int kTokens = kTileRows / kGroup;  // of a box
  const int crews = kCrews * int(gridDim.x), first = crew * int(gridDim.x) + int(blockIdx.x);
  prefetch_item(p, first);  // while the number of tasks is on its way
  const int lane = lane_id(), tasks = num_tasks(p), last = max(tasks - crews, 0) + crews - 1;
  // Taken as often as there are tasks, or crews if these are more; not at all where there is nothing to do.
  const auto take_number = [&] {
    int taken = 0;
    if (lane == 0) {
      taken = atomicAdd(p.next_task, 1);
      if (taken == last) *p.next_task = 0;
    }
    return crews + shuffle(taken, 0);
  };
  Ring<SharedStorage::kItemSlots> slot;
  for (int number = first;; slot.next()) {
    mbarrier_wait(shared_address(&shared.item_empty[slot.at]), slot.parity ^ 1);
    if (tasks > 0 && (number != first || number >= tasks)) number = take_number();
    const bool exists = number < tasks;
    Item item;
    if (exists) item = item_of(p, number);
    if (lane == 0) {
      if (exists) {
        shared.item[slot.at] = item;
      } else {
        shared.item[slot.at].num_rows = kNoItem;
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&shared.item_full[slot.at]));
    if (!exists) break;
    const u32 to = shared_address(shared.q[slot.at]), full = shared_address(&shared.q_full[slot.at]);
    if constexpr (kMaps) {
      if (lane == 0) {
        mbarrier_arrive_expect(full, kQChunks * kTokens * kGroup * 128);
#pragma unroll
        for (int c = 0; c < kQChunks; ++c)
          tma_load(to + c * kQChunkBytes, q_map, full, l2_first_out(), c * 64, item.kv_head * kGroup, item.q_begin);
      }
    } else {
      copy_queries(p, item, to);
      mbarrier_arrive(full);
    }
    number = -1;  // the next one is to be taken
  }
}

// Keys, and values a tile behind them; or either, where a crew has the warps for it.
enum class Stream { keys_and_values, keys, values };

template <Stream stream>
DEVICE void produce_tiles(const AttentionParams& p, const TensorMap& k_map, const TensorMap& v_map, SharedStorage& shared) {
  const u64 l2 = l2_first_out();  // nobody else reads these keys
  Ring<SharedStorage::kItemSlots> slot;
  Ring<kStages> k;
  Ring<kValueStages> v;
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&shared.item_full[slot.at]), slot.parity);
    const Item item = shared.item[slot.at];
    if (item.num_rows == kNoItem) break;
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared_address(&shared.item_empty[slot.at]));
    const Tiles tiles = tiles_of(item);
    const auto load_keys = [&](const Box& box) {
      const u32 to = shared_address(shared.k[k.at]), full = shared_address(&shared.k_full[k.at]);
      mbarrier_wait(shared_address(&shared.k_empty[k.at]), k.parity ^ 1);
      load_tile<kHeadDimQk, kKChunks>(p, p.k, k_map, item, box, to, full, l2);
      k.next();
    };
    const auto load_values = [&](const Box& box) {
      const u32 to = shared_address(shared.v[v.at]), full = shared_address(&shared.v_full[v.at]);
      mbarrier_wait(shared_address(&shared.v_empty[v.at]), v.parity ^ 1);
      load_tile<kHeadDimV, kVChunks>(p, p.v, v_map, item, box, to, full, l2);
      v.next();
    };
    Box box = box_of(p, item, tiles.first), before{};
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile) {
      const Box next = box_of(p, item, tile + 1);
      if constexpr (stream == Stream::values) {
        load_values(box);
      } else {
        load_keys(box);
        if (stream == Stream::keys_and_values && tile > tiles.first) load_values(before);
      }
      before = box, box = next;
    }
    if constexpr (stream == Stream::keys_and_values) load_values(before);
  }
}

}  // namespace imbrex::cuda

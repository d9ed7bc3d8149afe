// Attention of few rows over many keys with TMA, for sm_90 and later: decode and verify. Host side: cuda/attention_sm90_decode.cpp.
//
// Memory sets the pace: on an H200 35 bytes a nanosecond and multiprocessor, of which a key of 128 bf16 dims with its value needs 512. One
// warp loads, a page a lane, and runs ahead of the others by all stages, across the ends of items. Four compute as in attention_sm80.cu,
// the same sums in the same order, and never wait for each other: each leaves its part of an item in shared memory and goes on. A sixth
// joins the parts and, where the item is a piece of a longer one, the pieces. docs/kernels/cuda_sm90.md has the measurements.
#include "async.cuh"
#include "attention_join.cuh"

namespace imbrex::cuda {

constexpr int kConsumers = kTeams * kTeamWarps, kThreadsOfAll = 32 * (kConsumers + 2);  // warps: and the producer, and who joins
constexpr int kChunkDims = 128 / kStoredBytes;                                          // of a box: the width of the swizzle
constexpr int kKChunks = (kHeadDimQk + kChunkDims - 1) / kChunkDims, kVChunks = (kHeadDimV + kChunkDims - 1) / kChunkDims;
// A team leaves its part of an item where its keys and values of the last stage were: there is room, and nobody else reads there.
constexpr int kStageTiles = (kTileRows + 15) / 16 * (kBytes ? 2 : 1), kStageKeys = kStageTiles * kTileKeys;
constexpr int kChunkBytes = kStageKeys * 128, kTmaStageBytes = (kKChunks + kVChunks) * kChunkBytes;
constexpr int kPageRows = kBlockSize == 0 || kBlockSize > kTileKeys ? kTileKeys : kBlockSize;  // of a box
constexpr int kStagePages = kStageKeys / kPageRows;                                            // boxes of a stage, a lane each
constexpr int kPartLines = (kHeadDimV + 31) / 32;                                              // of 32 floats, that a row of a part has
static_assert(kDirect && kDimWarps == 1 && kTeamKeys == 16 && kStagePages <= 32);
static_assert(kPartLines * kTileRows <= (kKChunks + kVChunks) * kStageTiles * kTeamKeys);

// 128 bytes a row and chunk, the pieces of a row exchanged by its number, as TMA's swizzle leaves them.
struct SwizzledRows {
  static constexpr int kKRow = 128, kVRow = 128, kVBegin = kKChunks * kChunkBytes;
  DEVICE static u32 lane(int row, int piece, int row_bytes) { return row * row_bytes + (piece ^ row % 8) * 16; }
  DEVICE static u32 at(u32 lane, int pair) { return (lane ^ pair % 4 * 32) + pair / 4 * kChunkBytes; }
};

struct SharedStorage {
  alignas(1024) char stage[kStages][kTmaStageBytes];  // chunks of keys, then of values; after an item's last key the teams' parts
  ItemSlot slot[2];                                   // of the item that is computed, and of the next
  float2 state[2][kTeams][kTileRows];                 // reference and sum of each row of a part
  u64 full[kStages], empty[kStages], slot_full[2], slot_empty[2], parts[2];
  bool more[2];               // false: no item, and none will come
  int last_slot, last_stage;  // of the block's last item; slot -1: it had none
  bool is_last_piece;
};
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

// Where a team's sum of a row lies in the last stage of an item.
DEVICE float* part_at(char* stage, int team, int row, int d) {
  const int line = row / 16 * kPartLines + d / 32, tile = line / (kKChunks + kVChunks), chunk = line % (kKChunks + kVChunks);
  return reinterpret_cast<float*>(stage + chunk * kChunkBytes + (tile * kTileKeys + team * kTeamKeys + row % 16) * 128) +
         (d % 32 ^ row % 8 * 4);
}

// --- producer: a warp

DEVICE void produce(const AttentionParams& p, const TensorMap& k_map, const TensorMap& v_map, SharedStorage& shared) {
  prefetch_item(p, int(blockIdx.x));  // while the number of tasks is on its way
  const int lane = lane_id(), tasks = num_tasks(p), blocks = int(gridDim.x), last = max(tasks - blocks, 0) + blocks - 1;
  const u64 l2 = l2_first_out();  // nobody else reads these keys
  Ring<2> slot;
  Ring<kStages> stage;
  for (int task = int(blockIdx.x);; slot.next()) {
    int fetched = 0;
    if (lane == 0 && (task < tasks || task == int(blockIdx.x))) {  // as often as attention_sm80 does
      fetched = atomicAdd(p.next_task, 1);
      if (fetched == last) *p.next_task = 0;
    }
    const u32 slot_full = shared_address(&shared.slot_full[slot.at]);
    mbarrier_wait(shared_address(&shared.slot_empty[slot.at]), slot.parity ^ 1);
    if (task >= tasks) {
      if (lane == 0) {
        shared.more[slot.at] = false;
        mbarrier_arrive(slot_full);
      }
      break;
    }
    const Item item = item_of(p, task);
    const Tiles tiles = tiles_of(item);
    // The block of this lane's page of the stage that begins with a tile.
    const auto sees = [&](int key) { return lane < kStagePages && key < item.hi && key + kPageRows > item.lo; };
    const auto block_of = [&](int key) {
      if constexpr (kBlockSize == 0) return 0;
      return sees(key) ? __ldg(p.block_ids + item.first_block + u32(key) / u32(kPage)) : 0;
    };
    int key = tiles.first * kTileKeys + lane * kPageRows, block = block_of(key);
    ItemSlot& mine = shared.slot[slot.at];
    QLoader<32>::load(p, item, shared_address(mine.q), mine.q_scale);
    copy_async_commit();
    if constexpr (!kOneScale) {
      const float scale = logit_scale(p, item.kv_head);
      for (int row = lane; row < kTileRows; row += 32) mine.terms[row] = row_terms(p, item.head_of(min(row, item.num_rows - 1)), scale);
    }
    if (lane == 0) {
      mine.item = item;
      shared.more[slot.at] = true;
    }
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; tile += kStageTiles, stage.next()) {
      const bool loads = sees(key);
      const int pages = __popc(__ballot_sync(kFullWarp, loads)), next_block = block_of(key + kStageKeys);
      const u32 full = shared_address(&shared.full[stage.at]), to = shared_address(shared.stage[stage.at]) + lane * kPageRows * 128;
      mbarrier_wait(shared_address(&shared.empty[stage.at]), stage.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expect(full, pages * kPageRows * 128 * (kKChunks + kVChunks));
      __syncwarp();
      if (loads) {
        const int offset = kBlockSize == 0 ? int(item.first_block) + key : int(u32(key) % u32(kPage));
#pragma unroll
        for (int c = 0; c < kKChunks; ++c) tma_load(to + c * kChunkBytes, k_map, full, l2, c * kChunkDims, offset, item.kv_head, block);
#pragma unroll
        for (int c = 0; c < kVChunks; ++c)
          tma_load(to + (kKChunks + c) * kChunkBytes, v_map, full, l2, c * kChunkDims, offset, item.kv_head, block);
      }
      if (tile == tiles.first) {
        copy_async_wait<0>();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(slot_full);
      }
      key += kStageKeys, block = next_block;
    }
    task = blocks + shuffle(fetched, 0);
  }
}

// --- consumers

// Values outside of [lo, hi) may be anything, and zero times NaN is NaN. Each warp clears what it reads.
DEVICE void clear_values(u32 values, int begin, int lo, int hi) {
  for (int i = lane_id(); i < kTeamKeys * kVChunks * 8; i += 32) {
    const int row = i / 8 % kTeamKeys, chunk = i / (8 * kTeamKeys), key = begin + row;
    if (key < lo || key >= hi) store_shared(values + chunk * kChunkBytes + row * 128 + i % 8 * 16, uint4{0, 0, 0, 0});
  }
  async_proxy_fence();  // before TMA writes there again
}

DEVICE void consume(const AttentionParams& p, SharedStorage& shared, int warp) {
  const int team = warp / kTeamWarps;
  Ring<2> slot;
  Ring<kStages> stage;
  const auto report = [&](u64& barrier) {
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared_address(&barrier));
  };
#pragma unroll 1
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&shared.slot_full[slot.at]), slot.parity);
    if (!shared.more[slot.at]) break;
    const ItemSlot& mine = shared.slot[slot.at];
    const Item& item = mine.item;
    Warp<SwizzledRows> rows(p, item, mine, logit_scale(p, item.kv_head) * kLog2e, warp);
    rows.begin();
    const Tiles tiles = tiles_of(item);
    const int lo = item.lo, hi = item.hi;
#pragma unroll 1
    for (int tile = tiles.first;;) {
      const u32 at = shared_address(shared.stage[stage.at]) + team * kTeamKeys * 128;
      mbarrier_wait(shared_address(&shared.full[stage.at]), stage.parity);
#pragma unroll
      for (int i = 0; i < kStageTiles; ++i) {
        const int begin = (tile + i) * kTileKeys + team * kTeamKeys;
        const u32 here = at + i * kTileKeys * 128;
        if (begin < lo || begin + kTeamKeys > hi) {
          clear_values(here + SwizzledRows::kVBegin, begin, lo, hi);
          __syncwarp();
        }
        rows.step(begin, here);
      }
      tile += kStageTiles;
      if (tile >= tiles.end) break;
      report(shared.empty[stage.at]);
      stage.next();
    }
    team_sync(team);
    put_part(
        rows, team, [&](int t, int row, int d) { return part_at(shared.stage[stage.at], t, row, d); }, shared.state[slot.at]);
    report(shared.parts[slot.at]);
    stage.next();
  }
}

// --- the warp that joins

// The last item of the block is left to all of its threads: nothing else is to be done, and they are faster.
DEVICE void join(const AttentionParams& p, SharedStorage& shared) {
  const int lane = lane_id();
  Ring<2> slot;
  int stage = 0;  // that the next item begins with
  const auto has_item = [&] {
    mbarrier_wait(shared_address(&shared.slot_full[slot.at]), slot.parity);
    return shared.more[slot.at];
  };
  if (!has_item()) return;
  for (;;) {
    const int at = slot.at;
    const u32 parity = slot.parity;
    const Item item = shared.slot[at].item;
    const Tiles tiles = tiles_of(item);
    const int stages = (tiles.end - tiles.first + kStageTiles - 1) / kStageTiles, last = (stage + stages - 1) % kStages;
    slot.next();
    if (!has_item()) {
      if (lane == 0) shared.last_slot = at, shared.last_stage = last;
      return;
    }
    mbarrier_wait(shared_address(&shared.parts[at]), parity);
    join_parts<32>(
        p, item, [&](int t, int row, int d) { return part_at(shared.stage[last], t, row, d); }, shared.state[at]);
    async_proxy_fence();
    __syncwarp();
    if (lane < kConsumers) mbarrier_arrive(shared_address(&shared.empty[last]));
    if (lane == 0) mbarrier_arrive(shared_address(&shared.slot_empty[at]));
    if (item.partial >= 0 && shuffle(lane == 0 ? int(is_last_piece(p, item)) : 0, 0) != 0) join_pieces<32>(p, item);
    stage = last + 1 == kStages ? 0 : last + 1;
  }
}

// By all threads.
DEVICE void join_last_item(const AttentionParams& p, SharedStorage& shared) {
  const Item& item = shared.slot[shared.last_slot].item;
  char* const stage = shared.stage[shared.last_stage];
  join_parts<kThreadsOfAll>(
      p, item, [&](int t, int row, int d) { return part_at(stage, t, row, d); }, shared.state[shared.last_slot]);
  if (item.partial < 0) return;
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last_piece = is_last_piece(p, item);
  __syncthreads();
  if (shared.is_last_piece) join_pieces<kThreadsOfAll>(p, item);
}

extern "C" __global__ void __launch_bounds__(kThreadsOfAll, kBlocks)
    attention_sm90_decode(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap,
                          const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&shared.full[i]), 1);
      mbarrier_init(shared_address(&shared.empty[i]), kConsumers);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(shared_address(&shared.slot_full[i]), 1);
      mbarrier_init(shared_address(&shared.slot_empty[i]), 1);
      mbarrier_init(shared_address(&shared.parts[i]), kConsumers);
    }
    mbarrier_fence_init();
    shared.last_slot = -1;
  }
  __syncthreads();
  griddep_wait();
  if (const int warp = warp_id(); warp < kConsumers) {
    consume(p, shared, warp);
  } else if (warp == kConsumers) {
    produce(p, k_map, v_map, shared);
  } else {
    join(p, shared);
  }
  __syncthreads();
  if (shared.last_slot >= 0) join_last_item(p, shared);
  griddep_launch();
}

}  // namespace imbrex::cuda

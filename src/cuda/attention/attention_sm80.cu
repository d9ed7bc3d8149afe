// Attention with mma.sync and cp.async, for every GPU from sm_80 on: prefill, and decode and verify of few rows; by cuda/plan/plan.cpp.
//
// Prefill multiplies 4 * head_dim operations for each row and key; with 32 rows a warp, an operand from shared memory serves four
// products and the matrix unit sets the pace. Decode reads each key and value once, and memory does: on an H200 35 bytes a nanosecond
// and multiprocessor, of which a key of 128 bf16 dims needs 512. docs/kernels/cuda_sm80.md has the schedule.
#include "async.cuh"
#include "attention_join.cuh"
#include "tile_walk.cuh"

namespace imbrex::cuda {

constexpr int kPartRow = kVDims + 8;  // floats; the 8 spread rows over the banks
constexpr int kPartBytes = kTeams > 1 ? kTileRows* kPartRow * 4 : 0;
constexpr int kTeamBytes = kStages * kStageBytes > kPartBytes ? kStages* kStageBytes : kPartBytes;

struct alignas(16) SharedStorage {
  char q[kQPlanes * kQPlaneBytes];
  ItemSlot slot;
  alignas(16) char team[kTeams][kTeamBytes];  // stages of keys, then values; after the last key the team's part of the output
  float2 state[kTeams][kTileRows];            // with several teams: reference and sum of each row
  int next_task;
  u32 ended;  // ended_merges() of an item
};
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);
extern __shared__ char memory[];

// --- an item, and all of them

// Returns what take_next() does. That is called near the end of the item, and not much earlier: another block might begin the next item
// sooner.
template <class Take>
DEVICE int run_item(const AttentionParams& p, const Item& item, int warp, bool wide, SharedStorage& shared, const Take& take_next) {
  constexpr int kTilesAhead = 3;
  const int team = warp / kTeamWarps;
  const float scale = logit_scale(p, item.kv_head);
  if (threadIdx.x == 0) shared.slot.item = item;
  if constexpr (!kOneScale) {
    for (int row = computed_here(int(threadIdx.x)); row < kTileRows; row += kThreads)
      shared.slot.terms[row] = row_terms(p, item.head_of(min(row, item.num_rows - 1)), scale);
  }
  TileWalk<kMaskMod> tiles(p, item);
  const bool any = !tiles.at_end();
  const auto begin_of = [&](int tile) { return tile * kTileKeys + team * kTeamKeys; };
  const u32 ring = shared_address(shared.team[team]);
  KvLoader loader(p, wide);
  if (any) loader.look_up(item, begin_of(tiles.loaded(0)));
  QLoader<kThreads>::load(p, item, shared_address(shared.q), shared.slot.q_scale);
  copy_async_commit();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (tiles.loads(i)) {
      loader.load(item, begin_of(tiles.loaded(i)), ring + i * kStageBytes);
      tiles.next_load();
      loader.look_up(item, begin_of(tiles.loaded(i + 1)));
    }
    copy_async_commit();
  }
  copy_async_wait<kStages - 1>();
  __syncthreads();
  Warp rows(p, item, shared.slot, shared_address(shared.q), scale * kLog2e, warp);
  rows.begin();

  int stage = 0, free_stage = kStages - 1, next = any ? 0 : take_next();
#pragma unroll 1
  for (; !tiles.at_end(); tiles.next()) {
    if (tiles.comes_to_last(kTilesAhead)) next = take_next();
    if constexpr (kStages > 1) {
      copy_async_wait<(kStages > 1 ? kStages - 2 : 0)>();
      team_sync(team);  // the tile is there for all of the team, and all are done with the one before
    }
    if (tiles.loads(kStages - 1)) {
      loader.load(shared.slot.item, begin_of(tiles.loaded(kStages - 1)), ring + free_stage * kStageBytes);
      tiles.next_load();
      loader.look_up(shared.slot.item, begin_of(tiles.loaded(kStages)));
    }
    copy_async_commit();
    if constexpr (kStages == 1) {
      copy_async_wait<0>();
      team_sync(team);
    }
    rows.step(begin_of(tiles.tile()), ring + stage * kStageBytes, tiles.is_shown());
    if constexpr (kStages == 1) team_sync(team);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    free_stage = free_stage + 1 == kStages ? 0 : free_stage + 1;
  }
  if constexpr (kTeams == 1) {
    rows.store(p, shared.slot.item);
  } else {
    team_sync(team);  // nobody reads the team's values any more
    const auto part = [&](int t, int row, int d) { return reinterpret_cast<float*>(shared.team[t]) + row * kPartRow + d; };
    put_part(rows, team, part, shared.state);
    __syncthreads();
    join_parts<kThreads>(p, shared.slot.item, part, shared.state);
    if (shared.slot.item.partial >= 0) {
      __syncthreads();
      if (warp == 0) {
        const u32 ended = ended_merges(p, shared.slot.item);
        if (lane_id() == 0) shared.ended = ended;
      }
      __syncthreads();
      join_ended<kThreads>(p, shared.slot.item, shared.ended);
    }
  }
  return next;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) attention_sm80(const __grid_constant__ AttentionParams p) {
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (is_idle(p)) return;
  if (!p.beside) griddep_wait();
  const int tasks = num_tasks(p), warp = warp_id();
  if (tasks == 0) return;
  const bool wide = is_wide(p);
  // Blocks begin with the task of their own number.
  const auto take_next = [&] { return threadIdx.x == 0 ? take_number(p, int(gridDim.x), tasks) : 0; };
  for (int task = int(blockIdx.x);;) {
    bool runs = false;
    int next;
    if (task < tasks) {
      const Item item = item_of(p, task);
      runs = item.num_rows > 0;
      if (runs) next = run_item(p, item, warp, wide, shared, take_next);
    }
    if (!runs) next = take_next();
    if (threadIdx.x == 0) shared.next_task = next;
    __syncthreads();  // it is read before the next item's own barrier, and written after that
    task = shared.next_task;
    if (task >= tasks) break;
  }
  griddep_launch();
  end_launch(p);
}

}  // namespace imbrex::cuda

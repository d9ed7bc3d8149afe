#pragma once
// The shared memory of attention_sm90_decode.cu, and the warp that fills it.
#include "attention_products.cuh"
#include "attention_sm90_stream.cuh"
#include "tile_walk.cuh"

namespace imbrex::cuda {

constexpr int kConsumers = kTeams * kRowWarps, kCrewWarps = kConsumers + 2;  // warps; the other two load, and merge pieces
constexpr int kCrewThreads = 32 * kCrewWarps, kThreadsOfAll = kCrews * kCrewThreads;
constexpr int kWeightRow = row_bytes(kTileKeys / 8), kWeightBytes = kTileRows * kWeightRow;  // of weights in shared memory
// A warp's dims of the output: as many as one fragment of values has, times a power of two.
constexpr int kTeamDims = larger(16 * kLoadSteps, power_of_two_from((kHeadDimV + kTeams - 1) / kTeams)), kTeamDimTiles = kTeamDims / 8;
static_assert(kDirect && kDimWarps == 1 && kRowTiles == 1 && kTeams == 4);
// Whether an item's queries are loaded to registers when it begins. Then one slot in shared memory is enough: the next item's queries are
// loaded to it while this item is computed.
constexpr bool kQKept = kRowWarps == 1 || kQRegisters + 12 * kTeamDimTiles <= 96;

// Rows of keys or values in the layout in which attention_sm90_stream.cuh writes them.
template <int width>
struct StreamedRows {
  static constexpr int kKRow = width, kVRow = width;
  DEVICE static u32 lane(int row, int piece, int) { return place_of_piece<width>(row, piece); }
  DEVICE static u32 at(u32 lane, int pair) {
    if constexpr (width == 128) return (lane ^ pair % 4 * 32) + pair / 4 * kChunkBytes;
    if constexpr (width == 64) return lane ^ pair * 32;
    return lane + pair * 32;
  }
};
using KRows = StreamedRows<kKWidth>;
using VRows = StreamedRows<kVWidth>;

struct SharedStorage {  // of a crew
  static constexpr int kQSlots = kQKept ? 1 : 2;
  static constexpr int kItemSlots = 4;  // the warp that joins may be some items behind
  alignas(1024) char k[kStages][kKChunks * kBytesOf<kKWidth>];
  alignas(1024) char v[kStages][kVChunks * kBytesOf<kVWidth>];
  alignas(16) char q[kQSlots][kQPlaneBytes];
  alignas(16) char weights[2][kWeightBytes];  // of a tile and of the one before
  float4 tops[2][kTileRows];                  // likewise: of each row, the maxima that the four warps have found
  float4 sums[2][kTileRows];                  // of the weights of a piece, after its last tile
  ItemSlot slot[kItemSlots];                  // of items that are computed or joined, and of those to come
  u64 k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  u64 q_empty[kQSlots], slot_full[kItemSlots], slot_empty[kItemSlots], stored[kItemSlots];
  bool more[kItemSlots];  // false: no item, and none will come
  int last_slot;          // of the crew's last item; -1: it had none
  u32 ended;              // ended_merges() of that item
};
extern "C" __device__ const unsigned smem_bytes = kCrews * sizeof(SharedStorage);

// --- producer: a warp

DEVICE void bring_queries(const AttentionParams& p, const Item& item, SharedStorage& shared, int q, int slot) {
  ItemSlot& mine = shared.slot[slot];
  QLoader<32>::load(p, item, shared_address(shared.q[q]), mine.q_scale);
  if constexpr (!kOneScale) {
    const float scale = logit_scale(p, item.kv_head);
    for (int row = lane_id(); row < kTileRows; row += 32) mine.terms[row] = row_terms(p, item.head_of(min(row, item.num_rows - 1)), scale);
  }
}

// A task that is found before its turn. That takes four loads, each of which needs the one before, and would delay those of keys otherwise.
struct Task {
  int number;
  Item item;
  Box first;  // of its first tile
};
DEVICE Task task_of(const AttentionParams& p, int number, int tasks) {
  Task task{number, {}, {}};
  if (number < tasks) {
    task.item = item_of(p, number);
    task.first = box_of(p, task.item, TileStream<kMaskMod>(p, task.item).tile());
  }
  return task;
}

// Arrivals at a slot's barrier: each lane arrives when its copies of queries are complete, and once for what it has written itself.
constexpr int kSlotArrivals = 64;

DEVICE void produce(const AttentionParams& p, const TensorMap& k_map, const TensorMap& v_map, int crew, SharedStorage& shared) {
  const int crews = kCrews * int(gridDim.x), first = first_task(crew);
  prefetch_item(p, first);  // while the number of tasks is on its way
  const int lane = lane_id(), tasks = num_tasks(p);
  const u64 l2 = l2_first_out();  // nobody else reads these keys
  Ring<SharedStorage::kQSlots> q;
  Ring<SharedStorage::kItemSlots> slot;
  Ring<kStages> k, v;
  for (Task task = task_of(p, first, tasks);; slot.next(), q.next()) {
    const u32 slot_full = shared_address(&shared.slot_full[slot.at]);
    mbarrier_wait(shared_address(&shared.slot_empty[slot.at]), slot.parity ^ 1);
    if (task.number >= tasks) {
      if (lane == 0 && task.number == first) take_number(p, crews, tasks);
      if (lane == 0) shared.more[slot.at] = false;
      mbarrier_arrive(slot_full);
      mbarrier_arrive(slot_full);
      break;
    }
    const Item item = task.item;
    TileStream<kMaskMod> tiles(p, item);
    // The number of the next task is taken not much earlier than needed, since another crew might begin it sooner. It is looked up behind a
    // tile after which there is time: the ring is full.
    const int takes = max(tiles.first(), tiles.end() - kStages - 2), looks_up = min(takes + kStages, tiles.end()) - 1;
    int number = 0;
    Box box = task.first, before{};
    mbarrier_wait(shared_address(&shared.q_empty[q.at]), q.parity ^ 1);
    bring_queries(p, item, shared, q.at, slot.at);
    if (lane == 0) {
      shared.slot[slot.at].item = item;
      shared.more[slot.at] = true;
    }
    mbarrier_arrive_after_copies(slot_full);
    mbarrier_arrive(slot_full);
    const auto load_values = [&] {
      const u32 to = shared_address(shared.v[v.at]), full = shared_address(&shared.v_full[v.at]);
      mbarrier_wait(shared_address(&shared.v_empty[v.at]), v.parity ^ 1);
      load_tile<kHeadDimV, kVChunks, kVWidth>(p, p.v, v_map, item, before, to, full, l2);
      v.next();
    };
    // Values are loaded a tile behind the keys, as they are needed.
#pragma unroll 1
    for (; tiles.count() < tiles.end(); tiles.next(), k.next()) {
      const u32 to = shared_address(shared.k[k.at]), full = shared_address(&shared.k_full[k.at]);
      const Box next = box_of(p, item, tiles.next_tile());
      mbarrier_wait(shared_address(&shared.k_empty[k.at]), k.parity ^ 1);
      load_tile<kHeadDimQk, kKChunks, kKWidth>(p, p.k, k_map, item, box, to, full, l2);
      if (tiles.count() > tiles.first()) load_values();
      before = box, box = next;
      if (tiles.count() == takes && lane == 0) number = take_number(p, crews, tasks);
      if (tiles.count() == looks_up) task = task_of(p, shuffle(number, 0), tasks);
    }
    load_values();
  }
}

}  // namespace imbrex::cuda

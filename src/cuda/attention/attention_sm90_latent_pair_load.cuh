#pragma once
// The shared memory of attention_sm90_latent_pair.cu, and the warps that fill it: one finds items, another one brings their queries, then
// their keys.
#include "attention_sm90_latent_parts.cuh"
#include "attention_sm90_stream.cuh"
#include "each_item.cuh"
#include "find_items_together.cuh"

namespace imbrex::cuda {

static_assert(kValuesInKeys && kKvType == kQType && kTileRows == kTeamRows && kKeyWarps == 0 && kCrews == 1 && !(kMaps && kSmallPages));
static_assert(kPlainLogits && !kWindow && !kCustomMask && !kPositions && kRowBlocks == 1);

// The two thread blocks of a cluster take rows together. Their keys come in steps of two tiles: each block makes the weights of one tile,
// and has a half of the output's dims.
constexpr int kBlocksTogether = 2, kStepKeys = kBlocksTogether * kTileKeys;
constexpr int kHalfDims = kHeadDimV / kBlocksTogether, kHalfChunks = kHalfDims / 64;
constexpr bool kHasRope = kHeadDimQk > kHeadDimV;
static_assert(kHalfDims % 64 == 0 && kHeadDimQk <= kHeadDimV + 64);

struct Half {  // which a thread block has
  int rank;    // in its cluster
  DEVICE Half() : rank(shuffle(int(cluster_rank()), 0)) {}
  DEVICE int other() const { return 1 - rank; }
  DEVICE int first_dim() const { return rank * kHalfDims; }
};

struct Steps {
  int first, end;  // of kStepKeys keys, that some row of the item sees
};
DEVICE Steps steps_of(const Item& item) {
  const int first = item.lo / kStepKeys;
  return {first, max(first + 1, (item.hi + kStepKeys - 1) / kStepKeys)};
}
DEVICE int steps_of_piece(const Item& item) { return item.piece > 0 ? item.piece / kStepKeys : kFar; }

// Warpgroups: kConsumers multiply values, each for its chunks of 64 dims; one computes scores and weights; one loads.
constexpr int kThreads = 128 * (kConsumers + 2);
constexpr int kTeamChunks = (kHalfChunks + kConsumers - 1) / kConsumers, kTeamDims = 64 * kTeamChunks;

// A stage has what a block reads of a step: of its own tile the half of the dims that it has values of; of each tile the other half, which
// the tile's block needs for scores, and the other block for values; and what is behind the values.
constexpr int kHalfBytes = kHalfChunks * kChunkBytes;
struct Stage {
  char own[kHalfBytes], crossed[kBlocksTogether][kHalfBytes], rope[kChunkBytes];
};
// Or it has queries, in chunks of 64 dims, in the order in which scores are summed: so many chunks, in so many stages.
constexpr int kQChunks = 2 * kHalfChunks + kHasRope;
constexpr int kQEach = int(sizeof(Stage)) / kQChunkBytes, kQStages = (kQChunks + kQEach - 1) / kQEach;
static_assert(sizeof(Stage) % 1024 == 0);
// Chunks of queries that are in registers while an item is computed. The others stay in shared memory.
constexpr int kQKept = latent_kept_chunks(kQChunks), kQLeft = kQChunks - kQKept;

// Weights and what belongs to them have as many slots as there are stages, and need no barrier that says when they are free: the stage of
// the step that uses a slot next was only loaded when the values of the step before it had been multiplied; and in the other block too,
// because that one tells its maxima of the same step.
struct SharedStorage {
  static constexpr int kItemSlots = 3;  // of the item that is multiplied, of the one that is scored, and of the one that is loaded
  alignas(1024) Stage stage[kStages];
  alignas(1024) char q[kQLeft][kQChunkBytes];
  alignas(1024) char weights[kStages][kBlocksTogether][kWeightBytes];  // a slot: of the tile of each block
  float2 tops[kStages][kScoreWarps][8];                                // the other block's maxima of rows
  float2 sums[kStages][kScoreWarps][8];                                // of the last step of a piece: the other block's sums of weights
  float2 end[kStages][kTileRows];                                      // and references, with this block's sums
  float factor[kStages][kTileRows];  // that sums so far are to be multiplied by, in warps whose note says so
  u32 note[kStages][kScoreWarps];    // of each warp of rows
  Item item[kItemSlots];             // none: kNoItem rows, and none will come
  ClusterNumbers numbers;
  u64 full[kStages], empty[kStages], weights_made[kStages], weights_full[kStages], tops_full[kStages][kScoreWarps];
  u64 item_full[kItemSlots], item_empty[kItemSlots], item_wanted;
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

// How often each lane that loads reports a stage: once for each of its parts, unless TMA brings them.
constexpr int kReports = kLoaders > 1 ? 3 + kHasRope : 1;

DEVICE void begin_barriers(SharedStorage& shared) {
  const auto begin = [](u64& barrier, int arrivals) { mbarrier_init(shared_address(&barrier), u32(arrivals)); };
  for (u64& full : shared.full) begin(full, kLoaders * kReports);
  for (u64& empty : shared.empty) begin(empty, kScoreWarps + kBlocksTogether * kOutputWarps + 1);
  for (u64& made : shared.weights_made) begin(made, kScoreWarps);
  for (u64& full : shared.weights_full) begin(full, kScoreWarps);
  for (auto& stage : shared.tops_full)
    for (u64& full : stage) begin(full, 1);
  for (u64& full : shared.item_full) begin(full, 1);
  for (u64& empty : shared.item_empty) begin(empty, kScoreWarps + kOutputWarps + 3);
  begin(shared.item_wanted, 1);
  shared.numbers.begin();
  mbarrier_fence_init();
}

// Loads a stage of an item's queries: chunks from `first` on, in the order in which scores are summed.
DEVICE void load_queries(const AttentionParams& p, const Half& half, const TensorMap& q_map, const Item& item, int first, u32 to,
                         u32 full) {
  const auto chunk_of = [&](int i) {
    return i < kHalfChunks ? half.other() * kHalfChunks + i : i < 2 * kHalfChunks ? (half.rank - 1) * kHalfChunks + i : i;
  };
  const int end = min(first + kQEach, kQChunks);
  if constexpr (kMaps) {
    constexpr int kHeads = kGroup < kTileRows ? kGroup : kTileRows, kTokens = kTileRows / kHeads;  // of a box
    const int head = shuffle(item.head_of(0), 0), token = shuffle(item.token_of(0), 0);
    if (!elect_one()) return;
    mbarrier_arrive_expect(full, u32(end - first) * (kTokens * kHeads * 128));
    for (int i = first; i < end; ++i) tma_load(to + (i - first) * kQChunkBytes, q_map, full, l2_first_out(), chunk_of(i) * 64, head, token);
  } else {
    for (int i = first; i < end; ++i) {
      const int chunk = chunk_of(i);
      copy_queries(p, item, chunk * 8, chunk * 8 + 8, kQChunkBytes, to + (i - first) * kQChunkBytes);
    }
    for (int i = 0; i < kReports; ++i) mbarrier_arrive(full);
  }
}

// Loads a step to a stage. Of its own tile a block brings to both what both read; but each all that it reads, where no map describes it.
DEVICE void load_step(const AttentionParams& p, const Half& half, const TensorMap& k_map, const Item& item, int step, const Box& box,
                      Stage& stage, u32 full) {
  const u64 l2 = l2_first_out();
  const u32 own = shared_address(stage.own), mine = shared_address(stage.crossed[half.rank]),
            theirs = shared_address(stage.crossed[half.other()]), rope = shared_address(stage.rope);
  const int first = half.first_dim(), others_first = half.other() * kHalfDims;
  const int begin = (kBlocksTogether * step + half.rank) * kTileKeys, others_begin = (kBlocksTogether * step + half.other()) * kTileKeys;
  if constexpr (kMaps) {
    const int key = others_begin + lane_id() * kPageRows;
    const bool comes = lane_id() < kPages && key < item.hi && key + kPageRows > item.lo;  // from the other block
    const int boxes = __popc(__ballot_sync(kFullWarp, box.loads)), others = __popc(__ballot_sync(kFullWarp, comes));
    if (lane_id() == 0)
      mbarrier_arrive_expect(
          full, u32(boxes * kPageRows * 128) * u32(2 * kHalfChunks + kHasRope) + u32(others * kPageRows * 128) * u32(kHalfChunks));
    __syncwarp();
    const int head = shuffle(item.kv_head, 0);
    const auto load = [=, &k_map](u32 place, int row, int block) {
#pragma unroll
      for (int c = 0; c < kHalfChunks; ++c)
        tma_load_to_all(mine + place + c * kChunkBytes, k_map, full, l2, kBlocksTogether, others_first + c * 64, row, head, block);
#pragma unroll
      for (int c = 0; c < kHalfChunks; ++c) tma_load(own + place + c * kChunkBytes, k_map, full, l2, first + c * 64, row, head, block);
      if constexpr (kHasRope) tma_load(rope + place, k_map, full, l2, kHeadDimV, row, head, block);
    };
    if constexpr (kPages == 1) {  // what is the same in all lanes needs no loop over them
      const int row = shuffle(first_row(item, box), 0), block = shuffle(box.block, 0);
      if (boxes > 0 && elect_one()) load(0, row, block);
    } else {
      if (box.loads) load(lane_id() * (kPageRows * 128), first_row(item, box), box.block);
    }
  } else {
    const auto from = [&](int dim) {
      KvSide side = p.k;
      side.data += dim * p.k.dim_stride;
      return side;
    };
    load_elements<kHalfDims, kHalfChunks, 128>(p, from(others_first), item, begin, mine, full);
    load_elements<kHalfDims, kHalfChunks, 128>(p, from(first), item, others_begin, theirs, full);
    load_elements<kHalfDims, kHalfChunks, 128>(p, from(first), item, begin, own, full);
    if constexpr (kHasRope) load_elements<kHeadDimQk - kHeadDimV, 1, 128>(p, from(kHeadDimV), item, begin, rope, full);
  }
}

DEVICE void produce_stages(const AttentionParams& p, const Half& half, const TensorMap& q_map, const TensorMap& k_map,
                           SharedStorage& shared) {
  Ring<kStages> stage;
  const auto begin_stage = [&] {
    mbarrier_wait(shared_address(&shared.empty[stage.at]), stage.parity ^ 1);
    __syncwarp();  // what lane 0 expects may be nothing, and then the phase that lanes wait for is soon over
  };
  const auto full = [&] { return shared_address(&shared.full[stage.at]); };
  each_item(shared, [&](const Item& item) {
    const Steps steps = steps_of(item);
    const auto box_of_step = [&](int step) { return box_of(p, item, kBlocksTogether * step + half.rank); };
    Box box = box_of_step(steps.first), next = box_of_step(steps.first + 1);  // block ids are on their way while queries are loaded
#pragma unroll 1
    for (int chunk = 0; chunk < kQChunks; chunk += kQEach, stage.next()) {
      begin_stage();
      load_queries(p, half, q_map, item, chunk, shared_address(&shared.stage[stage.at]), full());
    }
#pragma unroll 1
    for (int step = steps.first; step < steps.end; ++step, stage.next()) {
      if (wants_next({steps.first, steps.end}, step)) report(shared.item_wanted);
      begin_stage();
      load_step(p, half, k_map, item, step, box, shared.stage[stage.at], full());
      box = next, next = box_of_step(step + 2);
    }
  });
}

// As fetch_ahead() does, a block's own tile of the first step of the cluster's first item. With more of them batches take longer. An id
// that is not valid yet is no address: the map knows where the cache ends.
DEVICE void fetch_first_step(const AttentionParams& p, const Half& half, const TensorMap& k_map) {
  const int task = int(blockIdx.x) / kBlocksTogether;
  if (!kMaps || !p.keys_are_there || task >= num_tasks(p)) return;
  const Item item = item_of(p, task);
  const int tile = kBlocksTogether * steps_of(item).first + half.rank;
  const Box box = whole_box(p, item, tile, [](const int* id) { return load_l2(id); });
  if (!box.loads) return;
#pragma unroll
  for (int c = 0; c < kKChunks; ++c)
    tma_prefetch(k_map, l2_first_out(), c * kDimsOf<kKWidth>, first_row(item, box), item.kv_head, box.block);
}

// Brings keys to L2, so many steps ahead of those that are there: too few stages fit for all that memory could have under way.
constexpr int kStepsAhead = 3;
DEVICE void fetch_steps(const AttentionParams& p, const Half& half, SharedStorage& shared) {
  Ring<kStages> stage;
  each_item(shared, [&](const Item& item) {
    const Steps steps = steps_of(item);
    const auto wait = [&] {
      mbarrier_wait(shared_address(&shared.full[stage.at]), stage.parity);
      report(shared.empty[stage.at]);
      stage.next();
    };
    const auto fetch = [&](int step) {
      if constexpr (kMaps && kBlockSize > 0) {
        const Box box = box_of(p, item, kBlocksTogether * step + half.rank);
        if (!box.loads) return;
        const char* const first = p.k.data + item.kv_head * p.k.head_stride + offset_in_block(p.k, box.block, box.key);
        bulk_prefetch(first, u32((kPageRows - 1) * p.k.token_stride) + kHeadDimQk * 2);
      }
    };
#pragma unroll 1
    for (int step = steps.first; step < steps.first + kStepsAhead; ++step) fetch(step);
#pragma unroll
    for (int i = 0; i < kQStages; ++i) wait();
#pragma unroll 1
    for (int step = steps.first; step < steps.end; ++step) {
      fetch(step + kStepsAhead);
      wait();
    }
  });
}

// Copies the weights that this block makes to the other one.
DEVICE void hand_over_weights(const Half& half, SharedStorage& shared) {
  Ring<kStages> slot;
  each_item(shared, [&](const Item& item) {
    const Steps steps = steps_of(item);
#pragma unroll 1
    for (int step = steps.first; step < steps.end; ++step, slot.next()) {
      mbarrier_wait(shared_address(&shared.weights_made[slot.at]), slot.parity);
      if (elect_one()) {
        const u32 weights = shared_address(shared.weights[slot.at][half.rank]), full = shared_address(&shared.weights_full[slot.at]);
        bulk_hand_over(block_address(weights, u32(half.other())), weights, kWeightBytes, block_address(full, u32(half.other())));
      }
      __syncwarp();
    }
  });
}

}  // namespace imbrex::cuda

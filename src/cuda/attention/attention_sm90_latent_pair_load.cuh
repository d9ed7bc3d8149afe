#pragma once
// The shared memory of attention_sm90_latent_pair.cu, and the warps that fill it: one finds items, another one brings their queries, then
// their keys, through one ring of stages.
#include "attention_sm90_parts.cuh"
#include "attention_sm90_stream.cuh"
#include "each_item.cuh"

namespace imbrex::cuda {

static_assert(kValuesInKeys && kKvType == kQType && kTileRows == kTeamRows && kRowBlocks == 1 && kTileKeys == 64 && kKeyWarps == 0);
static_assert(kCrews == 1 && kPlainLogits && !kWindow && !kCustomMask && !kPositions && !(kMaps && kSmallPages));

// The two thread blocks of a cluster take rows together: each has a half of the dims that scores are summed over, and of the output. Of the
// dims that keys have behind their values, the first one has so many, and the other one what is left.
constexpr int kHalves = 2;
constexpr int kHalfDims = kHeadDimV / kHalves, kHalfChunks = kHalfDims / 64, kRopeDims = 32, kRope = kHeadDimQk - kHeadDimV;
constexpr bool kHasRope = kRope > 0;
static_assert(kHalfDims % 64 == 0 && (!kHasRope || (kRope > kRopeDims && kRope <= kHalves * kRopeDims)));

struct Half {  // which a thread block has
  int rank;    // in its cluster
  DEVICE Half() : rank(int(cluster_rank())) {}
  DEVICE u32 other() const { return u32(1 - rank); }
  DEVICE int first_dim() const { return rank * kHalfDims; }
  DEVICE int first_rope_dim() const { return kHeadDimV + rank * kRopeDims; }
};

// Warpgroups: kConsumers make weights, each of its keys, and multiply values, each for its chunks of 64 dims; one multiplies scores; one
// loads.
constexpr int kThreads = 128 * (kConsumers + 2);
constexpr int kScoreWarps = 4, kOutputWarps = 4 * kConsumers;
constexpr int kTeamChunks = (kHalfChunks + kConsumers - 1) / kConsumers, kTeamDims = 64 * kTeamChunks;

// A stage has a half of a tile's keys: chunks of 64 dims in lines of 128 bytes, then dims behind the values in lines of 64 bytes. Or it has
// a half of an item's queries, in chunks of 32 dims, lines of 64 bytes.
constexpr int kRopeBytes = kTileKeys * 64, kStageBytes = kHalfChunks * kChunkBytes + (kHasRope ? kRopeBytes : 0);
constexpr int kQChunkBytes = kTileRows * 64, kHalfQChunks = kHalfDims / 32, kQChunks = kHalfQChunks + kHasRope;
static_assert(kQChunks * kQChunkBytes <= kStageBytes);
// Chunks of queries that are in registers while an item is computed. The others stay in shared memory.
constexpr int kQLeft = kLatentPairLeftChunks, kQKept = kHalfQChunks - kQLeft + 1;
constexpr int kTeamKeys = kTileKeys / kConsumers;
constexpr int kWeightSlots = kLatentPairWeightSlots, kWeightBytes = kTileRows * 128;

struct SharedStorage {
  static constexpr int kItemSlots = 3;  // of the item that is multiplied, of the one that is scored, and of the one that is loaded
  static constexpr int kScoreSlots = 2;
  alignas(1024) char stage[kStages][kStageBytes];
  alignas(1024) char weights[kWeightSlots][kWeightBytes];
  alignas(1024) char q[kQLeft][kQChunkBytes];
  float4 sums[kScoreWarps][kTileKeys / 8][32];                 // of scores over this half of the dims
  float4 others[kScoreSlots][kScoreWarps][kTileKeys / 8][32];  // and over the other one
  float of_teams[kConsumers][kTileRows];                       // what each team has of a row
  Item item[kItemSlots];                                       // none: kNoItem rows, and none will come
  int told[kItemSlots];                                        // numbers of tasks, from the cluster's first block
  u64 full[kStages], empty[kStages], scores_full[kScoreSlots][kScoreWarps], sums_empty, sent_empty[kScoreSlots];
  u64 item_full[kItemSlots], item_empty[kItemSlots], told_full[kItemSlots], told_empty[kItemSlots];
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

// How often each lane that loads reports a stage: once for each of its two kinds of chunks, unless TMA brings both.
constexpr int kReports = kLoaders > 1 && kHasRope ? 2 : 1;

DEVICE void begin_barriers(SharedStorage& shared) {
  const auto begin = [](u64& barrier, int arrivals) { mbarrier_init(shared_address(&barrier), u32(arrivals)); };
  for (u64& full : shared.full) begin(full, kLoaders * kReports);
  for (u64& empty : shared.empty) begin(empty, kScoreWarps + kOutputWarps);
  begin(shared.sums_empty, kOutputWarps);
  for (u64& empty : shared.sent_empty) begin(empty, kOutputWarps);
  for (auto& slot : shared.scores_full)
    for (u64& full : slot) begin(full, 1);
  for (u64& full : shared.item_full) begin(full, 1);
  for (u64& empty : shared.item_empty) begin(empty, kScoreWarps + kOutputWarps + 1);
  for (u64& full : shared.told_full) begin(full, 1);
  for (u64& empty : shared.told_empty) begin(empty, 1);
  mbarrier_fence_init();
}

// Finds the items of both blocks, as find_items() does for a block alone: the first one takes their numbers, and tells the other one.
DEVICE void find_items_together(const AttentionParams& p, const Half& half, SharedStorage& shared) {
  const int clusters = int(gridDim.x) / kHalves, first = int(blockIdx.x) / kHalves, lane = lane_id(), tasks = num_tasks(p),
            last = max(tasks - clusters, 0) + clusters - 1;
  prefetch_item(p, first);
  Ring<SharedStorage::kItemSlots> slot, told;
  const auto take_number = [&] {
    int number = 0;
    if (half.rank == 0) {
      mbarrier_wait(shared_address(&shared.told_empty[told.at]), told.parity ^ 1);
      if (lane == 0) {
        const int taken = atomicAdd(p.next_task, 1);
        if (taken == last) *p.next_task = 0;
        number = clusters + taken;
        hand_over(shared_address(&shared.told[told.at]), number, shared_address(&shared.told_full[told.at]), 1);
      }
      number = shuffle(number, 0);
    } else {
      const u32 full = shared_address(&shared.told_full[told.at]);
      if (lane == 0) mbarrier_arrive_expect(full, sizeof shared.told[0]);
      __syncwarp();
      mbarrier_wait(full, told.parity);
      number = *static_cast<volatile int*>(&shared.told[told.at]);
      __syncwarp();
      if (lane == 0) mbarrier_arrive_at<true>(shared_address(&shared.told_empty[told.at]), 0);
    }
    told.next();
    return number;
  };
  for (int number = first < tasks ? first : take_number();; number = take_number(), slot.next()) {
    mbarrier_wait(shared_address(&shared.item_empty[slot.at]), slot.parity ^ 1);
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
  }
}

// Loads the block's half of an item's queries to a stage.
DEVICE void load_queries(const AttentionParams& p, const Half& half, const TensorMap& q_map, const Item& item, u32 to, u32 full) {
  const int lane = lane_id();
  const auto first_dim_of_chunk = [&](int chunk) { return chunk < kHalfQChunks ? half.first_dim() + chunk * 32 : half.first_rope_dim(); };
  if constexpr (kMaps) {
    constexpr int kHeads = kGroup < kTileRows ? kGroup : kTileRows, kTokens = kTileRows / kHeads;  // of a box
    if (lane != 0) return;
    mbarrier_arrive_expect(full, u32(kQChunks) * (kTokens * kHeads * 64));
    for (int c = 0; c < kQChunks; ++c)
      tma_load(to + c * kQChunkBytes, q_map, full, l2_first_out(), first_dim_of_chunk(c), item.head_of(0), item.token_of(0));
  } else {
#pragma unroll 1
    for (int i = lane; i < item.num_rows * kQChunks * 4; i += 32) {
      const int row = i / 4 / kQChunks, chunk = i / 4 % kQChunks, piece = i % 4, dim = first_dim_of_chunk(chunk) + piece * 8;
      Eight<kQType> e = {};
      if (dim < kHeadDimQk)
        e = load_eight<kQType, false>(p.q + item.token_of(row) * p.q_token_stride + item.head_of(row) * p.q_head_stride + dim * 2, 2);
      store_shared(to + chunk * kQChunkBytes + place_of_piece<64>(row, piece), uint4{e.words[0], e.words[1], e.words[2], e.words[3]});
    }
    for (int i = 0; i < kReports; ++i) mbarrier_arrive(full);
  }
}

// Loads the block's half of a tile's keys to a stage.
DEVICE void load_keys(const AttentionParams& p, const Half& half, const TensorMap& k_map, const TensorMap& rope_map, const Item& item,
                      const Box& box, u32 to, u32 full) {
  const int lane = lane_id(), begin = box.key - lane * kPageRows;
  const u32 rope_to = to + kHalfChunks * kChunkBytes;
  if constexpr (kMaps) {
    const int boxes = __popc(__ballot_sync(kFullWarp, box.loads));
    if (lane == 0) mbarrier_arrive_expect(full, u32(boxes * kPageRows) * u32(kHalfChunks * 128 + (kHasRope ? 64 : 0)));
    __syncwarp();
    if (!box.loads) return;
    const auto load = [&](u32 to, const TensorMap& map, int dim) {
      tma_load(to, map, full, l2_first_out(), dim, first_row(item, box), item.kv_head, box.block);
    };
#pragma unroll
    for (int c = 0; c < kHalfChunks; ++c) load(to + c * kChunkBytes + lane * (kPageRows * 128), k_map, half.first_dim() + c * 64);
    if constexpr (kHasRope) load(rope_to + lane * (kPageRows * 64), rope_map, half.first_rope_dim());
  } else {
    KvSide values = p.k, rope = p.k;
    values.data += half.first_dim() * p.k.dim_stride, rope.data += half.first_rope_dim() * p.k.dim_stride;
    load_elements<kHalfDims, kHalfChunks, 128>(p, values, item, begin, to, full);
    if constexpr (kHasRope) {
      if (half.rank == 0) {
        load_elements<kRopeDims, 1, 64>(p, rope, item, begin, rope_to, full);
      } else {
        load_elements<kRope - kRopeDims, 1, 64>(p, rope, item, begin, rope_to, full);
      }
    }
  }
}

DEVICE void produce_stages(const AttentionParams& p, const Half& half, const TensorMap& q_map, const TensorMap& k_map,
                           const TensorMap& rope_map, SharedStorage& shared) {
  Ring<kStages> stage;
  const auto begin_stage = [&] { mbarrier_wait(shared_address(&shared.empty[stage.at]), stage.parity ^ 1); };
  const auto address = [&] { return shared_address(shared.stage[stage.at]); };
  const auto full = [&] { return shared_address(&shared.full[stage.at]); };
  each_item(shared, [&](const Item& item) {
    const Tiles tiles = tiles_of(item);
    Box box = box_of(p, item, tiles.first);
    begin_stage();
    load_queries(p, half, q_map, item, address(), full());
    stage.next();
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile, stage.next()) {
      const Box next = box_of(p, item, tile + 1);
      begin_stage();
      load_keys(p, half, k_map, rope_map, item, box, address(), full());
      box = next;
    }
  });
}

}  // namespace imbrex::cuda

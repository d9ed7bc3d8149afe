#pragma once
// The shared memory of attention_sm90_latent_spread.cu, and what is its own of how the warps that attention_sm90_latent_steps.cuh names
// fill it.
#include "attention_sm90_latent_parts.cuh"
#include "attention_sm90_latent_steps.cuh"
#include "find_items_together.cuh"

namespace imbrex::cuda {

// kPaired: items are those of attention_sm90_latent_pair.cu, whose references move for two tiles together.
static_assert(!kPaired || (kTilesEach == 2 && kHeadDimV / 2 % kOwnDims == 0));
static_assert(kTileRows == kTeamRows && kPairBytes == kQChunkBytes, "queries come as keys do");

// What a warp makes of eight of its rows, and all blocks get: weights, in parts of 16 keys, each of 32 bytes of a row with a swizzle of
// that width; then what lanes have of all of the warp's rows as sums of one of the block's two tiles.
constexpr int kParts = kTilesEach * kTileKeys / 16, kPartBytes = 8 * kWeightRow;
struct alignas(256) Handed {
  char weights[kParts][kPartBytes];
  float2 totals[32];
};
static_assert(kTileRows == 16 * kScoreWarps && kTilesEach == 2);

struct SharedStorage {
  static constexpr int kItemSlots = 3, kSteps = 2;  // steps that are scored while others are multiplied
  alignas(1024) char stage[kStages][kStageBytes];
  alignas(1024) char values[kValueStages][kValueStageBytes];
  Handed handed[kSteps][kBlocksTogether][kTileRows / 8];
  float2 tops[kSteps][kScoreWarps][kStepTiles][8];  // maxima of rows r and r + 8 in a tile
  float factor[kSteps][kStepTiles][kTileRows];      // that sums so far are to be multiplied by, where `moved` says so
  float reference[kSteps][kTileRows];               // at the end of a step
  u32 moved[kSteps][kScoreWarps];                   // a bit for each tile that moved a reference of the warp's rows
  Item item[kItemSlots];                            // none: kNoItem rows, and none will come
  ClusterNumbers numbers;
  u64 full[kStages], empty[kStages], values_full[kValueStages], values_empty[kValueStages];
  u64 handed_full[kSteps][kBlocksTogether], handed_free[kSteps];  // handed_free: what this block makes may go to all
  u64 tops_full[kSteps][kScoreWarps], noted[kSteps], notes_read[kSteps], item_full[kItemSlots], item_empty[kItemSlots], item_wanted;
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

DEVICE void begin_barriers(int rank, SharedStorage& shared) {
  const auto begin = [](u64& barrier, int arrivals) { mbarrier_init(shared_address(&barrier), u32(arrivals)); };
  for (u64& full : shared.full) begin(full, kLoaders * kReports);
  for (u64& empty : shared.empty) begin(empty, kScoreWarps);
  for (u64& full : shared.values_full) begin(full, kLoaders * kReports);
  for (u64& empty : shared.values_empty) begin(empty, kValueWarps);
  for (auto& of_step : shared.handed_full)
    for (int block = 0; block < kBlocksTogether; ++block) begin(of_step[block], block == rank ? kScoreWarps : 1);
  for (u64& free : shared.handed_free) begin(free, kBlocksTogether * kValueWarps);
  for (auto& of_step : shared.tops_full)
    for (u64& full : of_step) begin(full, 1);
  for (u64& noted : shared.noted) begin(noted, kScoreWarps);
  for (u64& read : shared.notes_read) begin(read, kValueWarps);
  begin(shared.item_wanted, 1);
  for (u64& full : shared.item_full) begin(full, 1);
  for (u64& empty : shared.item_empty) begin(empty, kScoreWarps + kValueWarps + 2);
  shared.numbers.begin(kBlocksTogether - 1);
  mbarrier_fence_init();
}

DEVICE void load_queries(const TensorMap& q_map, const Item& item, int stage, u32 to, u32 full) {
  constexpr int kHeads = kGroup < kTileRows ? kGroup : kTileRows, kTokens = kTileRows / kHeads;  // of a box
  const int head = item.head_of(0), token = item.token_of(0);
  if constexpr (kLoaders > 1) {  // the last report is that of what TMA brings
    for (int i = lane_id() == 0 ? 1 : 0; i < kReports; ++i) mbarrier_arrive(full);
    __syncwarp();
  }
  if (kLoaders > 1 ? lane_id() != 0 : !elect_one()) return;
  mbarrier_arrive_expect(full, u32(chunks_of_stage(stage)) * (kTokens * kHeads * 128));
  for (int c = 0; c < chunks_of_stage(stage); ++c)
    tma_load(to + c * kPairBytes, q_map, full, l2_normal(), (stage * kChunksEach + c) * 64, head, token);
}

// Brings an item's queries, stage by stage.
struct Queries {
  const TensorMap& map;
  template <class LoadNext>
  DEVICE void operator()(const Item& item, const LoadNext& load_next) const {
#pragma unroll 1
    for (int i = 0; i < kStepStages; ++i) load_next([&](u32 to, u32 full) { load_queries(map, item, i, to, full); });
  }
};

}  // namespace imbrex::cuda

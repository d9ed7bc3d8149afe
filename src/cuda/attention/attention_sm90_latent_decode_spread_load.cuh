#pragma once
// The shared memory of attention_sm90_latent_decode_spread.cu.
#include "attention_sm90_latent_decode_sums.cuh"
#include "attention_sm90_latent_steps.cuh"
#include "find_items_together.cuh"

namespace imbrex::cuda {

static_assert(kTilesEach == 1);
constexpr int kScoreWarps = 4;

// What a warp makes of its sixteen keys of a tile, and all blocks get: weights, 32 bytes of each row with a swizzle of that width, and the
// sums of those of keys g, then of keys g + 8.
struct alignas(256) Handed {
  char weights[kTileRows][32];
  float2 sums[kTileRows];
};
constexpr u32 kHandedBytes = kTileRows * (32 + sizeof(float2));

struct SharedStorage {
  static constexpr int kItemSlots = 3, kSteps = 2;  // steps that are scored while others are multiplied
  alignas(1024) char stage[kStages][kStageBytes];
  alignas(1024) char values[kValueStages][kValueStageBytes];
  alignas(1024) char q[kChunks][kQChunkBytes];
  Handed handed[kSteps][kBlocksTogether][kScoreWarps];
  alignas(16) float tops[kSteps][kStepTiles][kTileRows][kScoreWarps];  // maxima of each warp's keys of a tile
  float factor[kSteps][kStepTiles][kTileRows];                         // that sums so far are to be multiplied by, where `moved` says so
  float reference[kSteps][kTileRows];                                  // at the end of a step
  alignas(16) Parts sums_of_warps[kTileRows];                          // of a piece
  u32 moved[kSteps];                                                   // a bit for each tile that moved a row's reference
  Item item[kItemSlots];                                               // none: kNoItem rows, and none will come
  ClusterNumbers numbers;
  u64 full[kStages], empty[kStages], values_full[kValueStages], values_empty[kValueStages], q_full, q_empty;
  u64 handed_full[kSteps][kBlocksTogether], handed_free[kSteps];  // handed_free: what this block makes may go to all
  u64 tops_full[kSteps], noted[kSteps], notes_read[kSteps], item_full[kItemSlots], item_empty[kItemSlots], item_wanted;
};
static_assert(sizeof(SharedStorage) <= 227 * 1024);
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

DEVICE void begin_barriers(int rank, SharedStorage& shared) {
  const auto begin = [](u64& barrier, int arrivals) { mbarrier_init(shared_address(&barrier), u32(arrivals)); };
  for (u64& full : shared.full) begin(full, kLoaders);
  for (u64& empty : shared.empty) begin(empty, kScoreWarps);
  for (u64& full : shared.values_full) begin(full, kLoaders);
  for (u64& empty : shared.values_empty) begin(empty, kValueWarps);
  begin(shared.q_full, 1);
  begin(shared.q_empty, kScoreWarps);
  for (auto& of_step : shared.handed_full)
    for (int block = 0; block < kBlocksTogether; ++block) begin(of_step[block], block == rank ? kScoreWarps : 1);
  for (u64& free : shared.handed_free) begin(free, kBlocksTogether * kValueWarps);
  for (u64& full : shared.tops_full) begin(full, 1);
  for (u64& noted : shared.noted) begin(noted, 1);
  for (u64& read : shared.notes_read) begin(read, kValueWarps);
  begin(shared.item_wanted, 1);
  for (u64& full : shared.item_full) begin(full, 1);
  for (u64& empty : shared.item_empty) begin(empty, kScoreWarps + kValueWarps + 3);
  shared.numbers.begin(kBlocksTogether - 1);
  mbarrier_fence_init();
}

}  // namespace imbrex::cuda

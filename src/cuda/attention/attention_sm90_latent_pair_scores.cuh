#pragma once
// The warpgroup of attention_sm90_latent_pair.cu that multiplies scores: it sums them over its half of the dims, for the warpgroups that
// make weights of them, here and in the block that has the other half.
#include "attention_sm90_latent_pair_load.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

// The low half of the descriptors of tiles in shared memory: the address in units of 16 bytes. The high half is the same in all of a kind.
DEVICE u32 tile_at(u32 address, u32 leading) { return u32(wgmma_descriptor(address, leading, 0, 0)); }
// Of lines of 128 bytes, and of 64.
DEVICE u64 descriptor(u32 tile, int bytes) { return wgmma_descriptor(0, 0, 1024, 1) | u32(tile + bytes / 16); }
DEVICE u64 narrow_descriptor(u32 tile, int bytes) { return wgmma_descriptor(0, 0, 512, 2) | u32(tile + bytes / 16); }

class Scorer {
 public:
  DEVICE Scorer(const AttentionParams& p, const Half& half, SharedStorage& shared) : p_(p), half_(half), shared_(shared) {
    const u32 warp = warp_id() % 4;
    here_ = shared_address(&shared.sums[warp][0][lane_id()]), full_ = shared_address(&shared.scores_full[0][warp]);
    there_ = block_address(shared_address(&shared.others[0][warp][0][lane_id()]), half.other());
    there_full_ = block_address(full_, half.other());
  }

  DEVICE void run() {
    each_item(shared_, [&](const Item& item) {
      take_queries();
      const Tiles tiles = tiles_of(item);
#pragma unroll 1
      for (int tile = tiles.first; tile < tiles.end; ++tile) {
        Scores s;
        wait_for_stage();
        multiply(s);
        report(shared_.empty[stage_.at]);
        stage_.next();
        hand_over_scores(s);
      }
    });
  }

 private:
  DEVICE void wait_for_stage() const {
    mbarrier_wait(shared_address(&shared_.full[stage_.at]), stage_.parity);
    if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
  }

  // Moves an item's queries out of the ring: to registers, and what these do not hold to a place of its own. Other warpgroups pass over
  // this stage, so that this one reports for them too.
  DEVICE void take_queries() {
    const u32 lane = lane_id(), row = matrix_row() - lane / 4 + lane % 16;
    named_barrier_sync(1, 128);  // the last scores of the item before are there, in all warps
    wait_for_stage();
    const u32 from = shared_address(shared_.stage[stage_.at]);
#pragma unroll
    for (int step = 0; step < 2 * kQKept; ++step)
      load_matrix(q_[step], from + step / 2 * kQChunkBytes + place_of_piece<64>(int(row), int(2 * (step % 2) + lane / 16)));
#pragma unroll
    for (int i = int(threadIdx.x) % 128 * 16; i < (kQChunks - kQKept) * kQChunkBytes; i += 128 * 16)
      store_shared(shared_address(shared_.q) + i, load_shared(from + kQKept * kQChunkBytes + i));
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int warpgroup = 0; warpgroup <= kConsumers; ++warpgroup) mbarrier_arrive(shared_address(&shared_.empty[stage_.at]));
    }
    stage_.next();
    async_proxy_fence();
    named_barrier_sync(1, 128);
  }

  DEVICE void multiply(Scores& s) const {
    const u32 keys = tile_at(shared_address(shared_.stage[stage_.at]), 16);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHalfDims / 16; ++step) {
      const u64 right = descriptor(keys, step / 4 * kChunkBytes + step % 4 * 32);
      if (step < 2 * kQKept) {
        Wgmma<kTileKeys>::template registers<false>(s, q_[step], right, step != 0);
      } else {
        Wgmma<kTileKeys>::shared(s, left(step), right, step != 0);
      }
    }
    if constexpr (kHasRope) {
#pragma unroll
      for (int step = 0; step < 2; ++step)
        Wgmma<kTileKeys>::shared(s, left(kHalfDims / 16 + step), narrow_descriptor(keys, kHalfChunks * kChunkBytes + step * 32), true);
    }
    wgmma_commit();
    finish<0>(s);
  }
  // Queries that are in shared memory, 16 dims of them.
  DEVICE u64 left(int step) const {
    return narrow_descriptor(tile_at(shared_address(shared_.q), 16), (step / 2 - kQKept) * kQChunkBytes + step % 2 * 32);
  }

  // To the warpgroups that make weights, in both blocks, when these have taken what was there.
  DEVICE void hand_over_scores(const Scores& s) {
    const u32 slot = u32(slot_.at), to = there_ + slot * kSlotBytes, full = there_full_ + slot * kBarrierBytes;
    mbarrier_wait(shared_address(&shared_.sent_empty[slot]), slot_.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kTilesOf<Scores>; ++i) hand_over(to + u32(i) * kTileBytes, four(s, i), full);
    mbarrier_wait(shared_address(&shared_.sums_empty), here_slot_.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kTilesOf<Scores>; ++i) {
      const float4 x = four(s, i);
      store_shared(here_ + u32(i) * kTileBytes, uint4{bits_of(x.x), bits_of(x.y), bits_of(x.z), bits_of(x.w)});
    }
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive_expect(full_ + slot * kBarrierBytes, kTilesOf<Scores> * kTileBytes);
    slot_.next(), here_slot_.next();
  }

  // Of an exchange of scores, of a warp's tile of 8 keys, and of the barriers of all warps; bytes.
  static constexpr u32 kSlotBytes = sizeof SharedStorage::others[0], kTileBytes = sizeof SharedStorage::sums[0][0],
                       kBarrierBytes = sizeof SharedStorage::scores_full[0];

  const AttentionParams& p_;
  const Half& half_;
  SharedStorage& shared_;
  u32 here_, full_, there_, there_full_;  // where scores go, and their barriers
  Ring<kStages> stage_;
  Ring<SharedStorage::kScoreSlots> slot_;
  Ring<1> here_slot_;
  u32 q_[2 * kQKept][4];
};

}  // namespace imbrex::cuda

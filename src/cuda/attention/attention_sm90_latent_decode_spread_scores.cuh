#pragma once
// The warpgroup of attention_sm90_latent_decode_spread.cu that computes scores and weights: those of its block's tile of each step.
//
// What a row's weights are relative to moves tile by tile, in the order of the keys, as in attention_sm90_latent_decode.cu: so each block
// tells all others the maxima of its tile, and finds out from those of all by itself how references move.
#include "attention_sm90_latent_decode_spread_load.cuh"

namespace imbrex::cuda {

class Scorer {
 public:
  DEVICE Scorer(const AttentionParams& p, int rank, SharedStorage& shared)
      : p_(p), shared_(shared), rank_(rank), lane_(lane_id()), warp_(warp_id() % 4) {}

  DEVICE void run() {
    each_item(shared_, [&](const Item& item) {
      mbarrier_wait(shared_address(&shared_.q_full), q_parity_);
      q_parity_ ^= 1;
      run_item(item);
    });
  }

 private:
  // A thread has two keys of a tile, g and g + 8 of its warp's sixteen.
  using Scores = float[2][kColumns];
  struct Made {
    u32 weights[2][kColumns / 2];
    float sum[2];  // of the warp's keys, in the lane's own column
  };

  DEVICE void run_item(const Item& item) {
    // Tiles of which every row sees every key.
    const int whole_end = max(0, min(item.hi, end_of_all(p_, item))) / kTileKeys;
    scale_ = logit_scale(p_, item.kv_head) * kLog2e;
    reference_ = kEmptyReference;
    each_step(item, [&](const Step& step) {
      const int tile = step.first + rank_;
      const bool exists = step.tiles_of(rank_) > 0;
      Scores s;
      if (exists) {
        compute_scores(s);
        if (tile >= whole_end) {
          const int first = tile * kTileKeys + warp_ * 16 + lane_ / 4, key[2] = {first, first + 8};
          modify(p_, item, key, true, s);
        }
      } else {
#pragma unroll
        for (auto& of_key : s) fill(of_key, -infinity());
      }
      if (step.last) report(shared_.q_empty);
      tell_tops(s);
      weigh_step(step, exists, s);
    });
  }

  // Multiplies keys and queries: every second 16 dims of them in sums of their own, as the two warpgroups of
  // attention_sm90_latent_decode.cu do.
  DEVICE void compute_scores(Scores& s) {
    constexpr int kSteps = (kHeadDimQk + 15) / 16, kStageSteps = 4 * kChunksEach;
    Column sums[2];
    const u32 q = lines_at(shared_address(shared_.q));
    int before = 0;
#pragma unroll
    for (int i = 0; i < kStepStages; ++i) {
      const u32 keys = lines_at(shared_address(shared_.stage[stage_.at]));
      mbarrier_wait(shared_address(&shared_.full[stage_.at]), stage_.parity);
      if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
      wgmma_fence();
#pragma unroll
      for (int step = kStageSteps * i; step < min(kStageSteps * (i + 1), kSteps); ++step)
        Wgmma<kTileRows>::shared(sums[step % 2], descriptor(keys, step % kStageSteps / 4 * kPairBytes + step % 4 * 32),
                                 descriptor(q, step / 4 * kQChunkBytes + step % 4 * 32), step > 1);
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        report(shared_.empty[before]);
      }
      before = stage_.at;
      stage_.next();
    }
    finish<0>(sums);
    report(shared_.empty[before]);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
#pragma unroll
      for (int h = 0; h < 2; ++h) s[h][k] = of_column(sums[0], k, h) + of_column(sums[1], k, h);
    }
  }

  // The row of which a lane knows the reference: that of its own column.
  DEVICE int own_row() const { return row_of_column(lane_ / 4 % kColumns); }
  DEVICE bool is_first_of_row() const { return lane_ < 4 * kColumns; }

  // Tells all blocks, this one too, the maxima of the block's tile.
  DEVICE void tell_tops(const Scores& s) const {
    float top[kColumns];
#pragma unroll
    for (int k = 0; k < kColumns; ++k) top[k] = fmaxf(s[0][k], s[1][k]);
    const float own = max_of_own_column(top) * scale_;
    const u32 full = shared_address(&shared_.tops_full[step_.at]);
    if (warp_ == 0 && lane_ == 0) mbarrier_arrive_expect(full, sizeof shared_.tops[0]);
    if (!is_first_of_row()) return;
    const u32 to = shared_address(&shared_.tops[step_.at][rank_][own_row()][warp_]);
#pragma unroll
    for (u32 block = 0; block < kBlocksTogether; ++block) hand_over(to, int(bits_of(own)), full, block);
  }

  // Hands over the weights of a step, whose maxima are under way. Most steps do not move a reference: so weights relative to those that are
  // there are computed before maxima have come.
  DEVICE void weigh_step(const Step& step, bool exists, const Scores& s) {
    Made made;
    float own = reference_;
    // Once where weights have to wait for maxima, or did not; twice where a reference moves. One text for both: what is run for the first
    // time comes from memory.
#pragma unroll 1
    for (bool ready = step.begins;; ready = true) {
      if (ready && !move_references(step, own) && !step.begins) break;
      if (exists) {
        weigh_by(own, s, made);
        pin(made.weights);  // else the compiler computes them only where it knows that they are wanted
        pin(made.sum);
      }
      if (ready) break;
    }
    if (exists) hand_over_weights(made);
    if (step.ends) reference_ = kEmptyReference;
    step_.next();
  }

  // Moves references as far as a step does, and notes what the warps that multiply values have to know. True where any has moved. `own`:
  // that of the lane's row which the block's weights are relative to.
  DEVICE bool move_references(const Step& step, float& own) {
    mbarrier_wait(shared_address(&shared_.tops_full[step_.at]), step_.parity);
    float top[kStepTiles], greatest = -infinity();
#pragma unroll
    for (int tile = 0; tile < kStepTiles; ++tile) {
      const float4 of_warps = *reinterpret_cast<const float4*>(shared_.tops[step_.at][tile][own_row()]);
      top[tile] = fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w));
      greatest = fmaxf(greatest, top[tile]);
    }
    mbarrier_wait(shared_address(&shared_.notes_read[step_.at]), step_.parity ^ 1);
    const bool notes = warp_ == 0 && is_first_of_row();
    u32 moved = 0;
    own = reference_;
    if (any_lane(greatest > reference_ + kSlack)) {
#pragma unroll
      for (int tile = 0; tile < kStepTiles; ++tile) {
        float factor;
        const bool moves = move_reference(reference_, top[tile], kSlack, 0.f, factor);
        if (any_lane(moves)) moved |= 1u << tile;
        if (notes) shared_.factor[step_.at][tile][own_row()] = factor;
        if (tile == rank_) own = reference_;
      }
    }
    if (warp_ == 0) {
      if (notes && step.ends) shared_.reference[step_.at][own_row()] = reference_;
      if (lane_ == 0) shared_.moved[step_.at] = moved;
      report(shared_.noted[step_.at]);
    }
    return moved != 0;
  }

  // `own_reference`: of the lane's row.
  DEVICE void weigh_by(float own_reference, const Scores& s, Made& made) const {
    float reference[kColumns];
#pragma unroll
    for (int k = 0; k < kColumns; ++k) reference[k] = of_lanes(own_reference, k);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float weights[kColumns];
#pragma unroll
      for (int k = 0; k < kColumns; ++k) weights[k] = exp2_approx(fmaf(s[h][k], scale_, -reference[k]));
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) made.weights[h][i] = pack_16<kQType>(weights[2 * i], weights[2 * i + 1]);
      made.sum[h] = sum_of_own_column(weights);
    }
  }

  // Puts the weights of the warp's keys, with their sums, where products of all blocks find them.
  DEVICE void hand_over_weights(const Made& made) {
    mbarrier_wait(shared_address(&shared_.handed_free[step_.at]), (free_ >> step_.at & 1) ^ 1);
    free_ ^= 1u << step_.at;
    Handed& handed = shared_.handed[step_.at][rank_][warp_];
    const u32 from = shared_address(&handed), full = shared_address(&shared_.handed_full[step_.at][rank_]);
    const int row = lane_ % kTileRows;
#pragma unroll
    for (int h = 0; h < 2; ++h) store_matrix_transposed(shared_address(handed.weights[row]) + (h ^ row / 4 % 2) * 16, made.weights[h]);
    if (is_first_of_row()) handed.sums[own_row()] = {made.sum[0], made.sum[1]};
    async_proxy_fence();
    __syncwarp();
    if (elect_one()) {
      mbarrier_arrive(full);
#pragma unroll
      for (int other = 1; other < kBlocksTogether; ++other) {
        const u32 block = u32(rank_ + other) % kBlocksTogether;
        bulk_hand_over(block_address(from, block), from, kHandedBytes, block_address(full, block));
      }
    }
    __syncwarp();
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  const int rank_, lane_, warp_;
  u32 q_parity_ = 0, free_ = 0;
  float scale_ = 1.f, reference_ = kEmptyReference;  // of scores, to log2 units; of the lane's row
  Ring<kStages> stage_;
  Ring<SharedStorage::kSteps> step_;
};

}  // namespace imbrex::cuda

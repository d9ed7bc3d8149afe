#pragma once
// The warpgroup of attention_sm90_latent.cu that computes scores and weights.
//
// For it, what lies between two products counts, because the matrix unit has no scores to multiply then: so little is computed there, and
// nothing is waited for that a barrier can tell earlier. The values of the tile before are multiplied meanwhile.
#include "attention_sm90_latent_load.cuh"

namespace imbrex::cuda {

class Scorer {
 public:
  DEVICE Scorer(const AttentionParams& p, SharedStorage& shared) : p_(p), shared_(shared) {
    const int lane = lane_id(), warp = warp_id() % 4, row = warp * 16 + lane % 16;  // of which it addresses 16 bytes, number lane / 16
    weights_ = shared_address(shared.weights) + row * kWeightRow + (lane / 16 ^ row / 4 % 2) * 16;
    note_ = shared_address(shared.note) + warp * 4;
    left_ = tile_at(shared_address(shared.q), 16);
  }

  DEVICE void run() {
    each_item(shared_, [&](const Item& item) {
      take_queries();
      run_item(item);
    });
  }

 private:
  DEVICE bool stage_is_there() const { return mbarrier_is_over(shared_address(&shared_.full[stage_.at]), stage_.parity); }
  DEVICE void wait_for_stage(bool is_there = false) const {
    if (!is_there) mbarrier_wait(shared_address(&shared_.full[stage_.at]), stage_.parity);
    if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
  }
  DEVICE void leave_stage() {
    leave_to_all(shared_.empty[stage_.at]);
    stage_.next();
  }

  // Moves an item's queries out of the ring: to registers, and what these do not hold to a place of its own. Other warpgroups pass over
  // these stages, so that this one reports for them too.
  DEVICE void take_queries() {
    const u32 lane = lane_id(), row = matrix_row() - lane / 4 + lane % 16;
    named_barrier_sync(1, 128);  // the last scores of the item before are there, in all warps
#pragma unroll
    for (int part = 0; part < kQStages; ++part) {
      wait_for_stage();
      const u32 from = shared_address(shared_.stage[stage_.at]);
#pragma unroll
      for (int chunk = part * kQChunksEach; chunk < min((part + 1) * kQChunksEach, kQChunks); ++chunk) {
        const u32 in_chunk = from + (chunk - part * kQChunksEach) * kQChunkBytes;
        if (chunk < kQKept) {
#pragma unroll
          for (int step = 0; step < 4; ++step)
            load_matrix(q_[4 * chunk + step], in_chunk + row * 128 + ((2 * step + lane / 16) ^ row % 8) * 16);
        } else {
          move_queries(in_chunk, shared_address(shared_.q[chunk - kQKept]));
        }
      }
      __syncwarp();
      if (lane < kConsumers * kRowCluster) mbarrier_arrive_at<false>(shared_address(&shared_.empty[stage_.at]), lane % kRowCluster);
      leave_stage();
    }
    async_proxy_fence();
    named_barrier_sync(1, 128);
  }

  DEVICE void start_scores(Scores& s) {
    const u32 k = tile_at(shared_address(shared_.stage[stage_.at]), 16);
#pragma unroll
    for (int step = 0; step < kQSteps; ++step) {
      const u64 keys = descriptor(k, step / 4 * kChunkBytes + step % 4 * 32);
      if (step < 4 * kQKept) {
        Wgmma<kTileKeys>::template registers<false>(s, q_[step], keys, step != 0);
      } else {
        Wgmma<kTileKeys>::shared(s, descriptor(left_, (step / 4 - kQKept) * kQChunkBytes + step % 4 * 32), keys, true);
      }
    }
    wgmma_commit();
  }

  DEVICE void run_item(const Item& item) {
    const Tiles tiles = tiles_of(item);
    int number = 1, left = tiles_of_piece(item);  // of the piece at work, from 1 on; its tiles
    bool begins = true;                           // a piece
    Rows rows;
    set_rows(rows, p_, item, matrix_row(), logit_scale(p_, item.kv_head));
    // Tiles of which every row sees every key.
    const int whole_first = (max(item.lo, first_of_all(p_, item)) + kTileKeys - 1) / kTileKeys;
    const int whole_end = max(0, min(item.hi, end_of_all(p_, item))) / kTileKeys;
    float reference[2] = {kEmptyReference, kEmptyReference}, sum[2] = {0.f, 0.f};
    Scores s;
    wait_for_stage();
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile) {
      wgmma_fence();
      start_scores(s);
      if (!begins) release_weights();
      mbarrier_wait(shared_address(&shared_.weights_empty[slot_.at]), slot_.parity ^ 1);
      const bool last = tile == tiles.end - 1, ends = --left == 0 || last;
      const bool whole = tile < whole_end && (!kWindow || tile >= whole_first);
      const Note note(tile, ends, last, !whole);
      finish<0>(s);
      leave_stage();
      const bool is_there = stage_is_there();
      if constexpr (!kPlainLogits) modify(rows, s);
      if (!whole) hide_keys(p_, item, matrix_row(), tile * kTileKeys, rows, s);
      WeightsOf<kQType> weights;
      const bool moved = weigh_tile(tile, rows, s, weights, reference, sum);
      put_weights(weights, moved && !begins ? note.with_factors() : note.bits);
      if (ends) {
        put_end(reference, sum);
        release_weights();  // at once, because what comes next in the ring waits for this piece's sums
        for (int i = joined_nodes(number, last) * row_warps(item); i > 0; --i) {
          wait_for_stage();
          leave_stage();
        }
        ++number, left = tiles_of_piece(item);
      }
      begins = ends;
      if (!last) wait_for_stage(is_there && !ends);
    }
  }

  // Scores become weights: true where sums so far are to be multiplied by factors, which are left beside the weights. As weigh() does it,
  // bit for bit. But most tiles do not move a reference: so weights relative to the one that is there are computed at once, beside the
  // maximum, and anew where that has outgrown it.
  DEVICE bool weigh_tile(int tile, const Rows& rows, Scores& s, WeightsOf<kQType>& weights, float (&reference)[2], float (&sum)[2]) {
    if constexpr (kAlibi) return weigh_anew(tile, rows, s, weights, reference, sum);  // whose terms are another story
    float total[2];
    bool outgrown = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = factor_of(p_, rows.terms[h]), added = -reference[h];
      outgrown |= greatest(s, h) * scale > reference[h] + kSlack;
      float part[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kTilesOf<Scores>; ++i) {
        const float2 x = pair(s, i, h), weight = {exp2_approx(fmaf(x.x, scale, added)), exp2_approx(fmaf(x.y, scale, added))};
        part[0] += weight.x, part[1] += weight.y;
        weights[i / 2][i % 2 * 2 + h] = packed(weight);
      }
      total[h] = part[0] + part[1];
    }
    pin(weights);  // else the compiler computes them only where it knows that they are wanted
    if (any_lane(outgrown)) return weigh_anew(tile, rows, s, weights, reference, sum);
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += total[h];
    return false;
  }
  DEVICE bool weigh_anew(int tile, const Rows& rows, Scores& s, WeightsOf<kQType>& weights, float (&reference)[2], float (&sum)[2]) {
    float factor[2];
    const bool moved = weigh(p_, tile * kTileKeys, rows, s, reference, sum, factor, kSlack, 0.f);
    pack_weights<kQType>(s, weights);
    if (lane_id() % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) shared_.factor[slot_.at][row() + 8 * h] = factor[h];
    }
    return moved;
  }
  DEVICE void put_weights(const WeightsOf<kQType>& weights, u32 note) {
    const u32 to = weights_ + slot_.at * kWeightBytes;
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i)
      store_matrix(to + i * kWeightPartBytes, weights[i][0], weights[i][1], weights[i][2], weights[i][3]);
    if (lane_id() == 0) store_shared(note_ + slot_.at * 16, note);
  }
  // At the end of a piece, behind which sums begin anew.
  DEVICE void put_end(float (&reference)[2], float (&sum)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = sum_over<4>(sum[h]);
      if (lane_id() % 4 == 0) shared_.end[slot_.at][row() + 8 * h] = {reference[h], total};
      reference[h] = kEmptyReference, sum[h] = 0.f;
    }
  }
  // Values are multiplied while no scores are: so the weights of a tile are only handed over when the scores of the next one are under way.
  DEVICE void release_weights() {
    async_proxy_fence();
    report(shared_.weights_full[slot_.at]);
    slot_.next();
  }

  DEVICE static int row() { return computed_here(int(threadIdx.x)) % 128 / 32 * 16 + computed_here(int(threadIdx.x)) % 32 / 4; }

  const AttentionParams& p_;
  SharedStorage& shared_;
  u32 weights_, note_, left_;
  Ring<kStages> stage_;
  Ring<kWeightSlots> slot_;
  u32 q_[4 * kQKept][4];
};

}  // namespace imbrex::cuda

#pragma once
// The warpgroup of attention_sm90_latent_pair.cu that computes scores and weights of its block's tiles, for the values of both blocks.
//
// Weights are relative to references that both blocks move together: each tells the other one its maxima, and computes weights meanwhile.
#include "attention_sm90_latent_pair_load.cuh"

namespace imbrex::cuda {

class Scorer {
 public:
  DEVICE Scorer(const AttentionParams& p, const Half& half, SharedStorage& shared)
      : p_(p), half_(half), shared_(shared), lane_(lane_id()), warp_(warp_id() % 4) {
    const int row = warp_ * 16 + lane_ % 16;  // of which it addresses 16 bytes of weights, number lane / 16
    weights_ = shared_address(shared.weights[0][half.rank]) + row * kWeightRow + (lane_ / 16 ^ row / 4 % 2) * 16;
    const u32 queries = shared_address(shared.q);
    left_ = tile_at(queries, 16), there_ = block_address(queries, u32(half.other())) - queries;
  }

  DEVICE void run() {
    each_item(shared_, [&](const Item& item) {
      take_queries();
      run_item(item);
    });
  }

 private:
  DEVICE int row() const { return warp_ * 16 + lane_ / 4; }
  // The same place in the other block.
  DEVICE u32 there(u32 address) const { return address + there_; }
  DEVICE bool stage_is_there() const { return mbarrier_is_over(shared_address(&shared_.full[stage_.at]), stage_.parity); }
  DEVICE void wait_for_stage(bool is_there = false) const {
    if (!is_there) mbarrier_wait(shared_address(&shared_.full[stage_.at]), stage_.parity);
    if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
  }

  // Moves an item's queries out of the ring: to registers, and what these do not hold to a place of its own. Other warpgroups pass over
  // these stages, so that this one reports for them too, in both blocks.
  DEVICE void take_queries() {
    const u32 row = warp_ * 16 + lane_ % 16;
    named_barrier_sync(1, 128);  // the last scores of the item before are there, in all warps
#pragma unroll
    for (int part = 0; part < kQStages; ++part) {
      wait_for_stage();
      const u32 from = shared_address(&shared_.stage[stage_.at]), empty = shared_address(&shared_.empty[stage_.at]);
#pragma unroll
      for (int chunk = part * kQEach; chunk < min((part + 1) * kQEach, kQChunks); ++chunk) {
        const u32 in_chunk = from + (chunk - part * kQEach) * kQChunkBytes;
        if (chunk < kQKept) {
#pragma unroll
          for (int step = 0; step < 4; ++step)
            load_matrix(q_[4 * chunk + step], in_chunk + row * 128 + ((2 * step + lane_ / 16) ^ row % 8) * 16);
        } else {
          move_queries(in_chunk, shared_address(shared_.q[chunk - kQKept]));
        }
      }
      __syncwarp();
      if (lane_ <= kBlocksTogether * kConsumers) mbarrier_arrive_at<false>(empty, u32(lane_ < kConsumers ? half_.other() : half_.rank));
      stage_.next();
    }
    async_proxy_fence();
    named_barrier_sync(1, 128);
  }

  DEVICE void start_scores(Scores& s) const {
    const Stage& stage = shared_.stage[stage_.at];
    wgmma_fence();
    multiply<0, kHalfChunks>(s, shared_address(stage.crossed[half_.rank]));
    multiply<kHalfChunks, kHalfChunks>(s, shared_address(stage.own));
    if constexpr (kHasRope) multiply<2 * kHalfChunks, 1>(s, shared_address(stage.rope));
    wgmma_commit();
  }
  template <int first, int chunks>
  DEVICE void multiply(Scores& s, u32 keys) const {
    const u32 k = tile_at(keys, 16);
#pragma unroll
    for (int step = 4 * first; step < min(4 * (first + chunks), kQSteps); ++step) {
      const u64 right = descriptor(k, (step / 4 - first) * kChunkBytes + step % 4 * 32);
      if (step < 4 * kQKept) {
        Wgmma<kTileKeys>::template registers<false>(s, q_[step], right, step != 0);
      } else {
        Wgmma<kTileKeys>::shared(s, descriptor(left_, (step / 4 - kQKept) * kQChunkBytes + step % 4 * 32), right, true);
      }
    }
  }

  DEVICE void run_item(const Item& item) {
    const Steps steps = steps_of(item);
    int left = steps_of_piece(item);  // of the piece at work
    bool begins = true;               // a piece
    Rows rows;
    set_rows(rows, p_, item, row(), logit_scale(p_, item.kv_head));
    // Tiles of which every row sees every key.
    const int whole_end = max(0, min(item.hi, end_of_all(p_, item))) / kTileKeys;
    float reference[2] = {kEmptyReference, kEmptyReference}, sum[2] = {0.f, 0.f};
    wait_for_stage();
#pragma unroll 1
    for (int step = steps.first; step < steps.end; ++step) {
      const int tile = kBlocksTogether * step + half_.rank;
      Scores s;
      start_scores(s);
      if (!begins) release_weights(false);
      const bool last = step == steps.end - 1, ends = --left == 0 || last;
      const bool whole = tile < whole_end;
      const Note note(step, ends, last, step * kStepKeys < item.lo || (step + 1) * kStepKeys > item.hi);
      const u32 empty = shared_address(&shared_.empty[stage_.at]), tops_full = shared_address(&shared_.tops_full[slot_.at][warp_]);
      if (lane_ == 0) mbarrier_arrive_expect(tops_full, sizeof shared_.tops[0][0]);
      stage_.next();
      finish<0>(s);
      const bool is_there = stage_is_there();
      if (!whole) hide_keys(p_, item, computed_here(row()), tile * kTileKeys, rows, s);
      WeightsOf<kQType> weights;
      const bool moved = weigh_tile(rows, tops_full, empty, s, weights, reference, sum);
      put_weights(weights, moved && !begins ? note.with_factors() : note.bits);
      begins = ends;
      if (ends) {
        put_end(reference, sum);
        release_weights(true);
        left = steps_of_piece(item);
      }
      if (!last) wait_for_stage(is_there);
    }
  }

  // Scores become weights: true where sums so far are to be multiplied by factors, which are left beside the weights. Most tiles do not
  // move a reference: so weights relative to the one that is there are computed while maxima are under way, and anew where one of them has
  // outgrown it.
  DEVICE bool weigh_tile(const Rows& rows, u32 tops_full, u32 empty, const Scores& s, WeightsOf<kQType>& weights, float (&reference)[2],
                         float (&sum)[2]) {
    float top[2], total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = max_over<4>(greatest(s, h)) * factor_of(p_, rows.terms[h]);
    const u32 others = shared_address(&shared_.tops[slot_.at][warp_][lane_ / 4]);
    if (lane_ % 4 == 0) hand_over(there(others), float2{top[0], top[1]}, there(tops_full));
    weigh_by(reference, rows, s, weights, total);
    pin(weights);                            // else the compiler computes them only where it knows that they are wanted
    if (lane_ == 0) mbarrier_arrive(empty);  // all lanes have met since the last product
    mbarrier_wait(tops_full, slot_.parity);
    const float2 theirs = shared_.tops[slot_.at][warp_][lane_ / 4];
    top[0] = fmaxf(top[0], theirs.x), top[1] = fmaxf(top[1], theirs.y);
    const bool moved = any_lane(top[0] > reference[0] + kSlack || top[1] > reference[1] + kSlack);
    if (moved) {
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        move_reference(reference[h], top[h], kSlack, 0.f, factor[h]);
        sum[h] *= factor[h];
        if (lane_ % 4 == 0) shared_.factor[slot_.at][row() + 8 * h] = factor[h];
      }
      weigh_by(reference, rows, s, weights, total);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += total[h];
    return moved;
  }
  // Weights, as operands of a product, and the sums of what a thread has of them.
  DEVICE void weigh_by(const float (&reference)[2], const Rows& rows, const Scores& s, WeightsOf<kQType>& weights,
                       float (&total)[2]) const {
    float scale[2], part[2][2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = factor_of(p_, rows.terms[h]);
#pragma unroll
    for (int i = 0; i < kTileKeys / 4; ++i) {
      const int h = i % 2;
      const float2 x = pair(s, i / 2, h),
                   weight = {exp2_approx(fmaf(x.x, scale[h], -reference[h])), exp2_approx(fmaf(x.y, scale[h], -reference[h]))};
      part[h][0] += weight.x, part[h][1] += weight.y;
      weights[i / 4][i % 4] = packed(weight);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) total[h] = part[h][0] + part[h][1];
  }
  // Weights go to this block's memory, and from there a warp that loads copies them to the other one's.
  DEVICE void put_weights(const WeightsOf<kQType>& weights, u32 note) const {
    const u32 to = weights_ + slot_.at * (kBlocksTogether * kWeightBytes);
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i)
      store_matrix(to + i * kWeightPartBytes, weights[i][0], weights[i][1], weights[i][2], weights[i][3]);
    if (lane_ == 0) store_shared(shared_address(&shared_.note[slot_.at][warp_]), note);
    async_proxy_fence();
    report(shared_.weights_made[slot_.at]);
  }
  // At the end of a piece, behind which sums begin anew.
  DEVICE void put_end(float (&reference)[2], float (&sum)[2]) const {
    float total[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      total[h] = sum_over<4>(sum[h]);
      if (lane_ % 4 == 0) shared_.end[slot_.at][row() + 8 * h] = {reference[h], total[h]};
      reference[h] = kEmptyReference, sum[h] = 0.f;
    }
    if (lane_ % 4 == 0)
      hand_over(there(shared_address(&shared_.sums[slot_.at][warp_][lane_ / 4])), float2{total[0], total[1]},
                there(shared_address(&shared_.weights_full[slot_.at])));
  }
  // Values are multiplied while no scores are: so the weights of a step are only handed over when the scores of the next one are under way,
  // but for those that end a piece.
  DEVICE void release_weights(bool ends) {
    __syncwarp();
    if (lane_ == 0)
      mbarrier_arrive_expect(shared_address(&shared_.weights_full[slot_.at]),
                             u32(kWeightBytes / kScoreWarps) + (ends ? u32(sizeof shared_.sums[0][0]) : 0));
    slot_.next();
  }

  const AttentionParams& p_;
  const Half& half_;
  SharedStorage& shared_;
  int lane_, warp_;
  u32 weights_, left_, there_;  // where a lane writes weights; where queries are that registers do not hold; how far the other block is
  Ring<kStages> stage_, slot_;  // of keys, and of weights
  u32 q_[4 * kQKept][4];
};

}  // namespace imbrex::cuda

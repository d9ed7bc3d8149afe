#pragma once
// The warpgroup of attention_sm90_latent_spread.cu that computes scores and weights: those of its block's tiles.
//
// What a row's weights are relative to moves tile by tile, in the order of the keys, as in attention_sm90_latent.cu: so each block tells
// all others the maxima of its tiles, and finds out from those of all by itself how references move.
#include "attention_sm90_latent_spread_load.cuh"

namespace imbrex::cuda {

// Stages of the next step's products that begin before a step's weights are made, while its maxima are under way: where steps are short and
// many. Where they are few, the last one's weights come late with it.
constexpr int kStagesAhead = kOwnDims > 128 ? 2 : 0;

class Scorer {
 public:
  DEVICE Scorer(const AttentionParams& p, int rank, SharedStorage& shared)
      : p_(p), shared_(shared), rank_(rank), lane_(lane_id()), warp_(warp_id() % 4) {
    const int row = warp_ * 16 + lane_ % 16;  // of which it addresses 16 bytes of weights, number lane / 16
    weights_ = shared_address(&shared.handed[0][rank][row / 8]) + row % 8 * kWeightRow + (lane_ / 16 ^ row / 4 % 2) * 16;
  }

  DEVICE void run() {
    each_item(shared_, [&](const Item& item) {
      take_queries();
      run_item(item);
    });
  }

 private:
  using Both = Fragment<kTilesEach * kTileKeys>;  // scores of both tiles

  DEVICE int row() const { return warp_ * 16 + lane_ / 4; }
  DEVICE static Scores& of_tile(Both& both, int tile) { return part_of<kTileKeys>(both, tile * kTileKeys); }
  DEVICE void wait_for_stage() const {
    mbarrier_wait(shared_address(&shared_.full[stage_.at]), stage_.parity);
    if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
  }

  DEVICE void take_queries() {
    const int row = warp_ * 16 + lane_ % 16;
#pragma unroll
    for (int i = 0; i < kStepStages; ++i, stage_.next()) {
      wait_for_stage();
      const u32 from = shared_address(shared_.stage[stage_.at]) + row * 128;
#pragma unroll
      for (int chunk = 0; chunk < chunks_of_stage(i); ++chunk) {
#pragma unroll
        for (int step = 0; step < 4; ++step)
          load_matrix(q_[4 * (i * kChunksEach + chunk) + step], from + chunk * kPairBytes + ((2 * step + lane_ / 16) ^ row % 8) * 16);
      }
      report(shared_.empty[stage_.at]);
    }
  }

  // Begins the products of the block's tiles. One whose left side is in registers keeps its warp until the matrix unit has taken them: so
  // little is done between two, and what others are waited for is on its way meanwhile.
  template <int first_stage, int end_stage>
  DEVICE void start_scores(Both& s, int& before) {
    if constexpr (kPaired) return start_paired(s, before);
    constexpr int kSteps = 4 * kChunksEach;
#pragma unroll
    for (int i = first_stage; i < end_stage; ++i) {
      const u32 keys = tile_at(shared_address(shared_.stage[stage_.at]), 16);
      wait_for_stage();
      wgmma_fence();
#pragma unroll
      for (int step = kSteps * i; step < min(kSteps * (i + 1), kQSteps); ++step)
        Wgmma<kTilesEach * kTileKeys>::template registers<false>(
            s, q_[step], descriptor(keys, step % kSteps / 4 * kPairBytes + step % 4 * 32), step != 0);
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        report(shared_.empty[before]);
      }
      before = stage_.at;
      stage_.next();
    }
  }
  // The products of each tile on its own: of even ones first over the second half of the values' dims, then the first one, as
  // attention_sm90_latent_pair.cu has it.
  DEVICE void start_paired(Both& s, int& before) {
    constexpr int kHalf = kHeadDimV / 128;
    u32 keys[kStepStages];
#pragma unroll
    for (int i = 0; i < kStepStages; ++i) {
      keys[i] = tile_at(shared_address(shared_.stage[stage_.at]), 16);
      wait_for_stage();
      before = stage_.at;
      stage_.next();
    }
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < kTilesEach; ++tile) {
#pragma unroll
      for (int i = 0; i < kQSteps; ++i) {
        const int at = i / 4, chunk = tile > 0 || at >= 2 * kHalf ? at : (at + kHalf) % (2 * kHalf), step = 4 * chunk + i % 4;
        Wgmma<kTileKeys>::template registers<false>(
            of_tile(s, tile), q_[step],
            descriptor(keys[chunk / kChunksEach], chunk % kChunksEach * kPairBytes + tile * kChunkBytes + i % 4 * 32), i != 0);
      }
    }
    wgmma_commit();
  }
  DEVICE void finish_scores(Both& s, int before) {
    finish<0>(s);
    if constexpr (kPaired) {
#pragma unroll
      for (int i = 1; i < kStepStages; ++i) report(shared_.empty[(before + kStages - i) % kStages]);
    }
    report(shared_.empty[before]);
  }

  DEVICE void run_item(const Item& item) {
    Rows rows;
    set_rows(rows, p_, item, row(), logit_scale(p_, item.kv_head));
    // Tiles of which every row sees every key.
    const int whole_end = max(0, min(item.hi, end_of_all(p_, item))) / kTileKeys;
    float reference[2] = {kEmptyReference, kEmptyReference};
    const auto hide_and_tell = [&](const Step& step, Both& s) {
#pragma unroll
      for (int i = 0; i < kTilesEach; ++i) {
        const int tile = step.first + rank_ * kTilesEach + i;
        if (i >= step.tiles_of(rank_)) {
          fill(of_tile(s, i), -infinity());
        } else if (tile >= whole_end) {
          hide_keys(p_, item, row(), tile * kTileKeys, rows, of_tile(s, i));
        }
      }
      tell_tops(rows, s);
    };
    if constexpr (kStagesAhead > 0) {
      Both s;
      Step before{};  // whose scores these are; at first none
      const auto weigh_before = [&] {
        if (before.tiles > 0) weigh_step<false>(before, rows, s, reference);
      };
      each_step(item, [&](const Step& step) {
        Both next;
        if (step.tiles_of(rank_) > 0) {
          int stage = 0;
          start_scores<0, kStagesAhead>(next, stage);
          weigh_before();
          start_scores<kStagesAhead, kStepStages>(next, stage);
          finish_scores(next, stage);
        } else {
          weigh_before();
          fill(next, -infinity());
        }
        hide_and_tell(step, next);
#pragma unroll
        for (int i = 0; i < kTilesEach * kTileKeys / 2; ++i) s[i] = next[i];
        before = step;
      });
      weigh_before();
    } else {
      each_step(item, [&](const Step& step) {
        Both s;
        if (step.tiles_of(rank_) > 0) {
          int stage = 0;
          start_scores<0, kStepStages>(s, stage);
          finish_scores(s, stage);
        } else {
          fill(s, -infinity());
        }
        hide_and_tell(step, s);
        weigh_step<true>(step, rows, s, reference);
      });
    }
  }

  // Hands over the weights of a step, whose maxima are under way. Most steps do not move a reference: so weights relative to those that are
  // there may be computed before maxima have come.
  template <bool is_early>
  DEVICE void weigh_step(const Step& step, const Rows& rows, Both& s, float (&reference)[2]) {
    const int own = step.tiles_of(rank_);
    Made made;
    float own_reference[kTilesEach][2];
#pragma unroll
    for (auto& of_tile : own_reference) of_tile[0] = reference[0], of_tile[1] = reference[1];
    if (is_early && own > 0 && !step.begins) {
      weigh_by(own_reference, rows, s, made);
      pin(made.weights);  // else the compiler computes them only where it knows that they are wanted
    }
    const bool moved = move_references(step, reference, own_reference);
    if (own > 0 && (moved || !is_early || step.begins)) weigh_by(own_reference, rows, s, made);
    if (own > 0) hand_over_weights(made);
    if (step.ends) reference[0] = reference[1] = kEmptyReference;
    step_.next();
  }

  // Tells all blocks, this one too, the maxima of the block's tiles.
  DEVICE void tell_tops(const Rows& rows, Both& s) const {
    float top[kTilesEach][2];
#pragma unroll
    for (int i = 0; i < kTilesEach; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) top[i][h] = max_over<4>(greatest(of_tile(s, i), h)) * factor_of(p_, rows.terms[h]);
    }
    if constexpr (kPaired) {
#pragma unroll
      for (int h = 0; h < 2; ++h) top[0][h] = top[1][h] = fmaxf(top[0][h], top[1][h]);
    }
    const u32 full = tops_full();
    if (lane_ == 0) mbarrier_arrive_expect(full, sizeof shared_.tops[0][0]);
    const u32 block = u32(lane_ % 4);
    if (block >= kBlocksTogether) return;
#pragma unroll
    for (int i = 0; i < kTilesEach; ++i)
      hand_over(block_address(shared_address(&shared_.tops[step_.at][warp_][rank_ * kTilesEach + i][lane_ / 4]), block),
                float2{top[i][0], top[i][1]}, block_address(full, block));
  }
  DEVICE u32 tops_full() const { return shared_address(&shared_.tops_full[step_.at][warp_]); }

  // Moves references as far as a step does, and notes what the warps that multiply values have to know.
  // True where any has moved.
  DEVICE bool move_references(const Step& step, float (&reference)[2], float (&own)[kTilesEach][2]) {
    mbarrier_wait(tops_full(), step_.parity);
    float2 tops[kStepTiles];
    float greatest[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int tile = 0; tile < kStepTiles; ++tile) {
      tops[tile] = shared_.tops[step_.at][warp_][tile][lane_ / 4];
      greatest[0] = fmaxf(greatest[0], tops[tile].x), greatest[1] = fmaxf(greatest[1], tops[tile].y);
    }
    u32 moved = 0;
    mbarrier_wait(shared_address(&shared_.notes_read[step_.at]), step_.parity ^ 1);
    if (any_lane(greatest[0] > reference[0] + kSlack || greatest[1] > reference[1] + kSlack)) {
#pragma unroll
      for (int tile = 0; tile < kStepTiles; ++tile) {
        float factor[2];
        const bool moves0 = move_reference(reference[0], tops[tile].x, kSlack, 0.f, factor[0]),
                   moves1 = move_reference(reference[1], tops[tile].y, kSlack, 0.f, factor[1]);
        if (any_lane(moves0 || moves1)) {
          moved |= 1u << tile;
          if (lane_ % 4 == 0) {
            float* const to = shared_.factor[step_.at][tile] + row();
            to[0] = factor[0], to[8] = factor[1];
          }
        }
        if (tile / kTilesEach == rank_) own[tile % kTilesEach][0] = reference[0], own[tile % kTilesEach][1] = reference[1];
      }
    }
    if (lane_ % 4 == 0 && step.ends) {
      float* const to = shared_.reference[step_.at] + row();
      to[0] = reference[0], to[8] = reference[1];
    }
    if (lane_ == 0) shared_.moved[step_.at][warp_] = moved;
    report(shared_.noted[step_.at]);
    return moved != 0;
  }

  struct Made {
    u32 weights[kTilesEach * kTileKeys / 16][4];
    float total[kTilesEach][2];
  };
  // Scores become weights, as weigh() does it, bit for bit.
  DEVICE void weigh_by(const float (&reference)[kTilesEach][2], const Rows& rows, Both& s, Made& made) const {
#pragma unroll
    for (int tile = 0; tile < kTilesEach; ++tile) {
      const Scores& of = of_tile(s, tile);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float scale = factor_of(p_, rows.terms[h]), added = -reference[tile][h];
        float part[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < kTilesOf<Scores>; ++i) {
          const float2 x = pair(of, i, h), weight = {exp2_approx(fmaf(x.x, scale, added)), exp2_approx(fmaf(x.y, scale, added))};
          part[0] += weight.x, part[1] += weight.y;
          made.weights[(tile * kTilesOf<Scores> + i) / 2][i % 2 * 2 + h] = packed(weight);
        }
        made.total[tile][h] = part[0] + part[1];
      }
    }
  }
  // Puts the weights of the warp's rows, with their sums, where products of all blocks find them.
  DEVICE void hand_over_weights(const Made& made) {
    mbarrier_wait(shared_address(&shared_.handed_free[step_.at]), (free_ >> step_.at & 1) ^ 1);
    free_ ^= 1u << step_.at;
    Handed* const handed = shared_.handed[step_.at][rank_] + 2 * warp_;
    const u32 to = weights_ + step_.at * sizeof shared_.handed[0];
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      store_matrix(to + i * kPartBytes, made.weights[i][0], made.weights[i][1], made.weights[i][2], made.weights[i][3]);
#pragma unroll
    for (int tile = 0; tile < kTilesEach; ++tile) handed[tile].totals[lane_] = {made.total[tile][0], made.total[tile][1]};
    async_proxy_fence();
    __syncwarp();
    if (elect_one()) {
      const u32 from = shared_address(handed), full = shared_address(&shared_.handed_full[step_.at][rank_]);
      mbarrier_arrive(full);
#pragma unroll
      for (int other = 1; other < kBlocksTogether; ++other) {
        const u32 block = u32(rank_ + other) % kBlocksTogether;
        bulk_hand_over(block_address(from, block), from, 2 * sizeof(Handed), block_address(full, block));
      }
    }
    __syncwarp();
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  int rank_, lane_, warp_;
  u32 weights_, free_ = 0;  // where a lane writes weights; parities
  Ring<kStages> stage_;
  Ring<SharedStorage::kSteps> step_;
  u32 q_[4 * kKChunks][4];
};

}  // namespace imbrex::cuda

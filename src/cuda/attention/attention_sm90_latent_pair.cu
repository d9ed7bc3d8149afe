// Attention over latents with wgmma and TMA, for sm_90a: keys of many dims, of which values are the first (KvFormat::latent), as in the
// absorbed form of MLA. Host side: cuda/attention/attention_sm90_latent_pair.cpp.
//
// Two thread blocks of a cluster take 64 rows together, each a half of the dims, for scores and for the output: so each loads half of every
// key, once, for both, and registers hold the output of a piece and the sums of pieces before it. Each sends what it has of the scores to
// the other one, and both make the same weights of them. In a block one warpgroup multiplies scores; two make weights, each of half of the
// keys, and multiply values, each for half of the block's dims; one warp loads, another one finds items.
// docs/kernels/cuda_sm90_latent.md has the measurements.
#include "attention_sm90_latent_pair_scores.cuh"
#include "attention_sm90_latent_pair_sums.cuh"

namespace imbrex::cuda {

// Registers of a thread of the warpgroups that multiply values, of the one that multiplies scores, and of the one that loads. Where the
// first ones have fewer dims of the output, the others get what is left.
constexpr int kOutputRegisters = kTeamDims > 64 ? 192 : 152, kScoreRegisters = kTeamDims > 64 ? 104 : 128,
              kLoadRegisters = kTeamDims > 64 ? 24 : 64;
static_assert(128 * (kConsumers * kOutputRegisters + kScoreRegisters + kLoadRegisters) <= 65536);

// Log2 units that a row's maximum may outgrow its reference by.
constexpr float kSlack = 8.f;

// A warpgroup that makes weights and multiplies values.
class Consumer {
 public:
  DEVICE Consumer(const AttentionParams& p, const Half& half, SharedStorage& shared)
      : p_(p), half_(half), shared_(shared), team_(warp_id() / 4), row_warp_(warp_id() % 4) {}

  DEVICE void run() {
    each_item(shared_, [&](const Item& item) { run_item(item); });
  }

 private:
  using Part = Fragment<kTeamKeys>;  // of a tile's scores: those of the team's keys

  // These are computed where they are needed, because registers are few.
  DEVICE int lane() const { return computed_here(int(threadIdx.x)) % 32; }
  DEVICE int row() const { return row_warp_ * 16 + lane() / 4; }
  // Of the block's chunks, the team's first one. Both teams compute the middle one of an odd number, and one stores it.
  DEVICE int first_chunk() const { return team_ * (kHalfChunks - kTeamChunks); }
  DEVICE bool stores(int chunk) const { return kHalfChunks % kConsumers == 0 || team_ == 0 || chunk > 0; }
  DEVICE int first_key(int tile) const { return tile * kTileKeys + team_ * kTeamKeys; }
  DEVICE static int tiles_of_piece(const Item& item) { return item.piece > 0 ? item.piece / kTileKeys : kFar; }
  DEVICE void meet() const { named_barrier_sync(kMeeting, kTogether); }

  DEVICE void run_item(const Item& item) {
    const Tiles tiles = tiles_of(item);
    const int whole_end = max(0, min(item.hi, visible_keys(p_, item.position_of(0)).hi)) / kTileKeys;  // of tiles that every row sees
    // Rows that the item does not have may have anything for queries: their scores shall not move references.
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = row() + 8 * h < item.num_rows ? logit_scale(p_, item.kv_head) * kLog2e : 0.f;
    Sums piece;
    Tree tree;
    piece.clear(0.f);
    stage_.next();  // of queries
    Part s;
    float total[2];
    const auto take_tile = [&](int tile, const Ring<kStages>& stage) {
      take_scores(s);
      if (tile < whole_end) return;
      Rows rows;
      set_seen(rows, p_, item, row());
      hide(first_key(tile), rows, s);
      clear(stage, item.lo - tile * kTileKeys, item.hi - tile * kTileKeys);
    };
    take_tile(tiles.first, stage_);
    int left = tiles_of_piece(item);  // of the piece at work
    bool begins = true, outgrown = false;
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile) {
      if (begins) tree.go_on(p_);
      if (begins || named_barrier_any(kMeeting, kTogether, outgrown)) move_references(begins, scale, s, total, piece);
#pragma unroll
      for (int h = 0; h < 2; ++h) piece.sum[h] += total[h];
      start_values(begins, piece.out);
      ++step_;
      const bool last = tile == tiles.end - 1;
      begins = --left == 0 || last;
      // While these values are multiplied, the scores of the next tile become weights. Most tiles do not move a reference: so they are
      // relative to the one that is there, and are computed anew where a row's maximum has outgrown it.
      Ring<kStages> next = stage_;
      next.next();
      if (!last) take_tile(tile + 1, next);
      if (!begins) outgrown = put_weights(scale, s, piece.reference, total);
      finish<0>(piece.out);
      leave_scores();
      report(shared_.empty[stage_.at]);
      stage_ = next;
      if (!begins) continue;
      total_sums(piece);
      tree.add(piece);
      piece.clear(0.f);
      left = tiles_of_piece(item);
    }
    store(item, tree.end(p_));
  }

  // Adds the sums over both halves of the dims, for the team's keys.
  DEVICE void take_scores(Part& s) {
    const int first = team_ * kTilesOf<Part>, lane = this->lane();
    const auto exchange = ring_at<SharedStorage::kScoreSlots>(step_);
    mbarrier_wait(shared_address(&shared_.scores_full[exchange.at][row_warp_]), exchange.parity);
    const u32 sums = shared_address(&shared_.sums[row_warp_][first][lane]),
              others = shared_address(&shared_.others[exchange.at][row_warp_][first][lane]);
#pragma unroll
    for (int i = 0; i < kTilesOf<Part>; ++i) {
      constexpr u32 kBytes = sizeof shared_.sums[0][0];
      const uint4 x = load_shared(sums + u32(i) * kBytes), y = load_shared(others + u32(i) * kBytes);
      if (i % 2 == 1) asm volatile("" ::: "memory");  // registers are few
      set_four(
          s, i,
          {float_of(x.x) + float_of(y.x), float_of(x.y) + float_of(y.y), float_of(x.z) + float_of(y.z), float_of(x.w) + float_of(y.w)});
    }
    report(shared_.sums_empty);
  }
  // Reports to the other block that its sums of the tile before have been taken. Not at once: a fence would wait until the report is there.
  DEVICE void leave_scores() const {
    __syncwarp();
    const u32 slot = (step_ - 1) % SharedStorage::kScoreSlots;
    if (lane() == 0) mbarrier_arrive_at<false>(shared_address(&shared_.sent_empty[slot]), half_.other());
  }

  // Values of keys outside of [lo, hi) of a tile may be anything, and zero times NaN is NaN.
  DEVICE void clear(const Ring<kStages>& stage, int lo, int hi) const {
    clear_values<kTeamChunks, kChunkBytes>(shared_address(shared_.stage[stage.at]) + first_chunk() * kChunkBytes, lo, hi);
  }

  // Scores become weights, in shared memory, whose sums are `total`. True if one has outgrown its row's reference.
  DEVICE bool put_weights(const float (&scale)[2], const Part& s, const float (&reference)[2], float (&total)[2]) const {
    bool outgrown = false;
    Part weights;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      outgrown |= greatest(s, h) * scale[h] > reference[h] + kSlack;
      float part[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 2 * kTilesOf<Part>; ++i) {
        float& weight = at(weights, i / 2, h, i % 2);
        weight = exp2_approx(fmaf(at(s, i / 2, h, i % 2), scale[h], -reference[h]));
        part[i % 2] += weight;
      }
      total[h] = part[0] + part[1];
    }
    put(weights);
    return outgrown;
  }
  // References follow the scores of a tile, sums so far follow them, and weights are computed anew. Both teams meet.
  DEVICE void move_references(bool begins, const float (&scale)[2], const Part& s, float (&total)[2], Sums& piece) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = max_over<4>(greatest(s, h)) * scale[h];
      if (lane() % 4 == 0) shared_.of_teams[team_][row() + 8 * h] = top;
    }
    meet();
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = fmaxf(shared_.of_teams[0][row() + 8 * h], shared_.of_teams[1][row() + 8 * h]);
      move_reference(piece.reference[h], top, kSlack, 0.f, factor[h]);
    }
    if (!begins) piece.rescale(factor);
    put_weights(scale, s, piece.reference, total);
    meet();
  }
  DEVICE void put(const Part& weights) const {
    const int lane = this->lane(), row = row_warp_ * 16 + lane % 16;
    const u32 to = shared_address(shared_.weights[step_ % kWeightSlots]) + row * 128;
#pragma unroll
    for (int i = 0; i < kTeamKeys / 16; ++i) {
      u32 pairs[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 x = pair(weights, 2 * i + k / 2, k % 2);
        pairs[k] = kQType == kBf16 ? pack_bf16(x.x, x.y) : pack_f16(x.x, x.y);
      }
      store_matrix(to + ((team_ * (kTeamKeys / 8) + 2 * i + lane / 16) ^ row % 8) * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    async_proxy_fence();
  }

  DEVICE void start_values(bool begins, Out& out) const {
    const u32 values = tile_at(shared_address(shared_.stage[stage_.at]) + first_chunk() * kChunkBytes, kChunkBytes),
              weights = tile_at(shared_address(shared_.weights[step_ % kWeightSlots]), 16);
    if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step)
      Wgmma<kTeamDims>::template shared<true>(out, descriptor(weights, step * 32), descriptor(values, step * 2048), !begins || step > 0);
    wgmma_commit();
  }

  // The sums of weights of all of a piece's keys: until here each thread has those of its own.
  DEVICE void total_sums(Sums& piece) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = sum_over<4>(piece.sum[h]);
      if (lane() % 4 == 0) shared_.of_teams[team_][row() + 8 * h] = sum;
    }
    meet();
#pragma unroll
    for (int h = 0; h < 2; ++h) piece.sum[h] = shared_.of_teams[0][row() + 8 * h] + shared_.of_teams[1][row() + 8 * h];
    meet();
  }

  // As store_rows() does, with fewer registers: there are none to turn pairs of dims into longer pieces.
  DEVICE void store(const Item& item, const Sums& sums) const {
    const int quad_lane = lane() % 4, first_row = row(), first_dim = half_.first_dim() + first_chunk() * 64,
              dim = first_dim + quad_lane * 2;
    const bool first = quad_lane == 0 && first_dim == 0, wide = out_is_wide(p_);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h;
      if (row >= item.num_rows) continue;
      if (item.partial >= 0) {
        const long at = partial_row(p_, item, row);
        if (first) reinterpret_cast<float2*>(p_.partial_state)[at] = {sums.reference[h], sums.sum[h]};
        float2* const to = reinterpret_cast<float2*>(p_.partial_out + at * kHeadDimV + dim);
        each_pair(sums.out, h, [=](const float2& x, int tile) { to[4 * tile] = x; });
      } else {
        const int token = item.token_of(row), head = item.head_of(row);
        const RowEnd end = row_end(p_, head, sums.reference[h], sums.sum[h]);
        const float factor = end.factor * kv_scale(p_.v, item.kv_head);
        if (first) store_lse(p_, token, head, end.lse);
        char* const to = out_row(p_, token, head) + dim * element_bytes(kOutType);
        each_pair(sums.out, h, [=](const float2& x, int tile) {
          store_pair(to + 8 * tile * element_bytes(kOutType), wide, {ended(x.x, factor), ended(x.y, factor)});
        });
      }
    }
  }
  // Does verb(pair, tile) to what the thread has of a row, in the team's chunks.
  template <class Verb>
  DEVICE void each_pair(const Out& out, int h, const Verb& verb) const {
#pragma unroll
    for (int tile = 0; tile < kTeamDims / 8; ++tile)
      if (stores(tile / 8)) verb(pair(out, tile, h), tile);
  }

  static constexpr int kMeeting = 2, kTogether = 128 * kConsumers;  // the teams' barrier, and its threads

  const AttentionParams& p_;
  const Half& half_;
  SharedStorage& shared_;
  int team_, row_warp_;  // the warpgroup's number, and the warp's within it
  Ring<kStages> stage_;
  u32 step_ = 0;  // tiles whose values have been begun
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90_latent_pair(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                               const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap rope_map) {
  if (is_idle(p)) return;
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const Half half;
  if (threadIdx.x == 0) {
    begin_barriers(shared);
    if constexpr (kMaps) tma_prefetch_map(k_map);
  }
  cluster_sync();
  if (!begin_launch(p)) return;
  const int wg = shuffle(int(threadIdx.x / 128), 0);
  if (wg < kConsumers) {
    registers_grow<kOutputRegisters>();
    Consumer(p, half, shared).run();
  } else if (wg == kConsumers) {
    registers_shrink<kScoreRegisters>();
    Scorer(p, half, shared).run();
  } else {
    registers_shrink<kLoadRegisters>();
    const int warp = warp_id() % 4;
    if (warp == 0) find_items_together(p, half, shared);
    if (warp == 1) produce_stages(p, half, q_map, k_map, rope_map, shared);
  }
  // The other block writes to this one's memory, and reports to its barriers, until it is done.
  __syncwarp();
  cluster_sync();
  end_launch(p);
}

}  // namespace imbrex::cuda

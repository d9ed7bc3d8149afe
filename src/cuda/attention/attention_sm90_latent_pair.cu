// Attention over latents with wgmma and TMA, for sm_90a: keys of many dims, of which values are the first (KvFormat::latent), as in the
// absorbed form of MLA. Host side: cuda/attention/attention_sm90_latent_pair.cpp.
//
// Two thread blocks of a cluster take 64 rows together. Keys come in steps of two tiles. Each block computes the scores of one of them,
// over all dims, and its weights, which both get; and each has a half of the output's dims, for which it needs the values of both tiles. So
// the half of a tile's dims that is the other block's is loaded once, to both; and registers hold the output of a piece and the sums of
// pieces before it. In a block one warpgroup computes scores and weights, and keeps most of the queries in registers; two multiply values,
// each for half of the block's dims; of the fourth, each warp has an errand of its own. docs/kernels/cuda_sm90_latent.md has the
// measurements.
#include "attention_sm90_latent_pair_scores.cuh"
#include "attention_sm90_latent_pair_sums.cuh"

namespace imbrex::cuda {

// Registers of a thread of the warpgroups that multiply values, of the one that computes scores, and of the one that loads.
// Where few queries are in registers, the last ones get what these leave. An item of a tree of drafts takes more of them to find.
constexpr int kOutputRegisters = 168, kScoreRegisters = kQKept > 5 && !kTree ? 152 : 144, kLoadRegisters = 176 - kScoreRegisters;
static_assert(128 * (kConsumers * kOutputRegisters + kScoreRegisters + kLoadRegisters) <= 65536);

// A warpgroup that multiplies values, for some of the block's dims.
class Multiplier {
 public:
  DEVICE Multiplier(const AttentionParams& p, const Half& half, SharedStorage& shared)
      : p_(p), half_(half), shared_(shared), team_(warp_id() / 4), row_warp_(warp_id() % 4) {}

  DEVICE void run() {
    each_item(shared_, [&](const Item& item) { run_item(item); });
  }

 private:
  // These are computed where they are needed, because registers are few.
  DEVICE int lane() const { return computed_here(int(threadIdx.x)) % 32; }
  DEVICE int row() const { return row_warp_ * 16 + lane() / 4; }
  // Of the block's chunks, the team's first one. Both teams compute the middle one of an odd number, and one stores it.
  DEVICE int first_chunk() const { return team_ * (kHalfChunks - kTeamChunks); }
  DEVICE bool stores(int chunk) const { return kHalfChunks % kConsumers == 0 || team_ == 0 || chunk > 0; }

  DEVICE void run_item(const Item& item) {
    Sums piece;
    Tree tree;
    piece.clear(0.f);
    stages_ += kQStages;  // of queries
    bool begins = true;   // a piece
#pragma unroll 1
    for (bool last = false; !last;) {
      if (begins) tree.go_on(p_);
      // All that can be is computed in front of the wait: what follows it, the matrix unit waits for.
      const auto place = ring_at<kStages>(stages_);
      const auto slot = ring_at<kStages>(steps_);
      const Stage& stage = shared_.stage[place.at];
      const u32 own_at = shared_address(stage.own) + first_chunk() * kChunkBytes,
                crossed_at = shared_address(stage.crossed[half_.other()]) + first_chunk() * kChunkBytes;
      const u32 own_values = tile_at(own_at, kChunkBytes), crossed_values = tile_at(crossed_at, kChunkBytes),
                weights = tile_at(shared_address(shared_.weights[slot.at][half_.rank]), 16),
                others = tile_at(shared_address(shared_.weights[slot.at][half_.other()]), 16);
      mbarrier_wait(shared_address(&shared_.full[place.at]), place.parity);
      mbarrier_wait(shared_address(&shared_.weights_full[slot.at]), slot.parity);
      if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
      const Note note = load_shared_element<4>(shared_address(&shared_.note[slot.at][row_warp_]));
      if (note.has_factors()) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float factor = shared_.factor[slot.at][row() + 8 * h];
          each_of_row(piece.out, h, [=](float& x, int) { x *= factor; });
        }
      }
      if (note.is_edge()) {
        const int begin = note.number() * kStepKeys, mine = begin + half_.rank * kTileKeys, theirs = begin + half_.other() * kTileKeys;
        clear_values<kTeamChunks, kChunkBytes>(own_at, item.lo - mine, item.hi - mine);
        clear_values<kTeamChunks, kChunkBytes>(crossed_at, item.lo - theirs, item.hi - theirs);
        named_barrier_sync(2 + team_, 128);
      }
      wgmma_fence();
      add_values(piece.out, others, crossed_values, begins);
      wgmma_commit();
      add_values(piece.out, weights, own_values, false);
      wgmma_commit();
      wgmma_wait<1>();
      leave_crossed(place.at);
      finish<0>(piece.out);
      last = note.is_last(), begins = note.ends();
      if (!begins) {
        leave(place.at);
        continue;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 end = shared_.end[slot.at][row() + 8 * h], theirs = shared_.sums[slot.at][row_warp_][lane() / 4];
        piece.reference[h] = end.x, piece.sum[h] = end.y + (h == 0 ? theirs.x : theirs.y);
      }
      leave(place.at);
      tree.add(piece);
    }
    store(item, tree.end(p_));
  }

  DEVICE static void add_values(Out& out, u32 weights, u32 values, bool begins) {
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step)
      Wgmma<kTeamDims>::template shared<true>(out, weight_descriptor(weights, step * kWeightPartBytes), descriptor(values, step * 2048),
                                              !begins || step > 0);
  }
  // The values that the other block has brought to both have been multiplied: its next ones may come.
  DEVICE void leave_crossed(int stage) const {
    __syncwarp();
    if (lane() == 0) mbarrier_arrive_at<false>(shared_address(&shared_.empty[stage]), u32(half_.other()));
  }
  DEVICE void leave(int stage) {
    report(shared_.empty[stage]);
    ++stages_, ++steps_;
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

  const AttentionParams& p_;
  const Half& half_;
  SharedStorage& shared_;
  int team_, row_warp_;         // the warpgroup's number, and the warp's within it
  u32 stages_ = 0, steps_ = 0;  // that are behind
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90_latent_pair(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                               const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap) {
  if (is_idle(p)) return;
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const Half half;
  if (threadIdx.x == 0) {
    begin_barriers(shared);
    if constexpr (kMaps) tma_prefetch_map(k_map);
  }
  cluster_sync();
  constexpr int kLoader = 4 * (kConsumers + 1);  // the first warp that loads
  const bool found = warp_id() == kLoader && find_first_item<1>(p, half.rank, kBlocksTogether, shared);
  if (warp_id() == kLoader + 3) fetch_first_step(p, half, k_map);
  if (!begin_launch(p)) return;
  const int wg = shuffle(int(threadIdx.x / 128), 0);
  if (wg < kConsumers) {
    registers_grow<kOutputRegisters>();
    Multiplier(p, half, shared).run();
  } else if (wg == kConsumers) {
    registers_grow<kScoreRegisters>();
    Scorer(p, half, shared).run();
  } else {
    registers_shrink<kLoadRegisters>();
    const int warp = warp_id() % 4;
    if (warp == 0) find_items_together<1>(p, half.rank, kBlocksTogether, shared, found);
    if (warp == 1) produce_stages(p, half, q_map, k_map, shared);
    if (warp == 2) hand_over_weights(half, shared);
    if (warp == 3) fetch_steps(p, half, shared);
  }
  // The other block writes to this one's memory, and reports to its barriers, until it is done.
  __syncwarp();
  cluster_sync();
  end_launch(p);
}

}  // namespace imbrex::cuda

// Attention over latents with wgmma and TMA, for sm_90a: keys of many dims, of which values are the first (KvFormat::latent), as in the
// absorbed form of MLA. Host side: cuda/attention/attention_sm90_latent.cpp.
//
// The output of 64 rows and 512 dims takes half of all registers. So two warpgroups have a half of the dims each, and nothing else to do
// than to multiply weights by values; a third computes scores and weights, and keeps most of the queries in registers, so that shared
// memory is read for keys almost alone; one warp loads, another one finds items. A tile of keys is loaded once and read three times: for
// its scores, and for each half of its values. The matrix unit multiplies the values of one tile while the exponentials of the next are
// computed. Weights go through shared memory, in slots of which each also says whether sums so far have to be rescaled, and ends a piece.
// docs/kernels/cuda_sm90_latent.md has the measurements.
#include "attention_sm90_latent_fold.cuh"
#include "attention_sm90_latent_scores.cuh"

namespace imbrex::cuda {

// Registers of a thread of the warpgroups that multiply values, of the one that computes scores, and of the one that loads.
// With fewer dims of the output the one that loads gets what these leave; two warps that copy rows get more from scores.
constexpr int kForCopies = kLoadWarps > 1 ? 8 : 0;
constexpr int kOutputRegisters = kTeamDims > 192 ? 160 : 144, kScoreRegisters = 160 - kForCopies,
              kLoadRegisters = (kTeamDims > 192 ? 32 : 64) + kForCopies;
static_assert(128 * (kConsumers * kOutputRegisters + kScoreRegisters + kLoadRegisters) <= 65536);
// Dims of a product: ptxas takes no instruction with more registers than a thread has at launch.
constexpr int kProductDims = kTeamDims > 192 ? kTeamDims / 2 : kTeamDims;

// --- the warpgroups that multiply values, each for some of the output's dims

class Multiplier {
 public:
  DEVICE Multiplier(const AttentionParams& p, SharedStorage& shared)
      : p_(p), shared_(shared), team_(warp_id() / 4), row_warp_(warp_id() % 4) {}

  DEVICE void run() {
    each_item(shared_, [&](const Item& item) { run_item(item); });
  }

 private:
  using Out = Fragment<kTeamDims>;

  // These are computed where they are needed, because registers are few.
  DEVICE int row() const { return row_warp_ * 16 + computed_here(int(threadIdx.x)) % 32 / 4; }
  DEVICE int first_dim() const { return team_ * kTeamDims; }

  DEVICE static void start_output(Out& out, u32 weights, u32 values, bool begins) {
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
#pragma unroll
      for (int dim = 0; dim < kTeamDims; dim += kProductDims)
        Wgmma<kProductDims>::template shared<true>(part_of<kProductDims>(out, dim), weight_descriptor(weights, step * kWeightPartBytes),
                                                   descriptor(values, step * 2048 + dim / 64 * kChunkBytes), !begins || step > 0);
    }
    wgmma_commit();
  }

  DEVICE void run_item(const Item& item) {
    Out out;
    fill(out, 0.f);
#pragma unroll
    for (int part = 0; part < kQStages; ++part) stage_.next();  // of queries
    int number = 1;                                             // of the piece at work, from 1 on
    bool begins = true;                                         // a piece
    for (bool last = false; !last;) {
      // All that can be is computed in front of the wait: what follows it, the matrix unit waits for.
      const u32 keys = shared_address(shared_.stage[stage_.at]) + first_dim() / 64 * kChunkBytes, values = tile_at(keys, kChunkBytes),
                weights = tile_at(shared_address(shared_.weights[slot_.at]), 16),
                note_at = shared_address(&shared_.note[slot_.at][row_warp_]);
      mbarrier_wait(shared_address(&shared_.weights_full[slot_.at]), slot_.parity);
      if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
      const Note note = load_shared_element<4>(note_at);
      if (note.has_factors()) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float factor = shared_.factor[slot_.at][row() + 8 * h];
          each_of_row(out, h, [=](float& x, int) { x *= factor; });
        }
      }
      if (note.is_edge()) {
        const int begin = note.number() * kTileKeys;
        clear_values<kTeamDims / 64, kChunkBytes>(keys, item.lo - begin, item.hi - begin);
        named_barrier_sync(2 + team_, 128);
      }
      wgmma_fence();
      start_output(out, weights, values, begins);
      finish<0>(out);
      if (begins && number > 1) {  // what was written at the end of the piece before is there by now: the fence does not wait long
        async_proxy_fence_global();
        report(shared_.node_written);
      }
      last = note.is_last(), begins = note.ends();
      float reference[2], total[2];
      if (begins) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 end = shared_.end[slot_.at][row() + 8 * h];
          reference[h] = end.x, total[h] = end.y;
        }
      }
      leave_to_all(shared_.empty[stage_.at]);
      report(shared_.weights_empty[slot_.at]);
      stage_.next(), slot_.next();
      if (!begins) continue;
      fold(row_warps(item), number, last, reference, total, out);
      if (last && row_warp_ < row_warps(item))
        store_pairs<kTeamDims>(p_, item, row(), reference, total, out, first_dim());  // rows that the item does not have cost nothing
      ++number;
    }
  }

  // Folds the sums of the run's piece `number`, counted from 1, with those before it, which are in the stages at hand.
  DEVICE void fold(int row_warps, int number, bool last, float (&reference)[2], float (&total)[2], Out& out) {
    const int parts = joined_nodes(number, last) * row_warps;
#pragma unroll 1
    for (int i = 0; i < parts; ++i, stage_.next()) {
      mbarrier_wait(shared_address(&shared_.full[stage_.at]), stage_.parity);
      if (i % row_warps == row_warp_) fold_staged(shared_address(shared_.stage[stage_.at]) + team_ * kNodePartBytes, reference, total, out);
      leave_to_all(shared_.empty[stage_.at]);
    }
    if (!last && row_warp_ < row_warps)
      put_node(node_rows(p_, level_of_piece(number, false), row_warp_) + team_ * kNodePartFloats, reference, total, out);
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  int team_, row_warp_;  // the warpgroup's number, and the warp's within it
  Ring<kStages> stage_;
  Ring<kWeightSlots> slot_;
};

DEVICE void begin_barriers(SharedStorage& shared) {
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(shared_address(&shared.full[i]), kReporters);
    mbarrier_init(shared_address(&shared.empty[i]), kRowCluster * (kScoreWarps + kOutputWarps));
  }
  for (u64& copied : shared.copied) mbarrier_init(shared_address(&copied), kLoaders * kLoadWarps);
  for (int i = 0; i < kWeightSlots; ++i) {
    mbarrier_init(shared_address(&shared.weights_full[i]), kScoreWarps);
    mbarrier_init(shared_address(&shared.weights_empty[i]), kOutputWarps);
  }
  for (int i = 0; i < SharedStorage::kItemSlots; ++i) {
    mbarrier_init(shared_address(&shared.item_full[i]), 1);
    mbarrier_init(shared_address(&shared.item_empty[i]), kScoreWarps + kOutputWarps + kLoadWarps + kHandsOver);
  }
  mbarrier_init(shared_address(&shared.item_wanted), 1);
  mbarrier_init(shared_address(&shared.node_written), kOutputWarps);
  shared.numbers.begin();
  mbarrier_fence_init();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90_latent(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                          const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap) {
  if (is_idle(p)) return;
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    begin_barriers(shared);
    if constexpr (kMaps && !kSmallPages) tma_prefetch_map(k_map);
  }
  if constexpr (kRowCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  constexpr int kLoader = 4 * (kConsumers + 1);  // the first warp that loads
  bool found = false;
  if (warp_id() == kLoader) {
    if constexpr (kRowCluster > 1) {
      found = find_first_item<kRowCluster>(p, rank_in_cluster(), kRowCluster, shared);
    } else {
      found = find_first_item(p, 0, shared);
    }
  }
  if (warp_id() == kLoader + 1) fetch_latents_ahead(p, k_map, first_task(0));
  if (!begin_launch(p)) return;
  const int wg = shuffle(int(threadIdx.x / 128), 0);
  if (wg < kConsumers) {
    registers_grow<kOutputRegisters>();
    Multiplier(p, shared).run();
  } else if (wg == kConsumers) {
    registers_grow<kScoreRegisters>();
    Scorer(p, shared).run();
  } else {
    registers_shrink<kLoadRegisters>();
    const int warp = warp_id() % 4;
    if (warp == 0) {
      if constexpr (kRowCluster > 1) {
        find_items_together<kRowCluster>(p, rank_in_cluster(), kRowCluster, shared, found);
      } else {
        const auto no_load = [](const Item&) {};  // queries come with the keys
        find_items(p, 0, shared, no_load, found);
      }
    }
    if (warp == 1) produce_stages(p, 0, q_map, k_map, shared);
    if (kHandsOver && warp == 2) hand_over_tiles(shared);
    if (kLoadWarps > 1 && warp == 3) produce_stages(p, 1, q_map, k_map, shared);
  }
  if constexpr (kRowCluster > 1) {  // the other block writes to this one's memory, and reports to its barriers, until it is done
    __syncwarp();
    cluster_sync();
  }
  end_launch(p);
}

}  // namespace imbrex::cuda

// Attention over latents with wgmma and TMA, for sm_90a, where there are few tasks: keys of many dims, of which values are the first
// (KvFormat::latent), as in the absorbed form of MLA. Host side: cuda/attention/attention_sm90_latent_spread.cpp.
//
// It computes the items of attention_sm90_latent.cu, or of attention_sm90_latent_pair.cu, and the same bits, with all thread blocks of a
// cluster for 64 rows. A block has some dims of the output, 128 or 256, for which it needs the weights of all keys; and it makes the
// weights of two tiles of each step, for all blocks. So the blocks tell each other the maxima of their tiles, then their weights. One
// warpgroup computes scores and weights, and keeps the queries in registers; one multiplies values; of the third three warps have an errand
// each. The scores of a step are computed while the values of the step before are multiplied. docs/kernels/cuda_sm90_latent.md has the
// measurements.
#include "attention_sm90_latent_spread_scores.cuh"
#include "attention_sm90_tree.cuh"

namespace imbrex::cuda {

// Registers of a thread of the warpgroups that compute scores, multiply values, and load: all that a thread block has at launch.
constexpr int kScoreRegisters = 248, kValueRegisters = 200, kLoadRegisters = 56, kLaunchRegisters = 65536 / kThreads / 8 * 8;
static_assert(128 * (kScoreRegisters + kValueRegisters + kLoadRegisters) <= kThreads * kLaunchRegisters);

using Out = Fragment<kOwnDims>;
using Sums = FragmentSums<Out, !kPaired>;

// Whether registers hold sums of earlier pieces beside those of a piece. ptxas keeps products of several paths under way only there.
constexpr bool kHoldsNodes = kOwnDims <= 128;
static_assert(!kPaired || kHoldsNodes);

// The warpgroup that multiplies values.
class Multiplier {
 public:
  DEVICE Multiplier(const AttentionParams& p, int rank, SharedStorage& shared)
      : p_(p), shared_(shared), rank_(rank), lane_(lane_id()), warp_(warp_id() % 4) {}

  DEVICE void run() {
    each_item(shared_, [&](const Item& item) { run_item(item); });
  }

 private:
  DEVICE int row() const { return warp_ * 16 + lane_ / 4; }

  DEVICE void run_item(const Item& item) {
    Sums piece;
    if constexpr (kHoldsNodes) {
      StoredTree<Sums, kOwnDims, !kPaired> tree;
      each_step(item, [&](const Step& step) {
        if (step.begins) tree.go_on(p_);
        run_step(item, step, piece);
        if (step.ends) tree.add(piece);
      });
      Sums& all = tree.end(p_);
      store_rows<kOwnDims>(p_, item, row(), all.reference, all.sum, all.out, rank_ * kOwnDims);
    } else {
      MemoryTree<Sums, kOwnDims> tree;
      each_step(item, [&](const Step& step) {
        run_step(item, step, piece);
        if (step.ends) tree.add(p_, step.last, piece);
      });
      store_pairs<kOwnDims>(p_, item, row(), piece.reference, piece.sum, piece.out, rank_ * kOwnDims);
    }
  }

  DEVICE void run_step(const Item& item, const Step& step, Sums& piece) {
    if (warp_ == 0 && lane_ < step.parts() && lane_ != rank_)
      mbarrier_arrive_expect(shared_address(&shared_.handed_full[step_.at][lane_]), sizeof shared_.handed[0][0]);
    __syncwarp();
    mbarrier_wait(shared_address(&shared_.noted[step_.at]), step_.parity);
    const u32 counts = step.begins ? ~1u : ~0u;  // sums do not come to what a piece begins with
    u32 moved = 0;                               // in any warp
#pragma unroll
    for (int warp = 0; warp < kScoreWarps; ++warp) moved |= shared_.moved[step_.at][warp] & counts;
    if (step.begins) piece.sum[0] = piece.sum[1] = odd_[0] = odd_[1] = 0.f;
    const bool whole = step.tiles == kStepTiles && step.first * kTileKeys >= item.lo && (step.first + kStepTiles) * kTileKeys <= item.hi;
    if (kHoldsNodes && moved == 0 && whole) {
      add_whole_values(step.begins, piece);
    } else {
      add_values(item, step, moved, shared_.moved[step_.at][warp_] & counts, piece);
    }
    if (step.ends) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        piece.reference[h] = shared_.reference[step_.at][row() + 8 * h], piece.sum[h] = sum_over<4>(piece.sum[h]);
        if constexpr (kPaired) piece.sum[h] += sum_over<4>(odd_[h]);
      }
    }
    report(shared_.notes_read[step_.at]);
    step_.next();
  }

  // Adds the values of a step. Where references move at a tile, as `moved` says of any warp's rows and `own` of this one's, sums so far are
  // multiplied by factors: all warps wait for their products there, since these are of all of them.
  DEVICE void add_values(const Item& item, const Step& step, u32 moved, u32 own, Sums& piece) {
    int before = 0;  // the stage before
#pragma unroll 1
    for (int part = 0; part < step.parts(); ++part) {
      const Handed(&handed)[kTileRows / 8] = shared_.handed[step_.at][part];
      const u32 values_at = shared_address(shared_.values[stage_.at]);
      const u32 values = tile_at(values_at, kPairBytes), weights = tile_at(shared_address(handed), 16);
      const int tiles = step.tiles_of(part), first = step.first + part * kTilesEach, bit = step_.at * kBlocksTogether + part;
      wait_for_values();
      mbarrier_wait(shared_address(&shared_.handed_full[step_.at][part]), parities_ >> bit & 1);
      parities_ ^= 1u << bit;
      if (first * kTileKeys < item.lo || (first + tiles) * kTileKeys > item.hi) {
        for (int tile = 0; tile < tiles; ++tile) {
          const int begin = (first + tile) * kTileKeys;
#pragma unroll
          for (int chunk = 0; chunk < kOwnChunks; ++chunk)
            clear_values<1, kChunkBytes>(values_at + chunk * kPairBytes + tile * kChunkBytes, item.lo - begin, item.hi - begin);
        }
        named_barrier_sync(1, 128);
      }
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) {
        const int tile = takes_odd_first() ? tiles - 1 - i : i,
                  number = part * kTilesEach + (kPaired ? 0 : tile);  // that may move references
        const float2 total = handed[2 * warp_ + tile].totals[lane_];
        if ((!kPaired || i == 0) && (moved >> number & 1) != 0) {
          finish<0>(piece.out);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float factor = (own >> number & 1) != 0 ? shared_.factor[step_.at][number][row() + 8 * h] : 1.f;
            piece.sum[h] *= factor, odd_[h] *= factor;
            each_of_row(piece.out, h, [=](float& x, int) { x *= factor; });
          }
        }
        add_total(total, tile, piece);
        multiply<1>(piece.out, weights + tile * (kTileKeys / 16) * kPartBytes / 16, values + tile * kChunkBytes / 16,
                    step.begins && part == 0 && i == 0);
      }
      if (part > 0) {
        wgmma_wait<1>();
        leave(before, part - 1);
      }
      before = stage_.at;
      stage_.next();
    }
    finish<0>(piece.out);
    leave(before, step.parts() - 1);
  }
  // The same for a step that has all of its tiles, of keys that are all the item's. Between two products little is done.
  DEVICE void add_whole_values(bool begins, Sums& piece) {
    Ring<kValueStages> before;
#pragma unroll
    for (int part = 0; part < kBlocksTogether; ++part) {
      const Handed(&handed)[kTileRows / 8] = shared_.handed[step_.at][part];
      const int bit = step_.at * kBlocksTogether + part;
      const u32 values = tile_at(shared_address(shared_.values[stage_.at]), kPairBytes), weights = tile_at(shared_address(handed), 16);
      wait_for_values();
      mbarrier_wait(shared_address(&shared_.handed_full[step_.at][part]), parities_ >> bit & 1);
      multiply<kTilesEach>(piece.out, weights, values, begins && part == 0);
#pragma unroll
      for (int tile = 0; tile < kTilesEach; ++tile) {
        const float2 total = handed[2 * warp_ + tile].totals[lane_];
        add_total(total, tile, piece);
      }
      if (part > 0) {
        wgmma_wait<1>();
        leave(before.at, part - 1);
      }
      before = stage_;
      stage_.next();
    }
    parities_ ^= ((1u << kBlocksTogether) - 1) << step_.at * kBlocksTogether;
    finish<0>(piece.out);
    leave(before.at, kBlocksTogether - 1);
  }
  DEVICE void wait_for_values() const {
    mbarrier_wait(shared_address(&shared_.values_full[stage_.at]), stage_.parity);
    if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
  }
  // Of a pair of tiles: the blocks of attention_sm90_latent_pair.cu take each other's first, that with the first half of the dims the one
  // of odd number.
  DEVICE bool takes_odd_first() const { return kPaired && rank_ * kOwnDims < kHeadDimV / 2; }
  DEVICE void add_total(const float2& total, int tile, Sums& piece) {
    const bool odd = kPaired && tile != 0;
    piece.sum[0] += odd ? 0.f : total.x, piece.sum[1] += odd ? 0.f : total.y;
    if constexpr (kPaired) odd_[0] += odd ? total.x : 0.f, odd_[1] += odd ? total.y : 0.f;
  }
  // Begins the products of tiles.
  template <int tiles>
  DEVICE void multiply(Out& out, u32 weights, u32 values, bool begins) const {
    const int swapped = tiles > 1 && takes_odd_first() ? kTileKeys / 16 : 0;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < tiles * kTileKeys / 16; ++step) {
      const int i = step ^ swapped;
      Wgmma<kOwnDims>::template shared<true>(out, wgmma_descriptor(0, 0, sizeof(Handed), 3) | u32(weights + i * kPartBytes / 16),
                                             descriptor(values, i * 2048), !begins || step > 0);
    }
    wgmma_commit();
  }
  // What a block has made has been multiplied by values: it may make more.
  DEVICE void leave(int stage, int part) {
    __syncwarp();
    if (lane_ != 0) return;
    mbarrier_arrive(shared_address(&shared_.values_empty[stage]));
    mbarrier_arrive_at<false>(shared_address(&shared_.handed_free[step_.at]), u32(part));
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  int rank_, lane_, warp_;
  u32 parities_ = 0;           // of what each block hands over
  float odd_[2] = {0.f, 0.f};  // kPaired: sums of the weights of tiles of odd number, those of others are the piece's
  Ring<kValueStages> stage_;
  Ring<SharedStorage::kSteps> step_;
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90_latent_spread(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                                 const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap) {
  if (is_idle(p)) return;
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const int rank = rank_in_cluster();
  if (threadIdx.x == 0) {
    begin_barriers(rank, shared);
    if constexpr (!kSmallPages) tma_prefetch_map(k_map);
  }
  cluster_sync();
  const bool found = warp_id() == 8 && find_first_item<1>(p, rank, kBlocksTogether, shared);
  if (!begin_launch(p)) return;
  const int wg = shuffle(int(threadIdx.x / 128), 0);
  if (wg == 0) {
    registers_grow<kScoreRegisters>();
    Scorer(p, rank, shared).run();
  } else if (wg == 1) {
    registers_grow<kValueRegisters>();
    Multiplier(p, rank, shared).run();
  } else {
    registers_shrink<kLoadRegisters>();
    const int warp = warp_id() % 4;
    if (warp == 0) find_items_together<1>(p, rank, kBlocksTogether, shared, found);
    if (warp == 1) produce_keys(p, rank, k_map, shared, Queries{q_map});
    if (warp == 2) produce_values(p, rank, k_map, shared);
  }
  // Other blocks write to this one's memory, and report to its barriers, until they are done.
  __syncwarp();
  cluster_sync();
  end_launch(p);
}

}  // namespace imbrex::cuda

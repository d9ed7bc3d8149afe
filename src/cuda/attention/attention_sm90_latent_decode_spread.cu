// Attention of few rows over latents with wgmma and TMA, for sm_90a, where there are few tasks. Host side:
// cuda/attention/attention_sm90_latent_decode_spread.cpp.
//
// It computes the items of attention_sm90_latent_decode.cu with 16-bit keys, and the same bits, with all thread blocks of a cluster for the
// rows of a task. A block has some dims of the output, for which it needs the weights of all keys; and it makes the weights of one tile of
// each step, for all blocks. So the blocks tell each other the maxima of their tiles, then their weights. One warpgroup computes scores and
// weights, one multiplies values; of the third each warp has an errand of its own. docs/kernels/cuda_sm90_latent.md has the measurements.
#include "attention_sm90_latent_decode_spread_scores.cuh"

namespace imbrex::cuda {

// Registers of a thread of the warpgroups that compute, and of the one that loads: all that a thread block has at launch.
constexpr int kComputeRegisters = 224, kLoadRegisters = 56, kLaunchRegisters = 65536 / kThreads / 8 * 8;
static_assert(128 * (2 * kComputeRegisters + kLoadRegisters) <= kThreads * kLaunchRegisters);

// The warpgroup that multiplies values.
class Multiplier {
 public:
  DEVICE Multiplier(const AttentionParams& p, int rank, SharedStorage& shared)
      : p_(p), shared_(shared), rank_(rank), lane_(lane_id()), warp_(warp_id() % 4) {}

  DEVICE void run() {
    each_item(shared_, [&](const Item& item) { run_item(item); });
  }

 private:
  // A thread adds up what one warp has of a row's weights.
  using PartSums = float[2];
  static constexpr int kAdders = kTileRows * kScoreWarps;
  DEVICE int row() const { return int(threadIdx.x) % kTileRows; }
  DEVICE int part() const { return int(threadIdx.x) % kAdders / kTileRows; }

  DEVICE void run_item(const Item& item) {
    Tree tree;
    Sums piece;
    piece.clear();
    PartSums sums;
    const int first = tiles_of(item).first;
    bool is_first = true;  // of the pieces; of most items it is the last one too, and needs no tree
    each_step(item, [&](const Step& step) {
      if (step.begins) {
        is_first = step.first == first;
        tree.go_on(p_, piece);
        fill(sums, 0.f);
      }
      add_values(item, step, sums, piece);
      if (step.ends) end_piece(sums, piece);
      report(shared_.notes_read[step_.at]);
      step_.next();
      if (step.ends && !(is_first && step.last)) tree.add(piece);
    });
    const int first_dim = rank_ * kOwnDims + warp_ * 16;
    if (is_first) {
      store_sums(p_, item, piece, first_dim);
    } else {
      tree.end(p_, item, piece, first_dim);
    }
  }

  // Adds the values of a step. Where a reference moves at a tile, sums so far are multiplied by factors first.
  DEVICE void add_values(const Item& item, const Step& step, PartSums& sums, Sums& piece) {
    if (warp_ == 0 && lane_ < step.tiles && lane_ != rank_)
      mbarrier_arrive_expect(shared_address(&shared_.handed_full[step_.at][lane_]), kScoreWarps * kHandedBytes);
    __syncwarp();
    mbarrier_wait(shared_address(&shared_.noted[step_.at]), step_.parity);
    const u32 moved = shared_.moved[step_.at] & (step.begins ? ~1u : ~0u);  // sums do not come to what a piece begins with
    int before = 0;                                                         // the stage before
#pragma unroll 1
    for (int part = 0; part < step.tiles; ++part) {
      const u32 values = lines_at(shared_address(shared_.values[stage_.at]));
      const Handed(&handed)[kScoreWarps] = shared_.handed[step_.at][part];
      const int bit = step_.at * kBlocksTogether + part, begin = (step.first + part) * kTileKeys;
      mbarrier_wait(shared_address(&shared_.values_full[stage_.at]), stage_.parity);
      if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
      mbarrier_wait(shared_address(&shared_.handed_full[step_.at][part]), parities_ >> bit & 1);
      parities_ ^= 1u << bit;
      if (begin < item.lo || begin + kTileKeys > item.hi) clear_values(item.lo - begin, item.hi - begin);
      if ((moved >> part & 1) != 0) rescale(part, sums, piece);
      multiply(shared_address(handed), values, step.begins && part == 0, piece);
      const float2 added = handed[this->part()].sums[row()];
      sums[0] += added.x, sums[1] += added.y;
      if (part > 0) {
        wgmma_wait<1>();
        leave(before, part - 1);
      }
      before = stage_.at;
      stage_.next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (Column& block : piece.out) pin(block);
    leave(before, step.tiles - 1);
  }

  // Values of keys outside of [lo, hi) may be anything, and zero times NaN is NaN.
  DEVICE void clear_values(int lo, int hi) const {
    const u32 values = shared_address(shared_.values[stage_.at]);
#pragma unroll 1
    for (int i = int(threadIdx.x) % 128; i < kTileKeys * kOwnChunks * 8; i += 128) {
      const int row = i / 8 % kTileKeys, chunk = i / 8 / kTileKeys;
      if (row < lo || row >= hi) store_shared(values + chunk * kPairBytes + row * 128 + i % 8 * 16, uint4{0, 0, 0, 0});
    }
    async_proxy_fence();
    meet();
  }

  DEVICE void rescale(int tile, PartSums& sums, Sums& piece) {
    wgmma_wait<0>();
#pragma unroll
    for (Column& block : piece.out) pin(block);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const float factor = shared_.factor[step_.at][tile][row_of_column(k)];
#pragma unroll
      for (Column& block : piece.out) of_column(block, k, 0) *= factor, of_column(block, k, 1) *= factor;
    }
    for (float& sum : sums) sum *= shared_.factor[step_.at][tile][row()];
    pin(sums);  // or the sum of the next weights may be fused with the product, or not
  }

  // Begins the products of a tile.
  DEVICE static void multiply(u32 handed, u32 values, bool begins, Sums& piece) {
    constexpr int kRowBytes = sizeof Handed::weights[0];
    const u32 weights = u32(wgmma_descriptor(handed, 16, 0, 0));
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < kBlocksEach; ++b) {
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; ++step)
        Wgmma<kTileRows>::template shared<false, true>(piece.out[b], descriptor(values, b * kPairBytes + step * 2048),
                                                       wgmma_descriptor(0, 0, 8 * kRowBytes, 3) | u32(weights + step * sizeof(Handed) / 16),
                                                       !begins || step > 0);
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

  // The references and sums of a piece.
  DEVICE void end_piece(const PartSums& sums, Sums& piece) {
    meet();  // all have read what the piece before has left
#pragma unroll
    for (int h = 0; h < 2; ++h) shared_.sums_of_warps[row()][h * kScoreWarps + part()] = sums[h];
    meet();
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      piece.sum[k] = sum_of_parts(shared_.sums_of_warps[row_of_column(k)]);
      piece.reference[k] = shared_.reference[step_.at][row_of_column(k)];
    }
  }
  DEVICE static void meet() { named_barrier_sync(1, 128); }

  const AttentionParams& p_;
  SharedStorage& shared_;
  const int rank_, lane_, warp_;
  u32 parities_ = 0;  // of what each block hands over
  Ring<kValueStages> stage_;
  Ring<SharedStorage::kSteps> step_;
};

// Brings queries, when those of the item before have been multiplied.
DEVICE void produce_queries(const AttentionParams& p, const TensorMap& q_map, SharedStorage& shared) {
  u32 parity = 1;
  each_item(shared, [&](const Item& item) {
    mbarrier_wait(shared_address(&shared.q_empty), parity);
    parity ^= 1;
    load_queries(p, q_map, item, shared);
    __syncwarp();
  });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90_latent_decode_spread(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                                        const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap) {
  if (is_idle(p)) return;
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const int rank = rank_in_cluster();
  if (threadIdx.x == 0) {
    begin_barriers(rank, shared);
    tma_prefetch_map(q_map);
    if constexpr (!kSmallPages) tma_prefetch_map(k_map);
  }
  clear_queries(shared);
  cluster_sync();
  const bool found = warp_id() == 8 && find_first_item<1>(p, rank, kBlocksTogether, shared);
  if (!begin_launch(p)) return;
  const int wg = shuffle(int(threadIdx.x / 128), 0);
  if (wg == 0) {
    registers_grow<kComputeRegisters>();
    Scorer(p, rank, shared).run();
  } else if (wg == 1) {
    registers_grow<kComputeRegisters>();
    Multiplier(p, rank, shared).run();
  } else {
    registers_shrink<kLoadRegisters>();
    const int warp = warp_id() % 4;
    if (warp == 0) find_items_together<1>(p, rank, kBlocksTogether, shared, found);
    if (warp == 1) produce_keys(p, rank, k_map, shared, [](const Item&, const auto&) {});
    if (warp == 2) produce_values(p, rank, k_map, shared);
    if (warp == 3) produce_queries(p, q_map, shared);
  }
  // Other blocks write to this one's memory, and report to its barriers, until they are done.
  __syncwarp();
  cluster_sync();
  end_launch(p);
}

}  // namespace imbrex::cuda

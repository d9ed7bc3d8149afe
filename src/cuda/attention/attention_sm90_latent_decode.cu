// Attention of few rows over latents with wgmma and TMA, for sm_90a: keys of many dims, of which values are the first (KvFormat::latent,
// and bytes of fp8_ds_mla), as in the absorbed form of MLA. Host side: cuda/attention/attention_sm90_latent_decode.cpp.
//
// All products are transposed: keys are the 64 rows of a product for scores, dims those of a product for values, and the rows of an item,
// 16 or 32 of them, its columns. So no product is spent on rows that are not there, and what registers hold of the output is small: sums
// of pieces are folded there. Two warpgroups compute. Each has half of the dims that scores are summed over, then half of a tile's keys
// while scores become weights, and half of the dims of the output.
// docs/kernels/cuda_sm90_latent.md has the measurements.
#include "attention_sm90_latent_decode_sums.cuh"

namespace imbrex::cuda {

// Registers of a thread of the warpgroups that compute, of the one that loads, and of the one that widens: all that a thread block has at
// launch. A warpgroup that asked for more would wait for ever.
constexpr int kComputeRegisters = kWidens ? 216 : 232, kLoadRegisters = 40, kWidenRegisters = kWidens ? 40 : 0;
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
static_assert(128 * (kTeams * kComputeRegisters + kLoadRegisters + kWidenRegisters) <= kThreads * kLaunchRegisters);

// Log2 units that a row's maximum may outgrow its reference by.
constexpr float kSlack = 8.f;

DEVICE u64 descriptor(u32 address) { return wgmma_descriptor(address, 16, 1024, 1); }

class Consumer {
 public:
  DEVICE Consumer(const AttentionParams& p, SharedStorage& shared) : p_(p), shared_(shared), team_(warp_id() / 4), warp_(warp_id() % 4) {}

  DEVICE void run() {
    u32 parity = 0;
    each_item(shared_, [&](const Item& item) {
      mbarrier_wait(shared_address(&shared_.q_full), parity);
      parity ^= 1;
      run_item(item);
    });
  }

 private:
  using Scores = float[kColumns];  // of one key

  DEVICE void run_item(const Item& item) {
    const Tiles tiles = tiles_of(item);
    // Tiles of which every row sees every key.
    const bool any_whole = !kCustomMask && !kPositions;
    const int whole_first = (max(item.lo, visible_keys(p_, item.position_of(item.num_rows - 1)).lo) + kTileKeys - 1) / kTileKeys;
    const int whole_end = any_whole ? max(0, min(item.hi, visible_keys(p_, item.position_of(0)).hi)) / kTileKeys : 0;
    const int piece_tiles = item.piece > 0 ? item.piece / kTileKeys : kFar;
    scale_ = kPlainLogits ? logit_scale(p_, item.kv_head) * kLog2e : 1.f;
    Tree tree;
    Sums piece;
    piece.clear(0.f);
    int left = piece_tiles;
    bool begins = true;  // a piece
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end; ++tile) {
      const bool last = tile == tiles.end - 1, whole = tile < whole_end && (!kWindow || tile >= whole_first);
      if (begins) tree.go_on(p_);
      const Ring<kStages> first = stage_;
      Scores s;
      compute_scores(s, last);
      if (!kPlainLogits || !whole) modify(item, tile, !whole, s);
      if (!whole) clear_values(first, item.lo - tile * kTileKeys, item.hi - tile * kTileKeys);
      weigh(begins, s, piece);
      add_values(first, begins, piece);
      begins = --left == 0 || last;
      if (!begins) continue;
      total_sums(piece);
      tree.add(p_, piece);
      left = piece_tiles;
    }
    store(item, tree.end(p_));
  }

  DEVICE void meet() const { named_barrier_sync(1, 128 * kTeams); }
  DEVICE int lane() const { return computed_here(lane_id()); }
  // The thread's key in a tile, once teams have shared them out.
  DEVICE int key() const { return warp_ * 16 + team_ * 8 + lane() / 4; }

  // Multiplies keys and queries: every second 16 dims of them, of all keys; what the other team has of the thread's key is added.
  DEVICE void compute_scores(Scores& s, bool last) {
    constexpr int kSteps = (kHeadDimQk + 15) / 16;
    Column sums;
    Ring<kStages> stage = stage_;
    const u32 q = shared_address(shared_.q) + team_ * 32;
    u32 keys = 0;
#pragma unroll
    for (int step = 0; step < kSteps; step += kTeams) {
      const int chunk = step / 4, in_group = chunk % kGroupChunks;
      if (in_group == 0 && step % 4 == 0) {
        mbarrier_wait(shared_address(&shared_.full[stage.at]), stage.parity);
        if constexpr (!kWidens && kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
        keys = shared_address(shared_.stage[stage.at]) + team_ * 32;
        stage.next();
        wgmma_fence();
      }
      if (step + 1 < kSteps || team_ == 0)
        Wgmma<kTileRows>::shared(sums, descriptor(keys + in_group * kChunkBytes + step % 4 * 32),
                                 descriptor(q + chunk * kQChunkBytes + step % 4 * 32), step != 0);
    }
    wgmma_commit();
    finish<0>(sums);
    if (last) report(shared_.q_empty);
    // The team keeps the scores of eight keys of each warp's sixteen, and leaves those of the other eight.
    const int thread = computed_here(int(threadIdx.x)) % 128;
#pragma unroll
    for (int k = 0; k < kColumns; k += 4) {
      float left[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = of_column(sums, k + i, 0), high = of_column(sums, k + i, 1);
        s[k + i] = team_ == 0 ? low : high, left[i] = team_ == 0 ? high : low;
      }
      shared_.scores[team_][k / 4][thread] = {left[0], left[1], left[2], left[3]};
    }
    meet();
#pragma unroll
    for (int k = 0; k < kColumns; k += 4) {
      const float4 others = shared_.scores[1 - team_][k / 4][thread];
      s[k] += others.x, s[k + 1] += others.y, s[k + 2] += others.z, s[k + 3] += others.w;
    }
  }

  // Scores become logits, in log2 units if they are not plain; -infinity where a row does not see the key.
  DEVICE void modify(const Item& item, int tile, bool hides, Scores& s) const {
    const int key = tile * kTileKeys + this->key();
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const int row = min(row_of_column(k), item.num_rows - 1), position = item.position_of(row);
      if constexpr (!kPlainLogits) {
        const RowTerms terms = row_terms(p_, item.head_of(row), logit_scale(p_, item.kv_head));
        s[k] = modified(p_, terms, s[k], key - position);
        if constexpr (kFactorLeft) s[k] *= factor_of(p_, terms);
      }
      if (!hides) continue;
      const KeyRange seen = visible_keys(p_, position);
      bool sees = key >= max(seen.lo, item.lo) && key < min(seen.hi, item.hi);
      if constexpr (kCustomMask) {
        const long query = item.query_index + (item.row_begin + row) / kGroup;
        if (sees) sees = p_.custom_mask[p_.custom_start[item.request] + query * item.seq_len + key] != 0;
      }
      if (!sees) s[k] = -infinity();
    }
  }

  // Values of keys outside of [lo, hi) may be anything, and zero times NaN is NaN. All threads clear them.
  DEVICE void clear_values(Ring<kStages> stage, int lo, int hi) const {
    constexpr int kUnits = kGroupChunks * 8;  // of 16 bytes, of a key in a stage
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group, stage.next()) {
      const u32 values = shared_address(shared_.stage[stage.at]);
#pragma unroll 1
      for (int i = computed_here(int(threadIdx.x)); i < kTileKeys * kUnits; i += 128 * kTeams) {
        const int row = i / 8 % kTileKeys, chunk = i / 8 / kTileKeys;
        if (row < lo || row >= hi) store_shared(values + chunk * kChunkBytes + row * 128 + i % 8 * 16, uint4{0, 0, 0, 0});
      }
    }
    async_proxy_fence();
  }

  // Scores become weights, in shared memory. Most tiles do not move a reference: so weights relative to the one that is there are computed
  // at once, and anew where a row's maximum has outgrown it.
  DEVICE void weigh(bool begins, const Scores& s, Sums& piece) {
    const float scale = scale_;
    Scores weights;
    if (!begins) {
      bool outgrown = false;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        outgrown |= s[k] * scale > piece.reference[k] + kSlack;
        weights[k] = exp2_approx(fmaf(s[k], scale, -piece.reference[k]));
      }
      put_weights(weights);
      if (!named_barrier_any(1, 128 * kTeams, outgrown)) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) piece.sum[k] += weights[k];
        return;
      }
    }
    const int lane = this->lane();
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const float top = max_of_keys(s[k]);
      if (lane < 4) shared_.of_warps[row_of_column(k)][team_ * 4 + warp_] = top;
    }
    meet();
    float factor[kColumns];
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      float4 low, high;
      take_of_warps(row_of_column(k), low, high);
      const float top = fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)), fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
      move_reference(piece.reference[k], top * scale, kSlack, 0.f, factor[k]);
    }
    if (!begins) piece.rescale(factor);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      weights[k] = exp2_approx(fmaf(s[k], scale, -piece.reference[k]));
      piece.sum[k] += weights[k];
    }
    put_weights(weights);
    meet();
  }
  // Over the eight keys of a warp and team.
  DEVICE static float max_of_keys(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, shuffle_xor(x, lanes));
    return x;
  }
  DEVICE void put_weights(const Scores& weights) const {
    u32 pairs[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
      pairs[i] = kQType == kBf16 ? pack_bf16(weights[2 * i], weights[2 * i + 1]) : pack_f16(weights[2 * i], weights[2 * i + 1]);
    const int row = lane() % kTileRows;
    store_matrix_transposed(shared_address(shared_.weights) + row * 128 + (2 * warp_ + team_ ^ row % 8) * 16, pairs);
    async_proxy_fence();
  }

  // Multiplies the values of a tile, whose first group of chunks is in stage `first`, by its weights, and leaves the tile's stages.
  DEVICE void add_values(const Ring<kStages>& first, bool begins, Sums& piece) {
    const u32 weights = shared_address(shared_.weights);
    u32 groups[kGroups];
    Ring<kStages> stage = first;
#pragma unroll
    for (u32& group : groups) group = shared_address(shared_.stage[stage.at]), stage.next();
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < kBlocksEach; ++b) {
      const auto chunk = [&](int c) { return groups[c / kGroupChunks] + c % kGroupChunks * kChunkBytes; };
      const u32 values = team_ == 0 ? chunk(kTeams * b) : chunk(kTeams * b + 1);
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; ++step)
        Wgmma<kTileRows>::template shared<false, true>(piece.out[b], descriptor(values + step * 2048), descriptor(weights + step * 32),
                                                       !begins || step > 0);
      wgmma_commit();
    }
    leave_groups();
#pragma unroll
    for (Column& block : piece.out) pin(block);
  }
  // Leaves each group of chunks when the products that read it are done.
  template <int group = 0>
  DEVICE void leave_groups() {
    if constexpr (group < kGroups) {
      constexpr int kLastChunk = (group + 1) * kGroupChunks - 1, kBlock = kLastChunk / kTeams;
      wgmma_wait<(kBlock < kBlocksEach - 1 ? kBlocksEach - 1 - kBlock : 0)>();
      report(shared_.empty[stage_.at]);
      stage_.next();
      leave_groups<group + 1>();
    }
  }

  // The sums of weights of all of a piece's keys: until here each thread has those of its own.
  DEVICE void total_sums(Sums& piece) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      float sum = piece.sum[k];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) sum += shuffle_xor(sum, lanes);
      if (lane() < 4) shared_.of_warps[row_of_column(k)][team_ * 4 + warp_] = sum;
    }
    meet();
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      float4 low, high;
      take_of_warps(row_of_column(k), low, high);
      piece.sum[k] = low.x + low.y + (low.z + low.w) + (high.x + high.y + (high.z + high.w));
    }
  }
  DEVICE void take_of_warps(int row, float4& low, float4& high) const {
    const float4* const from = reinterpret_cast<const float4*>(shared_.of_warps[row]);
    low = from[0], high = from[1];
  }

  // Two lanes exchange what they have of a row, so that each stores two neighbouring dims.
  DEVICE void store(const Item& item, const Sums& sums) const {
    const int lane = this->lane(), odd = lane / 4 % 2, dim = (team_ * 4 + warp_) * 16 + (odd != 0 ? lane / 4 + 7 : lane / 4);
    const bool first = team_ == 0 && warp_ == 0 && lane < 4, wide = out_is_wide(p_);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const int row = row_of_column(k);
      const bool exists = row < item.num_rows;
      float2 pairs[kBlocksEach];
#pragma unroll
      for (int b = 0; b < kBlocksEach; ++b) {
        const float low = of_column(sums.out[b], k, 0), high = of_column(sums.out[b], k, 1), got = shuffle_xor(odd != 0 ? low : high, 4);
        pairs[b] = odd != 0 ? float2{got, high} : float2{low, got};
      }
      if (!exists) continue;
      if (item.partial >= 0) {
        const long at = partial_row(p_, item, row);
        if (first) reinterpret_cast<float2*>(p_.partial_state)[at] = {sums.reference[k], sums.sum[k]};
        float* const to = p_.partial_out + at * kHeadDimV + dim;
#pragma unroll
        for (int b = 0; b < kBlocksEach; ++b) *reinterpret_cast<float2*>(to + b * (64 * kTeams)) = pairs[b];
      } else {
        const int token = item.token_of(row), head = item.head_of(row);
        const RowEnd end = row_end(p_, head, sums.reference[k], sums.sum[k]);
        const float factor = end.factor * kv_scale(p_.v, item.kv_head);
        if (first) store_lse(p_, token, head, end.lse);
        char* const to = out_row(p_, token, head) + dim * element_bytes(kOutType);
#pragma unroll
        for (int b = 0; b < kBlocksEach; ++b)
          store_pair(to + b * (64 * kTeams) * element_bytes(kOutType), wide, {ended(pairs[b].x, factor), ended(pairs[b].y, factor)});
      }
    }
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  const int team_, warp_;  // the warpgroup's number, and the warp's within it
  Ring<kStages> stage_;
  float scale_ = 1.f;  // of what modify() leaves, to log2 units
};

extern __shared__ __align__(1024) char memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90_latent_decode(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                                 const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap) {
  if (is_idle(p)) return;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    begin_barriers(shared);
    if constexpr (kMaps) {
      tma_prefetch_map(q_map);
      if constexpr (!kSmallPages && !kWidens) tma_prefetch_map(k_map);
    }
  }
  clear_queries(shared);
  __syncthreads();
  if (!begin_launch(p)) return;
  const int warp = warp_id(), in_group = warp % 4;
  if (warp < kConsumerWarps) {
    registers_grow<kComputeRegisters>();
    Consumer(p, shared).run();
  } else if (warp < kConsumerWarps + 4) {
    registers_shrink<kLoadRegisters>();
    if (in_group == 0) {
      u32 parity = 1;
      find_items(p, 0, shared, [&](const Item& item) {
        mbarrier_wait(shared_address(&shared.q_empty), parity);
        parity ^= 1;
        load_queries(p, q_map, item, shared);
      });
    } else {
      bring_keys(p, k_map, shared, in_group - 1);
    }
  } else if constexpr (kWidens) {
    registers_shrink<kWidenRegisters>();
    widen_keys(shared, in_group);
  }
  end_launch(p);
}

}  // namespace imbrex::cuda

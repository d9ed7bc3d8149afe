// Attention of few rows over latents with wgmma and TMA, for sm_90a: keys of many dims, of which values are the first (KvFormat::latent,
// and bytes of fp8_ds_mla), as in the absorbed form of MLA. Host side: cuda/attention/attention_sm90_latent_decode.cpp.
//
// All products are transposed: keys are the 64 rows of a product for scores, dims those of a product for values, and the rows of an item,
// 16 or 32 of them, its columns. So no product is spent on rows that are not there, and what registers hold of the output is small: sums
// of pieces are folded there. Two warpgroups compute. Each has half of the dims that scores are summed over, then half of a tile's keys
// while scores become weights, and half of the dims of the output. Where the cache has bytes, each has a tile of its own until values are
// multiplied.
// docs/kernels/cuda_sm90_latent.md has the measurements.
#include "attention_sm90_latent_decode_bytes.cuh"

namespace imbrex::cuda {

// Registers of a thread of the warpgroups that compute, and of the one that loads: all that a thread block has at launch. A warpgroup that
// asked for more would wait for ever.
constexpr int kComputeRegisters = 232, kLoadRegisters = 40, kLaunchRegisters = 65536 / kThreads / 8 * 8;
static_assert(128 * (kTeams * kComputeRegisters + kLoadRegisters) <= kThreads * kLaunchRegisters);

// Log2 units that a row's maximum weighs when it becomes the reference. Weights of f16 make use of that type's range, where scales of keys
// do not need it.
constexpr float kFresh = kBytes && !kDsMla ? 6.f : 0.f;
constexpr int kWeightType = kBytes ? int(kF16) : kQType;

class Consumer {
 public:
  DEVICE Consumer(const AttentionParams& p, SharedStorage& shared) : p_(p), shared_(shared), team_(warp_id() / 4), warp_(warp_id() % 4) {
    if constexpr (kBytes) q_ = query_lines(shared);
  }

  DEVICE void run() {
    each_item(shared_, [this](const Item& item) {
      mbarrier_wait(shared_address(&shared_.q_full), turns_ & 1);
      turns_ ^= 1;
      if constexpr (kBytes) take_queries(item);
      run_item(item);
    });
  }

 private:
  // Of the thread's keys. Of a tile of 16 bits teams share out the keys, and a thread has one; of bytes each team has a tile of its own.
  static constexpr int kKeys = kBytes ? 2 : 1, kTilesTogether = kBytes ? kTeams : 1;
  using Scores = float[kKeys][kColumns];
  using Scales = float[kKeys];  // fp8_ds_mla: what weights of these keys are multiplied by, as ByteTile::take_scales() has it

  DEVICE void run_item(const Item& item) {
    const Tiles tiles = tiles_of(item);
    // Tiles of which every row sees every key.
    const bool any_whole = !kCustomMask && !kPositions;
    const int whole_first = (max(item.lo, first_of_all(p_, item)) + kTileKeys - 1) / kTileKeys;
    const int whole_end = any_whole ? max(0, min(item.hi, end_of_all(p_, item))) / kTileKeys : 0;
    const int item_lo = item.lo, item_hi = item.hi;  // in registers, not read again for each tile
    const int piece_tiles = item.piece > 0 ? item.piece / kTileKeys : kFar;
    scale_ = kPlainLogits ? logit_scale(p_, item.kv_head) * kLog2e : 1.f;
    Tree tree;
    Sums piece;
    piece.clear();
    int left = piece_tiles;
#pragma unroll 1
    for (int begin = tiles.first, together; begin < tiles.end; begin += together) {
      together = kTilesTogether > 1 && left > 1 && tiles.end - begin > 1 ? kTilesTogether : 1;
      const int tile = kBytes ? begin + team_ : begin;
      const bool last = begin + together == tiles.end, whole = tile < whole_end && (!kWindow || tile >= whole_first);
      const bool begins = left == piece_tiles, ends = left == together || last;  // a piece
      if (begins) tree.go_on(p_, piece);
      const Ring<kStages> first = kBytes ? Ring<kStages>{} : stage_;
      const int lo = item_lo - tile * kTileKeys, hi = item_hi - tile * kTileKeys;  // the item's keys in the tile
      const bool exists = tile < begin + together;
      Scores s;
      Scales scales = {};
      if constexpr (kBytes) {
        compute_scores_of_bytes(s, scales, begins, exists, last, lo, hi);
      } else {
        compute_scores(s[0], last);
      }
      if (!kPlainLogits || !whole) {
        int key[kKeys];
#pragma unroll
        for (int h = 0; h < kKeys; ++h) key[h] = tile * kTileKeys + this->key(h);
        modify(p_, item, key, !whole, s);
      }
      if constexpr (kBytes) {
        if (!exists) {
#pragma unroll
          for (auto& of_key : s) fill(of_key, -infinity());
        }
        ValueBytes values;
        if (team_ != 0) mbarrier_wait(shared_address(&shared_.full[stage_.at]), stage_.parity);
        byte_tile(0).begin_values(values);
        const bool wide = weigh(begins, s, scales, piece);
        if (ends) leave_sums(piece);
        add_bytes(together, wide, values, piece);
      } else {
        if (!whole) clear_values(first, lo, hi);
        weigh(begins, s, scales, piece);
        add_values(first, begins, piece, [&] {
          sum_ += sum_of_own_column(s[0]);
          if (ends) leave_own_sum();
        });
      }
      left -= together;
      if (!ends) continue;
      if constexpr (kDsMla) multiply(piece.out, reciprocal_of_power(shuffle(up_, byte_tile(0).group())));
      take_sums(piece);
      tree.add(piece);
      left = piece_tiles;
    }
    tree.end(p_, item, piece, (team_ * 4 + warp_) * (kBytes ? 16 * kBlocksEach : 16));
  }

  // Bytes: where weights are now; the other team may still read those before.
  DEVICE int turn() const { return int(turns_ >> 2 & 1) * kTeams; }
  DEVICE void meet() const { named_barrier_sync(1, 128 * kTeams); }
  DEVICE int lane() const { return computed_here(lane_id()) % 32u; }
  // A key of the thread's in a tile.
  DEVICE int key(int h) const { return warp_ * 16 + (kBytes ? h : team_) * 8 + lane() / 4; }

  // Multiplies keys and queries: every second 16 dims of them, of all keys; what the other team has of the thread's key is added.
  DEVICE void compute_scores(float (&s)[kColumns], bool last) {
    constexpr int kSteps = (kHeadDimQk + 15) / 16;
    Column sums;
    Ring<kStages> stage = stage_;
    const u32 q = lines_at(shared_address(shared_.q) + team_ * 32);
    u32 keys = 0;
#pragma unroll
    for (int step = 0; step < kSteps; step += kTeams) {
      const int chunk = step / 4, in_group = chunk % kGroupChunks;
      if (in_group == 0 && step % 4 == 0) {
        mbarrier_wait(shared_address(&shared_.full[stage.at]), stage.parity);
        if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
        keys = lines_at(shared_address(shared_.stage[stage.at]) + team_ * 32);
        stage.next();
        wgmma_fence();
      }
      if (step + 1 < kSteps || team_ == 0)
        Wgmma<kTileRows>::shared(sums, descriptor(keys, in_group * kChunkBytes + step % 4 * 32),
                                 descriptor(q, chunk * kQChunkBytes + step % 4 * 32), step != 0);
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

  // Scores become weights, in shared memory, and of 16 bits in `s` too. Most tiles do not move a reference: so weights relative to the one
  // that is there are computed at once, and anew where a row's maximum has outgrown it. Those of bytes are f16, or bf16 where the scales of
  // keys want that: then it returns true.
  DEVICE bool weigh(bool begins, Scores& s, const Scales& scales, Sums& piece) {
    const float scale = scale_;
    const bool fit = !kDsMla || (fits_f16(scales[0]) && fits_f16(scales[kKeys - 1]));
    if (!begins) {
      bool again = !fit;
      float sum[kColumns];
      Scores weights;
#pragma unroll
      for (int h = 0; h < kKeys; ++h) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          again |= s[h][k] * scale > piece.reference[k] + (kSlack + kFresh);
          weights[h][k] = exp2_approx(fmaf(s[h][k], scale, -piece.reference[k]));
          if (kBytes) sum[k] = h == 0 ? weights[h][k] : sum[k] + weights[h][k];
        }
      }
      put_weights<kWeightType>(weights, scales);
      if constexpr (!kBytes) async_proxy_fence();
      if (!named_barrier_any(1, 128 * kTeams, again)) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          if (kBytes) piece.sum[k] += sum[k];
          if (!kBytes) s[0][k] = weights[0][k];
        }
        return false;
      }
    }
    const int lane = this->lane();
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const float top = max_of_keys(kKeys == 1 ? s[0][k] : fmaxf(s[0][k], s[kKeys - 1][k]));
      if (lane < 4) shared_.tops_of_warps[row_of_column(k)][team_ * 4 + warp_] = top;
    }
    bool wide = false;
    if constexpr (kDsMla) {
      wide = named_barrier_any(1, 128 * kTeams, !fit);
    } else {
      meet();
    }
    float factor[kColumns];
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      float4 low, high;
      take_of_warps(shared_.tops_of_warps[row_of_column(k)], low, high);
      const float top = fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)), fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
      move_reference(piece.reference[k], top * scale, kSlack + kFresh, kFresh, factor[k]);
    }
    if (begins) {
      sum_ = 0.f;
    } else {
      piece.rescale(factor);
      if (!kBytes) sum_ *= of_own_column(factor);
      wgmma_pin(sum_);  // or the sum of the next weights may be fused with the product, or not
    }
    Scores weights;
#pragma unroll
    for (int h = 0; h < kKeys; ++h) {
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        weights[h][k] = exp2_approx(fmaf(s[h][k], scale, -piece.reference[k]));
        if (kBytes) piece.sum[k] += weights[h][k];
      }
    }
    if (wide) {
      put_weights<kBf16>(weights, scales);
    } else {
      put_weights<kWeightType>(weights, scales);
    }
    if constexpr (!kBytes) {
#pragma unroll
      for (int k = 0; k < kColumns; ++k) s[0][k] = weights[0][k];
      async_proxy_fence();
    }
    meet();
    return wide;
  }
  template <int type>
  DEVICE void put_weights(const Scores& weights, const Scales& scales) const {
    constexpr int kPairs = kColumns / 2, kTogether = kKeys * kPairs <= 4 ? kKeys : 1;  // keys that one instruction stores
    const int row = lane() % kTileRows;
    const u32 to = shared_address(shared_.weights[kBytes ? turn() + team_ : 0]) + row * 128;
#pragma unroll
    for (int first = 0; first < kKeys; first += kTogether) {
      u32 pairs[kTogether * kPairs];
#pragma unroll
      for (int i = 0; i < kTogether * kPairs; ++i) {
        const float(&of_key)[kColumns] = weights[first + i / kPairs];
        pairs[i] = pack_16<type>(of_key[i % kPairs * 2], of_key[i % kPairs * 2 + 1]);
      }
      const int h = !kBytes ? team_ : kTogether > 1 ? lane() / kTileRows : first;
      store_matrix_transposed(to + (2 * warp_ + h ^ row % 8) * 16, pairs);
    }
    if constexpr (kDsMla) put_scales<type>(shared_.scales[turn() + team_], warp_, scales);
  }

  // Multiplies the values of a tile, whose first group of chunks is in stage `first`, by its weights, and leaves the tile's stages. Does
  // `meanwhile` while they are multiplied.
  template <class Verb>
  DEVICE void add_values(const Ring<kStages>& first, bool begins, Sums& piece, const Verb& meanwhile) {
    const u32 weights = lines_at(shared_address(shared_.weights));
    u32 groups[kGroups];
    Ring<kStages> stage = first;
#pragma unroll
    for (u32& group : groups) group = lines_at(shared_address(shared_.stage[stage.at])), stage.next();
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < kBlocksEach; ++b) {
      const auto chunk = [&](int c) { return groups[c / kGroupChunks] + u32(c % kGroupChunks * kChunkBytes) / 16; };
      const u32 values = team_ == 0 ? chunk(kTeams * b) : chunk(kTeams * b + 1);
#pragma unroll
      for (int step = 0; step < kTileKeys / 16; ++step)
        Wgmma<kTileRows>::template shared<false, true>(piece.out[b], descriptor(values, step * 2048), descriptor(weights, step * 32),
                                                       !begins || step > 0);
      wgmma_commit();
    }
    meanwhile();
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

  // --- bytes

  DEVICE void take_queries(const Item& item) {
    prepare_queries(shared_, item.num_rows);
    meet();
  }
  // Of the tiles that teams have together.
  DEVICE Ring<kStages> stage_of(int tile) const {
    Ring<kStages> stage = stage_;
    if (tile > 0) stage.next();
    return stage;
  }
  DEVICE ByteTile byte_tile(int tile) const { return {shared_address(shared_.stage[stage_of(tile).at]), team_, warp_}; }

  // The scores of the team's tile; if it has none, they are anything. Of keys outside of [lo, hi) its rows may have anything, and zero
  // times NaN is NaN: they are cleared.
  DEVICE void compute_scores_of_bytes(Scores& s, Scales& scales, bool begins, bool exists, bool last, int lo, int hi) {
    const Ring<kStages> stage = stage_of(team_);
    if (kDsMla && begins) {
      mbarrier_wait(shared_address(&shared_.full[stage_.at]), stage_.parity);
      up_ = byte_tile(0).up_of(max(lo + team_ * kTileKeys, 0), lane() % kDsMlaGroups);
    }
    if (exists) mbarrier_wait(shared_address(&shared_.full[stage.at]), stage.parity);
    if (exists && (lo > 0 || hi < kTileKeys)) {
      constexpr int kUnits = kRowBytes / 16;
      const u32 rows = shared_address(shared_.stage[stage.at]);
#pragma unroll 1
      for (int i = computed_here(int(threadIdx.x)) % 128; i < kTileKeys * kUnits; i += 128)
        if (i / kUnits < lo || i / kUnits >= hi) store_shared(rows + i * 16, uint4{0, 0, 0, 0});
      async_proxy_fence();
      team_ == 0 ? named_barrier_sync(2, 128) : named_barrier_sync(3, 128);
    }
    Column sums;
    if constexpr (kDsMla) byte_tile(team_).take_scales(exists ? up_ : 0.f, scales);
    byte_tile(team_).multiply_keys(shared_, q_, sums);
    if (last) report(shared_.q_empty);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
#pragma unroll
      for (int h = 0; h < kKeys; ++h) s[h][k] = of_column(sums, k, h);
    }
  }
  // Multiplies the values of both tiles, or of one, by their weights, and leaves their stages. `wide`: weights are of bf16.
  DEVICE void add_bytes(int together, bool wide, ValueBytes& values, Sums& piece) {
    const bool both = together == kTilesTogether;
    const Ring<kStages> second = stage_of(both ? 1 : 0);
    if (team_ == 0) mbarrier_wait(shared_address(&shared_.full[second.at]), second.parity);
    const ByteTile first = byte_tile(0);
    const u32 of_second = shared_address(shared_.stage[second.at]);
    const u32 weights = shared_address(shared_.weights[turn()]), scales = shared_address(shared_.scales[turn()]);
    const auto leave = [&] {
      report(shared_.empty[stage_.at]);
      stage_.next();
    };
    if (kDsMla && wide) {
      first.multiply_values<kBf16>(both, of_second, weights, scales, values, piece.out, leave);
    } else {
      first.multiply_values<kF16>(both, of_second, weights, scales, values, piece.out, leave);
    }
    turns_ ^= 4;
  }

  // --- the end of a piece, and of an item

  // The sums of weights of all of a piece's keys: until here each thread has those of its own. They are left when the last weights are
  // there, and taken when their values have been multiplied.
  DEVICE void leave_sums(const Sums& piece) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const float sum = sum_of_keys(piece.sum[k]);
      if (lane() < 4) shared_.sums_of_warps[row_of_column(k)][team_ * 4 + warp_] = sum;
    }
    report(shared_.sums_full);
  }
  // The same where a lane has the sum of its own column.
  DEVICE void leave_own_sum() {
    const int lane = this->lane();
    if (lane < 4 * kColumns) shared_.sums_of_warps[row_of_column(lane / 4)][team_ * 4 + warp_] = sum_;
    report(shared_.sums_full);
  }
  DEVICE void take_sums(Sums& piece) {
    mbarrier_wait(shared_address(&shared_.sums_full), turns_ >> 1 & 1);
    turns_ ^= 2;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) piece.sum[k] = sum_of_parts(shared_.sums_of_warps[row_of_column(k)]);
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  const int team_, warp_;  // the warpgroup's number, and the warp's within it
  Ring<kStages> stage_;
  u32 turns_ = 0;      // the parities of q_full (1) and of sums_full (2), and whose turn it is of the places of weights (4)
  u32 q_ = 0;          // bytes: query_lines()
  float up_ = 1.f;     // fp8_ds_mla: what scales for the group of take_scales() are multiplied by in the piece, a power of two
  float scale_ = 1.f;  // of what modify() leaves, to log2 units
  float sum_ = 0.f;    // 16 bits: of a piece's weights of the warp's keys, in the lane's own column
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
      if constexpr (!kSmallPages) tma_prefetch_map(k_map);
    }
  }
  clear_queries(shared);
  __syncthreads();
  const bool found = warp_id() == kConsumerWarps && find_first_item(p, 0, shared);
  if (warp_id() == kConsumerWarps + 1) fetch_latents_ahead(p, k_map, first_task(0));
  if (!begin_launch(p)) return;
  const int warp = warp_id(), in_group = warp % 4;
  if (warp < kConsumerWarps) {
    registers_grow<kComputeRegisters>();
    Consumer(p, shared).run();
  } else {
    registers_shrink<kLoadRegisters>();
    if (in_group == 0) {
      u32 parity = 1;
      const auto load = [&](const Item& item) {
        mbarrier_wait(shared_address(&shared.q_empty), parity);
        parity ^= 1;
        load_queries(p, q_map, item, shared);
      };
      find_items(p, 0, shared, load, found);
    } else {
      bring_keys(p, k_map, shared, in_group - 1);
    }
  }
  end_launch(p);
}

}  // namespace imbrex::cuda

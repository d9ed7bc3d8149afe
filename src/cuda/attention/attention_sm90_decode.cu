// Attention of few rows over many keys with TMA, for sm_90 and later: decode and verify. Host side: attention_sm90_decode.cpp.
//
// Memory sets the pace: on an H200 35 bytes a nanosecond and multiprocessor, of which a key of 128 bf16 dims with its value needs 512. One
// warp loads, a page a lane, and runs ahead of the others by all stages, across the ends of items. For 16 rows, four warps share out a
// tile: each multiplies the queries with a quarter of the keys, and the weights of all with a quarter of the dims of the values. So an
// item ends with all sums of a row in one place, and nothing is left to be joined but pieces. That is a sixth warp's work.
// docs/kernels/cuda_sm90_decode.md has the measurements.
#include "attention_fold.cuh"
#include "attention_sm90_decode_load.cuh"

namespace imbrex::cuda {

// Named ones: of the warps that share out 16 rows, each; of all; of the warps that read the same values, each.
constexpr int kCrewBarriers = kRowWarps + 1 + (kRowWarps > 1 ? kTeams : 0);
DEVICE int crew_barrier(int crew) { return 1 + crew * kCrewBarriers + kRowWarps; }
DEVICE void meet_crew(int crew) { named_barrier_sync(crew_barrier(crew), kCrewThreads); }

// --- consumers: four warps for each 16 rows

// A run is a node of three levels of the tree of pieces, or of two where registers do not hold sums of each:
// attention_sm90_decode_most_in_run().
constexpr bool kThreeLevels = kRowWarps == 1 || kHeadDimV <= 128;
static_assert(kMostInRun == kPiecesTogether * kPiecesTogether * kPiecesTogether);

// The sums of a lane's two rows and its warp's dims, and the references that they are relative to.
using Sums = FragmentSums<TiledFragment<kTeamDims>>;

// A warp at work on a tile has its scores, of its own keys, and knows the maxima of all four. It multiplies the weights of the tile before
// with values, all keys and its own dims, weighs the scores, and goes on to the scores of the next tile. So the four wait for each other
// but once a tile.
class Consumer {
 public:
  DEVICE Consumer(const AttentionParams& p, SharedStorage& shared, int crew, int warp)
      : p_(p),
        shared_(shared),
        lane_(computed_here(lane_id())),
        group_(warp % kRowWarps),
        team_(warp / kRowWarps),
        barrier_(1 + crew * kCrewBarriers + group_),
        values_barrier_(1 + crew * kCrewBarriers + kRowWarps + 1 + team_) {
    weights_to_ = written_weights(lane_);
    weights_from_ = shared_address(shared.weights[0]) + 16 * group_ * kWeightRow + lane_ % 16 * kWeightRow + lane_ / 16 * 16;
    v_lane_ = VRows::lane(lane_ % 16, team_ * (kTeamDims / kPieceDims) + lane_ / 16, VRows::kVRow);
  }

  DEVICE void run() {
    Ring<SharedStorage::kItemSlots> slot;
    Ring<SharedStorage::kQSlots> q;
#pragma unroll 1
    for (;; slot.next(), q.next()) {
      mbarrier_wait(shared_address(&shared_.slot_full[slot.at]), slot.parity);
      if (!shared_.more[slot.at]) break;
      const ItemSlot& mine = shared_.slot[slot.at];
      const float scale = logit_scale(p_, mine.item.kv_head) * kLog2e;
      ItemScores scores(p_, mine.item, mine, shared_address(shared_.q[q.at]), scale, 16 * group_);
      scores.begin();
      if constexpr (kQKept) report_read(shared_.q_empty[q.at], scores.kept_bits());
      run_item(mine.item, scores);
      if constexpr (!kQKept) report(shared_.q_empty[q.at]);
      report(shared_.stored[slot.at]);
    }
  }

 private:
  // Whether what can be found for each tile is not kept. Beside a score_mod, kernels of these dims would spill otherwise; where positions
  // are given, they would have to be loaded.
  static constexpr bool kFindsAgain = kScoreMod && kRowWarps == 1 && !kGivenPositions && kHeadDimV > 96 &&
                                      kHeadDimV <= (kBytes ? 192 : 128);
  using ItemScores = Scores<KRows, kQKept, !kFindsAgain>;
  using ScoreTile = TiledFragment<kTeamKeys>[1];

  DEVICE void run_item(const Item& item, const ItemScores& scores) {
    TileStream<kMaskMod> tiles(p_, item);
    const int piece_tiles = item.piece > 0 ? item.piece / kTileKeys : kFar;
    Sums piece, level1, level2, all;  // of the tree of pieces: nodes that are not complete
    piece.clear(0.f), level1.clear(kNoSum), level2.clear(kNoSum), all.clear(kNoSum);
    int pieces = 0;  // that are in them
    const auto fold_piece = [&]() __attribute__((always_inline)) {
      level1.fold(piece);
      piece.clear(0.f);
      if (++pieces % kPiecesTogether != 0) return;
      (kThreeLevels ? level2 : all).fold(level1);
      level1.clear(kNoSum);
      if (!kThreeLevels || pieces % (kPiecesTogether * kPiecesTogether) != 0) return;
      all.fold(level2);
      level2.clear(kNoSum);
    };
    const auto end_piece = [&]() __attribute__((always_inline)) {
      total_sums(piece);
      fold_piece();
    };
    ScoreTile s;
    score(scores, tiles.tile(), tiles.is_shown(), 0, s);
    int left = piece_tiles;  // tiles of the piece
#pragma unroll 1
    for (; tiles.count() < tiles.end(); tiles.next()) {
      meet();
      if (tiles.count() > tiles.first()) add_values(item, tiles.tile_before(), piece);
      if constexpr (kMaskMod) {
        if (tiles.ended_pieces() > 0 && tiles.count() > tiles.first()) total_sums(piece);
#pragma unroll 1
        for (int ended = tiles.ended_pieces(); ended > 0; --ended) fold_piece();  // the first has sums, the others no tiles
      } else {
        if (left == 0) end_piece(), left = piece_tiles;
      }
      weigh(scores, s, piece);
      const bool last = tiles.count() + 1 == tiles.end();
      if (kMaskMod ? tiles.ends_piece() : --left == 0 || last) leave_sums(piece);
      if (!last) score(scores, tiles.next_tile(), tiles.next_is_shown(), 1, s);
      odd_ ^= 1;
    }
    meet();
    add_values(item, tiles.tile_before(), piece);
    if (kMaskMod ? !tiles.is_run() : item.piece == 0) {
      total_sums(piece);
      all = piece;
    } else {
      end_piece();
      (kThreeLevels ? level2 : all).fold(level1);
      if constexpr (kThreeLevels) all.fold(level2);
    }
    store(item, all);
  }

  // Reports that shared memory has been read and may be overwritten. A load may still be under way when an arrival after it is seen, and
  // TMA would then overwrite what it has yet to read. So the arrival depends on `read`, which is made of all that was loaded: it chooses
  // the lane that arrives.
  DEVICE void report_read(u64& barrier, u32 read) const {
    constexpr u32 kHardlyEver = 0x7fedcba9;
    if (lane_id() == int(any_lane(read == kHardlyEver))) mbarrier_arrive(shared_address(&barrier));
  }
  DEVICE void meet() const { named_barrier_sync(barrier_, 32 * kTeams); }
  // Where a lane writes its weights.
  DEVICE u32 written_weights(int lane) const {
    return shared_address(shared_.weights[0]) + (16 * group_ + lane / 4) * kWeightRow + (team_ * kTeamKeys + lane % 4 * 2) * 2;
  }
  DEVICE int row_of(int h) const { return 16 * group_ + 8 * h + lane_ / 4; }
  DEVICE static float& of_team(float4& four, int team) { return reinterpret_cast<float*>(&four)[team]; }

  // Computes the scores of a tile. `shown`: mask_mod hides none. `ahead`: how many tiles after the one whose weights are computed next.
  DEVICE void score(const ItemScores& scores, int tile, bool shown, int ahead, ScoreTile& s) {
    mbarrier_wait(shared_address(&shared_.k_full[k_.at]), k_.parity);
    const int begin = tile * kTileKeys + team_ * kTeamKeys;
    if (scores.sees(begin)) {
      scores.compute(begin, shared_address(shared_.k[k_.at]) + team_ * kTeamKeys * KRows::kKRow, s, shown);
    } else {
      fill(s[0], -infinity());
    }
    u32 read = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = greatest(s[0], h);
      read ^= bits_of(top);
      top = max_over<4>(top);
      top *= scores.factor_left(row_of(h));
      if (lane_ % 4 == 0) of_team(shared_.tops[odd_ ^ ahead][row_of(h)], team_) = top;
    }
    report_read(shared_.k_empty[k_.at], read);
    k_.next();
  }

  // Scores become weights relative to each row's reference; where a maximum outgrows it by too much, the row's sums are rescaled.
  DEVICE void weigh(const ItemScores& scores, const ScoreTile& s, Sums& piece) const {
    float factor[2];
    bool moved = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 tops = shared_.tops[odd_][row_of(h)];
      const float top = fmaxf(fmaxf(tops.x, tops.y), fmaxf(tops.z, tops.w));
      const bool moves = move_reference(piece.reference[h], top, kSlack, 0.f, factor[h]);
      moved = moved || moves;
    }
    if (any_lane(moved)) piece.rescale(factor);
    const u32 to = kFindsAgain ? written_weights(computed_here(lane_)) : weights_to_;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = scores.factor_left(row_of(h));
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        const float2 x = pair(s[0], n, h);
        const float low = exp2_approx(fmaf(x.x, scale, -piece.reference[h])), high = exp2_approx(fmaf(x.y, scale, -piece.reference[h]));
        piece.sum[h] += low, piece.sum[h] += high;
        store_shared(to + odd_ * kWeightBytes + 8 * h * kWeightRow + n * 16, pack(low, high));
      }
    }
  }

  // Writes this warp's sums of weights, of the piece that ends with this tile. After the next barrier the warps add them up.
  DEVICE void leave_sums(const Sums& piece) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = sum_over<4>(piece.sum[h]);
      if (lane_ % 4 == 0) of_team(shared_.sums[odd_][row_of(h)], team_) = sum;
    }
  }
  DEVICE void total_sums(Sums& piece) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 sums = shared_.sums[odd_ ^ 1][row_of(h)];
      piece.sum[h] = sums.x + sums.y + (sums.z + sums.w);
    }
  }

  // Multiplies the values of a tile: the one before the tile whose weights are computed next.
  DEVICE void add_values(const Item& item, int tile, Sums& piece) {
    mbarrier_wait(shared_address(&shared_.v_full[v_.at]), v_.parity);
    u32 read = 0;
    if (team_ * kTeamDims < kHeadDimV) {
      const u32 values = shared_address(shared_.v[v_.at]);
      const int lo = item.lo - tile * kTileKeys, hi = item.hi - tile * kTileKeys;
      if (lo > 0 || hi < kTileKeys) clear_values(values, lo, hi);
#pragma unroll
      for (int n = 0; n < kTileKeys / 16; ++n) {
        u32 a[1][1][4];
        load_matrix(a[0][0], weights_from_ + (odd_ ^ 1) * kWeightBytes + n * 32);
        add_products<VRows>(a, values + v_lane_ + n * 16 * VRows::kVRow, &piece.out);
      }
#pragma unroll
      for (int n = 0; n < kTeamDimTiles; ++n) read ^= bits_of(at(piece.out, n, 0, 0));
    }
    report_read(shared_.v_empty[v_.at], read);
    v_.next();
  }

  // Values of keys outside of [lo, hi) may be anything, and zero times NaN is NaN. The warps that read them clear them.
  DEVICE void clear_values(u32 values, int lo, int hi) const {
    constexpr int kPieces = kTeamDims / kPieceDims, kOfRow = kVChunks * kVWidth / 16;  // a row may end before the warp's dims do
#pragma unroll 1
    for (int i = 32 * group_ + lane_; i < kTileKeys * kPieces; i += 32 * kRowWarps) {
      const int row = i / kPieces, piece = team_ * kPieces + i % kPieces;
      if ((row < lo || row >= hi) && piece < kOfRow) store_shared(values + VRows::lane(row, piece, VRows::kVRow), uint4{0, 0, 0, 0});
    }
    async_proxy_fence();  // before TMA writes there again
    if constexpr (kRowWarps == 1) {
      __syncwarp();
    } else {
      named_barrier_sync(values_barrier_, 32 * kRowWarps);
    }
  }

  // As store_row() does for attention_sm80. Through that, an item ends 0.05 to 0.1 us later (2026-11-26, one H200, steps of 5 to 14 us).
  DEVICE void store(const Item& item, const Sums& all) const {
    const bool wide = out_is_wide(p_), first = team_ == 0 && lane_ % 4 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of(h);
      if (row >= item.num_rows) continue;
      if (item.partial >= 0) {
        const long at = partial_row(p_, item, row);
        if (first) reinterpret_cast<float2*>(p_.partial_state)[at] = {all.reference[h], all.sum[h]};
#pragma unroll
        for (int pair = 0; pair < kTeamDimTiles; ++pair) {
          const int d = team_ * kTeamDims + dim_of_pair(pair);
          if (d < kHeadDimV) *reinterpret_cast<float2*>(p_.partial_out + at * kHeadDimV + d) = pair_of(all.out, h, pair);
        }
      } else {
        const int token = item.token_of(row), head = item.head_of(row);
        const RowEnd end = row_end(p_, head, all.reference[h], all.sum[h]);
        const float factor = end.factor * kv_scale(p_.v, item.kv_head);
        if (first) store_lse(p_, token, head, end.lse);
#pragma unroll
        for (int pair = 0; pair < kTeamDimTiles; ++pair) {
          const int d = team_ * kTeamDims + dim_of_pair(pair);
          const float2 x = pair_of(all.out, h, pair);
          if (d < kHeadDimV)
            store_pair(out_row(p_, token, head) + d * element_bytes(kOutType), wide, {ended(x.x, factor), ended(x.y, factor)});
        }
      }
    }
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  const int lane_, group_, team_, barrier_, values_barrier_;  // group_: of rows
  u32 weights_to_, weights_from_, v_lane_;                    // where this lane writes (unless kFindsAgain) and reads
  Ring<kStages> k_, v_;
  int odd_ = 0;  // which of two the tile that is weighed next has
};

// --- the warp that joins

// The last item of the crew is left to all of its threads: nothing else is to be done, and they are faster.
DEVICE void join(const AttentionParams& p, SharedStorage& shared) {
  const int lane = lane_id();
  Ring<SharedStorage::kItemSlots> slot;
  const auto has_item = [&] {
    mbarrier_wait(shared_address(&shared.slot_full[slot.at]), slot.parity);
    return shared.more[slot.at];
  };
  if (!has_item()) return;
  for (;;) {
    const int at = slot.at;
    const u32 parity = slot.parity;
    const Item item = shared.slot[at].item;
    slot.next();
    if (!has_item()) {
      if (lane == 0) shared.last_slot = at;
      return;
    }
    mbarrier_wait(shared_address(&shared.stored[at]), parity);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&shared.slot_empty[at]));
    if (item.partial >= 0) join_ended<32>(p, item, ended_merges(p, item));
  }
}

// Merges the pieces of a crew's last item, with all threads of the crew.
DEVICE void join_last_item(const AttentionParams& p, int crew, SharedStorage& shared) {
  const Item& item = shared.slot[shared.last_slot].item;
  if (item.partial < 0) return;
  if constexpr (!kShares) {
    const bool is_last = threadIdx.x % kCrewThreads == 0 && is_last_piece(p, item, item.merge);
    if (named_barrier_any(crew_barrier(crew), kCrewThreads, is_last)) join_pieces<kCrewThreads>(p, item, p.merges[item.merge]);
    return;
  }
  if (threadIdx.x % kCrewThreads < 32) {
    const u32 ended = ended_merges(p, item);
    if (lane_id() == 0) shared.ended = ended;
  }
  meet_crew(crew);
  join_ended<kCrewThreads>(p, item, shared.ended);
}

DEVICE void begin_barriers(SharedStorage& shared) {
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(shared_address(&shared.k_full[i]), kLoaders);
    mbarrier_init(shared_address(&shared.v_full[i]), kLoaders);
    mbarrier_init(shared_address(&shared.k_empty[i]), kConsumers);
    mbarrier_init(shared_address(&shared.v_empty[i]), kConsumers);
  }
  for (u64& barrier : shared.q_empty) mbarrier_init(shared_address(&barrier), kConsumers);
  for (int i = 0; i < SharedStorage::kItemSlots; ++i) {
    mbarrier_init(shared_address(&shared.slot_full[i]), kSlotArrivals);
    mbarrier_init(shared_address(&shared.slot_empty[i]), 1);
    mbarrier_init(shared_address(&shared.stored[i]), kConsumers);
  }
  mbarrier_fence_init();
}

extern __shared__ __align__(1024) char memory[];

extern "C" __global__ void __launch_bounds__(kThreadsOfAll, 1)
    attention_sm90_decode(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap,
                          const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  if (is_idle(p)) return;
  const int crew = kCrews == 1 ? 0 : warp_id() / kCrewWarps, warp = warp_id() - crew * kCrewWarps;
  SharedStorage& shared = reinterpret_cast<SharedStorage*>(memory)[crew];
  if (threadIdx.x % kCrewThreads == 0) {
    begin_barriers(shared);
    shared.last_slot = -1;
    if constexpr (kMaps && !kSmallPages) {  // they are far away too
      tma_prefetch_map(k_map);
      tma_prefetch_map(v_map);
    }
  }
  meet_crew(crew);
  if (warp == kConsumers) fetch_ahead<kStages, kVChunks>(p, k_map, v_map, first_task(crew));
  if (!begin_launch(p)) return;
  if (warp < kConsumers) {
    Consumer(p, shared, crew, warp).run();
  } else if (warp == kConsumers) {
    produce(p, k_map, v_map, crew, shared);
  } else {
    join(p, shared);
  }
  meet_crew(crew);
  if (shared.last_slot >= 0) join_last_item(p, crew, shared);
  end_launch(p);
}

}  // namespace imbrex::cuda

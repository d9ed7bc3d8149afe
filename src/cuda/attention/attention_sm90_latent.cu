// Attention over latents with wgmma and TMA, for sm_90a: keys of many dims, of which values are the first (KvFormat::latent), as in the
// absorbed form of MLA. Host side: cuda/attention/attention_sm90_latent.cpp.
//
// The output of 64 rows and 512 dims takes half of all registers. So two warpgroups have a half of the dims each, and nothing else to do
// than to multiply weights by values; a third computes scores and weights, and keeps most of the queries in registers, so that shared
// memory is read for keys almost alone; one warp loads, another one finds items. A tile of keys is loaded once and read three times: for
// its scores, and for each half of its values. The matrix unit multiplies scores of one tile and values of another at the same time, while
// the exponentials of a third are computed. Weights go through shared memory, in slots of which each also says whether sums so far have to
// be rescaled, and ends a piece. docs/kernels/cuda_sm90_latent.md has the measurements.
#include "attention_sm90_latent_load.cuh"
#include "attention_sm90_runs.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

// Log2 units that a row's maximum may outgrow its reference by.
constexpr float kSlack = 8.f;
constexpr int kLevels = kLatentLevels;
constexpr int kAtOnce = 4;  // loads of a node that are under way

// Registers of a thread of the warpgroups that multiply values, of the one that computes scores, and of the one that loads.
constexpr int kOutputRegisters = 160, kScoreRegisters = 160, kLoadRegisters = 32;
static_assert(128 * (kConsumers * kOutputRegisters + kScoreRegisters + kLoadRegisters) <= 65536);
// Dims of a product: ptxas takes no instruction with more registers than a thread has at launch.
constexpr int kProductDims = kTeamDims > 192 ? kTeamDims / 2 : kTeamDims;
constexpr int kScoreWarps = 4, kOutputWarps = 4 * kConsumers;

// The low half of the descriptors of tiles in shared memory: the address in units of 16 bytes. The high half is the same in all of a kind.
DEVICE u32 tile_at(u32 address, u32 leading) { return u32(wgmma_descriptor(address, leading, 0, 0)); }
DEVICE u64 descriptor(u32 tile, int bytes) { return wgmma_descriptor(0, 0, 1024, 1) | u32(tile + bytes / 16); }
DEVICE u64 weight_descriptor(u32 tile, int bytes) { return wgmma_descriptor(0, 0, 8 * kWeightRow, 2) | u32(tile + bytes / 16); }

DEVICE void report(u64& barrier) {
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(shared_address(&barrier));
}

// --- the warpgroup that computes scores and weights

class Scorer {
 public:
  DEVICE Scorer(const AttentionParams& p, SharedStorage& shared) : p_(p), shared_(shared) {
    const int lane = lane_id(), row = matrix_row() - lane / 4 + lane % 16;  // of a warp's 16 rows, whose 16 bytes lane / 16 it addresses
    weights_ = shared_address(shared.weights) + row * kWeightRow + (lane / 16 ^ row / 2 % 4) * 16;
    q_row_ = u32(row * 128), q_piece_ = u32(lane / 16), q_turn_ = u32(row % 8);
    left_ = tile_at(shared_address(shared.q), 16);
  }

  DEVICE void run() {
    Ring<SharedStorage::kItemSlots> slot;
    for (;; slot.next()) {
      mbarrier_wait(shared_address(&shared_.item_full[slot.at]), slot.parity);
      const Item& item = shared_.item[slot.at];
      if (item.num_rows == kNoItem) break;
      take_queries();
      run_item(item);
      report(shared_.item_empty[slot.at]);
    }
  }

 private:
  DEVICE Ring<kStages> stage() const { return ring_at<kStages>(stages_); }
  DEVICE Ring<kWeightSlots> weight_slot() const { return ring_at<kWeightSlots>(tiles_); }
  DEVICE void wait_for_stage() const {
    mbarrier_wait(shared_address(&shared_.full[stage().at]), stage().parity);
    if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
  }

  // Moves an item's queries out of the ring: to registers, and what these do not hold to a place of its own. Other warpgroups pass over
  // these stages, so that this one reports for them too.
  DEVICE void take_queries() {
    named_barrier_sync(1, 128);  // the last scores of the item before are there, in all warps
#pragma unroll
    for (int part = 0; part < kQStages; ++part) {
      wait_for_stage();
      const u32 from = shared_address(shared_.stage[stage().at]);
#pragma unroll
      for (int chunk = part * kQChunksEach; chunk < min((part + 1) * kQChunksEach, kQChunks); ++chunk) {
        const u32 in_chunk = from + (chunk - part * kQChunksEach) * kQChunkBytes;
        if (chunk < kQKept) {
#pragma unroll
          for (int step = 0; step < 4; ++step)
            load_matrix(q_[4 * chunk + step], in_chunk + q_row_ + ((2 * step + q_piece_) ^ q_turn_) * 16);
        } else {
          const u32 to = shared_address(shared_.q[chunk - kQKept]);
#pragma unroll
          for (int i = int(threadIdx.x) % 128 * 16; i < kQChunkBytes; i += 128 * 16) store_shared(to + i, load_shared(in_chunk + i));
        }
      }
      __syncwarp();
      if (lane_id() == 0) {
#pragma unroll
        for (int warpgroup = 0; warpgroup <= kConsumers; ++warpgroup) mbarrier_arrive(shared_address(&shared_.empty[stage().at]));
      }
      ++stages_;
    }
    async_proxy_fence();
    named_barrier_sync(1, 128);
  }

  DEVICE void start_scores(Scores& s) {
    const u32 k = tile_at(shared_address(shared_.stage[stage().at]), 16);
#pragma unroll
    for (int step = 0; step < kQSteps; ++step) {
      const u64 keys = descriptor(k, step / 4 * kChunkBytes + step % 4 * 32);
      if (step < 4 * kQKept) {
        Wgmma<kTileKeys>::template registers<false>(s, q_[step], keys, step != 0);
      } else {
        Wgmma<kTileKeys>::shared(s, descriptor(left_, (step / 4 - kQKept) * kQChunkBytes + step % 4 * 32), keys, true);
      }
    }
    wgmma_commit();
  }
  DEVICE void finish_scores(Scores& s) {
    finish<0>(s);
    report(shared_.empty[stage().at]);
    ++stages_;
  }

  DEVICE void run_item(const Item& item) {
    const Tiles tiles = tiles_of(item);
    const auto piece_tiles = [&] { return item.piece > 0 ? item.piece / kTileKeys : kFar; };
    int left = piece_tiles();  // tiles of the piece at work
    bool begins = true;
    Rows rows;
    set_rows(rows, p_, item, matrix_row(), logit_scale(p_, item.kv_head));
    // Tiles of which every row sees every key.
    const int whole_first = (max(item.lo, visible_keys(p_, item.position_of(item.num_rows - 1)).lo) + kTileKeys - 1) / kTileKeys;
    const int whole_end = max(0, min(item.hi, visible_keys(p_, item.position_of(0)).hi)) / kTileKeys;
    float reference[2] = {kEmptyReference, kEmptyReference}, sum[2] = {0.f, 0.f};
    Scores s, next;
    wait_for_stage();
    wgmma_fence();
    start_scores(s);
    finish_scores(s);
    const auto hand_over = [&](int tile, bool last) __attribute__((always_inline)) {
      if constexpr (!kPlainLogits) modify(rows, s);
      if (tile >= whole_end || (kWindow && tile < whole_first)) hide(tile * kTileKeys, rows, s);
      float factor[2];
      const bool moved = weigh(p_, tile * kTileKeys, rows, s, reference, sum, factor, kSlack, 0.f);
      const bool ends = --left == 0 || last;
      hand_over_weights(s, Note(tile, ring_at<kStages>(stages_ - 1).at, begins, ends, last), moved && !begins, factor, reference, sum);
      begins = ends;
      if (ends) left = piece_tiles();
    };
#pragma unroll 1
    for (int tile = tiles.first; tile < tiles.end - 1; ++tile) {
      wait_for_stage();
      wgmma_fence();
      start_scores(next);
      hand_over(tile, false);
      finish_scores(next);
#pragma unroll
      for (int i = 0; i < kTileKeys / 2; ++i) s[i] = next[i];
    }
    hand_over(tiles.end - 1, true);
  }

  // Writes a tile's weights and what the other warpgroups have to know besides. After the end of a piece sums begin anew.
  DEVICE void hand_over_weights(const Scores& s, Note note, bool moved, const float (&factor)[2], float (&reference)[2], float (&sum)[2]) {
    WeightsOf<kQType> weights;
    pack_weights<kQType>(s, weights);
    const Ring<kWeightSlots> slot = weight_slot();
    mbarrier_wait(shared_address(&shared_.weights_empty[slot.at]), slot.parity ^ 1);
    const u32 to = weights_ + slot.at * kWeightBytes;
#pragma unroll
    for (int i = 0; i < kTileKeys / 16; ++i) store_matrix(to ^ i * 32, weights[i][0], weights[i][1], weights[i][2], weights[i][3]);
    const int warp = warp_id() % 4, row = matrix_row();
    if (lane_id() == 0) shared_.note[slot.at][warp] = moved ? note.with_factors() : note.bits;
    if (lane_id() % 4 == 0 && moved) {
#pragma unroll
      for (int h = 0; h < 2; ++h) shared_.factor[slot.at][row + 8 * h] = factor[h];
    }
    if (note.ends()) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float total = sum_over<4>(sum[h]);
        if (lane_id() % 4 == 0) shared_.end[slot.at][row + 8 * h] = {reference[h], total};
        reference[h] = kEmptyReference, sum[h] = 0.f;
      }
    }
    async_proxy_fence();
    report(shared_.weights_full[slot.at]);
    ++tiles_;
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  u32 weights_, left_, q_row_, q_piece_, q_turn_;
  u32 stages_ = 0, tiles_ = 0;
  u32 q_[4 * kQKept][4];
};

// --- the warpgroups that multiply values, each for some of the output's dims

class Multiplier {
 public:
  DEVICE Multiplier(const AttentionParams& p, SharedStorage& shared) : p_(p), shared_(shared) {}

  DEVICE void run() {
    for (;;) {
      const Ring<SharedStorage::kItemSlots> slot = ring_at<SharedStorage::kItemSlots>(u32(done().items));
      mbarrier_wait(shared_address(&shared_.item_full[slot.at]), slot.parity);
      const Item& item = shared_.item[slot.at];
      if (item.num_rows == kNoItem) break;
      run_item(item);
      report(shared_.item_empty[ring_at<SharedStorage::kItemSlots>(u32(done().items) - 1).at]);
    }
  }

 private:
  using Out = Fragment<kTeamDims>;

  // These are computed where they are needed, because registers are few.
  DEVICE static int team() { return computed_here(int(threadIdx.x)) / 128; }
  DEVICE static int first_dim() { return team() * kTeamDims; }
  DEVICE static int row() { return computed_here(int(threadIdx.x)) % 128 / 32 * 16 + computed_here(int(threadIdx.x)) % 32 / 4; }
  DEVICE u32 values(Note note) const { return shared_address(shared_.stage[note.stage()]) + first_dim() / 64 * kChunkBytes; }
  DEVICE Done& done() const { return shared_.done[computed_here(int(threadIdx.x)) / 32]; }

  DEVICE void start_output(Out& out, int slot, Note note) const {
    const u32 v = tile_at(values(note), kChunkBytes), weights = tile_at(shared_address(shared_.weights[slot]), 16);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
#pragma unroll
      for (int dim = 0; dim < kTeamDims; dim += kProductDims)
        Wgmma<kProductDims>::template shared<true>(part_of<kProductDims>(out, dim), weight_descriptor(weights, step * 32),
                                                   descriptor(v, step * 2048 + dim / 64 * kChunkBytes), !note.begins() || step > 0);
    }
    wgmma_commit();
  }
  DEVICE void leave(int slot, Note note) {  // the tile has been multiplied
    __syncwarp();
    if (lane_id() == 0) {
      mbarrier_arrive(shared_address(&shared_.empty[note.stage()]));
      mbarrier_arrive(shared_address(&shared_.weights_empty[slot]));
    }
    ++tiles_;
  }

  DEVICE void run_item(const Item& item) {
    Out out;
    fill(out, 0.f);
    for (bool last = false; !last;) {
      const Ring<kWeightSlots> slot = ring_at<kWeightSlots>(tiles_);
      mbarrier_wait(shared_address(&shared_.weights_full[slot.at]), slot.parity);
      if constexpr (kLoaders > 1) async_proxy_fence();  // the matrix unit reads what lanes have written
      const Note note = shared_.note[slot.at][warp_id() % 4];
      if (note.has_factors()) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float factor = shared_.factor[slot.at][row() + 8 * h];
          each_of_row(out, h, [=](float& x, int) { x *= factor; });
        }
      }
      const int lo = item.lo - note.tile() * kTileKeys, hi = item.hi - note.tile() * kTileKeys;
      if (lo > 0 || hi < kTileKeys) {
        clear_values<kTeamDims / 64, kChunkBytes>(values(note), lo, hi);
        named_barrier_sync(2 + team(), 128);
      }
      wgmma_fence();
      start_output(out, slot.at, note);
      finish<0>(out);
      last = note.is_last();
      if (note.ends()) {
        float reference[2], total[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 end = shared_.end[slot.at][row() + 8 * h];
          reference[h] = end.x, total[h] = end.y;
        }
        leave(slot.at, note);
        const int number = count_piece(last);
        if (row() / 16 * 16 < item.num_rows) {  // rows that the item does not have cost nothing
          if (number > 1 || !last) fold(number, last, reference, total, out);
          if (last) store(item, reference, total, out);
        }
      } else {
        leave(slot.at, note);
      }
    }
  }

  // Counts a piece, and an item with its `last` one; the number of the piece in the item, from 1 on.
  DEVICE int count_piece(bool last) const {
    const Done before = done();
    __syncwarp();
    if (computed_here(int(threadIdx.x)) % 32 == 0) done() = {before.items + last, last ? 0 : before.pieces + 1};
    __syncwarp();
    return before.pieces + 1;
  }

  // Folds the sums of the run's piece `number`, counted from 1, with those before it. Nodes of the tree of pieces are in memory until they
  // are complete; with the `last` piece all of them come together.
  DEVICE void fold(int number, bool last, float (&reference)[2], float (&total)[2], Out& out) const {
    static_assert(kPiecesTogether == 4);
    // A level has two bits of the number of earlier pieces: how many complete nodes of the level below wait there.
    const int before = number - 1, own = last ? kLevels : lowest_bit(u32(number)) / 2;
#pragma unroll
    for (int level = 0; level < kLevels; ++level)
      if (level <= own && (before >> 2 * level & 3) != 0) RunNode<kTeamDims, kAtOnce, kLevels>(p_, level).add_to(reference, total, out);
    if (!last) RunNode<kTeamDims, kAtOnce, kLevels>(p_, own).put(reference, total, out);
  }

  // As store_rows() does, with fewer registers: there are none to turn pairs of dims into longer pieces.
  DEVICE void store(const Item& item, const float (&reference)[2], const float (&total)[2], const Out& out) const {
    const int lane = computed_here(int(threadIdx.x)) % 32, first_row = row();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h;
      if (row >= item.num_rows) continue;
      const bool first = lane % 4 == 0 && first_dim() == 0;
      const int dim = first_dim() + lane % 4 * 2;
      if (item.partial >= 0) {
        const long at = partial_row(p_, item, row);
        if (first) reinterpret_cast<float2*>(p_.partial_state)[at] = {reference[h], total[h]};
        float2* const to = reinterpret_cast<float2*>(p_.partial_out + at * kHeadDimV + dim);
#pragma unroll
        for (int tile = 0; tile < kTeamDims / 8; ++tile) to[4 * tile] = pair(out, tile, h);
      } else {
        const int token = item.token_of(row), head = item.head_of(row);
        const RowEnd end = row_end(p_, head, reference[h], total[h]);
        const float factor = end.factor * kv_scale(p_.v, item.kv_head);
        if (first) store_lse(p_, token, head, end.lse);
        char* const to = out_row(p_, token, head) + dim * element_bytes(kOutType);
        const bool wide = out_is_wide(p_);
#pragma unroll
        for (int tile = 0; tile < kTeamDims / 8; ++tile) {
          const float2 x = pair(out, tile, h);
          store_pair(to + 8 * tile * element_bytes(kOutType), wide, {ended(x.x, factor), ended(x.y, factor)});
        }
      }
    }
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  u32 tiles_ = 0;
};

DEVICE void begin_barriers(SharedStorage& shared) {
  for (Done& done : shared.done) done = {0, 0};
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(shared_address(&shared.full[i]), kLoaders);
    mbarrier_init(shared_address(&shared.empty[i]), kScoreWarps + kOutputWarps);
  }
  for (int i = 0; i < kWeightSlots; ++i) {
    mbarrier_init(shared_address(&shared.weights_full[i]), kScoreWarps);
    mbarrier_init(shared_address(&shared.weights_empty[i]), kOutputWarps);
  }
  for (int i = 0; i < SharedStorage::kItemSlots; ++i) {
    mbarrier_init(shared_address(&shared.item_full[i]), 1);
    mbarrier_init(shared_address(&shared.item_empty[i]), kScoreWarps + kOutputWarps + 1);
  }
  mbarrier_fence_init();
}

extern __shared__ __align__(1024) char memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90_latent(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                          const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap) {
  if (is_idle(p)) return;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    begin_barriers(shared);
    if constexpr (kMaps && !kSmallPages) tma_prefetch_map(k_map);
  }
  __syncthreads();
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
    if (warp == 0) find_items(p, 0, shared, [](const Item&) {});  // queries come with the keys
    if (warp == 1) produce_stages(p, q_map, k_map, shared);
  }
  end_launch(p);
}

}  // namespace imbrex::cuda

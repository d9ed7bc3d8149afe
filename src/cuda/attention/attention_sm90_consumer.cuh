#pragma once
// A warpgroup of attention_sm90.cu that multiplies and exponentiates: the steps of which its schedule, consume(), is made.
//
// A Consumer has where the warpgroup is, in plain numbers. What a thread has in arrays of registers (scores, weights, sums) is no part of
// it: compilers take an object apart only when they can do so with all of it, and arrays wait for their loops to be unrolled.
#include "attention_sm90_load.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

constexpr int kVDims = kHeadDimV > 64 && kHeadDimV <= 128 ? kHeadDimV : 64 * kVChunks;  // of the output that the matrix unit computes
constexpr bool kManyDims = kHeadDimQk > 128;                                            // registers are short, and products long
// Whether what score_mod() needs of the next tile's keys is loaded in front of the turn and put into shared memory behind it: while
// products are under way, there are no registers for where elements lie, and none to keep them until the next turn. (element_here() loads
// them.)
constexpr bool kColumnsBeforeTurn = kManyDims;
// Log2 units: a row's maximum weighs 2^kFresh when it becomes the reference, and may outgrow that 2^8 times. Weights that are f16 for the
// values' sake keep their bits down to 2^-21 of the maximum so.
constexpr int kValueType = kFromBytes ? int(kF16) : kQType;
constexpr float kFresh = kFromBytes ? 7.f : 0.f, kSlack = kFresh + 8.f;

constexpr int kQSteps = (kHeadDimQk + 15) / 16;

using Weights = WeightsOf<kValueType>;

// A descriptor `bytes` further on, by arithmetic of 32 bits: the address is in the low half, and does not leave it.
DEVICE u64 further(u64 descriptor, int bytes) { return (descriptor & 0xffffffff00000000ul) | u32(u32(descriptor) + bytes / 16); }

DEVICE void start_scores(u64 q, u64 k, Scores& s) {
#pragma unroll
  for (int step = 0; step < kQSteps; ++step) {
    Wgmma<kTileKeys>::shared(s, further(q, step / 4 * kQChunkBytes + step % 4 * 32), further(k, step / 4 * kKvChunkBytes + step % 4 * 32),
                             step != 0);
  }
  wgmma_commit();
}

DEVICE void start_output(const Weights& weights, u64 v, Fragment<kVDims>& out) {
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    Wgmma<kVDims, kValueType>::template registers<true>(out, weights[step], further(v, step * 2048), true);
  }
  wgmma_commit();
}

// The sums of a thread's two rows, and the references that they are relative to.
struct Sums : FragmentSums<Fragment<kVDims>> {
  float factor[2];

  DEVICE Sums() { clear(0.f); }
  // The output is made relative to new references, or it is of another item that `begins`.
  DEVICE void rescale_output(bool begins, bool moved) {
    if (begins && !kManyDims) {
      fill(out, 0.f);
    } else if (begins || moved) {  // two branches may keep two copies of the sums
      each(out, [=, this](float& x, int h, int) { x = begins ? 0.f : x * factor[h]; });
    }
  }
  // Without a branch that needs the sums, ptxas moves the wait for the output in front of the exponentials. This one is never taken.
  DEVICE void need_here() const {
    if (kManyDims && (sum[0] < 0.f || sum[1] < 0.f)) trap();
  }
};

class Consumer {
 public:
  DEVICE Consumer(const AttentionParams& p, SharedStorage& shared, int wg)
      : p_(p),
        shared_(shared),
        wg_(wg),
        first_q_(wgmma_descriptor(shared_address(shared.q[0][wg]), 16, 1024, 1)),
        first_k_(wgmma_descriptor(shared_address(shared.k), 16, 1024, 1)),
        first_v_(wgmma_descriptor(shared_address(shared.v), kKvChunkBytes, 1024, 1)) {}

  // The matrix unit goes round: a warpgroup takes it, starts its products, and passes it on.
  DEVICE void take_turn() const { named_barrier_sync(1 + wg_, 256); }
  DEVICE void pass_turn() const { named_barrier_arrive(1 + (wg_ + 1) % kConsumers, 256); }

  // Goes to the next item, if there is one, and to its last tile that the block sees.
  DEVICE bool begin_item() {
    mbarrier_wait(shared_address(&shared_.q_full[slot().at]), slot().parity);
    const Item& item = this->item();
    if (item.num_rows == kNoItem) return false;
    tile_ = tiles_of(item).end - 1;
    ahead_ = -1;
    for (const int last = seen_end(p_, item) - 1; kSkipped > 0 && tile_ > last; --tile_, k_.next())
      skip(shared_.k_full[k_.at], k_.parity, shared_.k_empty[k_.at]);
    return true;
  }
  // While the first products of an item are under way: in front of them, it would take longer to get there.
  DEVICE void ready_rows(Rows& rows, RowValues& values) {
    const Item& item = this->item();
    if constexpr (kScoreRows > 0) set_row_values(p_, item, item_row(), values);
    set_rows(rows, p_, item, item_row(), p_.scale * kv_scale(p_.k, item.kv_head));
    const int begin = warp_id() / 4 * kTeamRows;  // not by wg, which would stay in a register meanwhile
    const int first_row = min(begin, item.num_rows - 1), last_row = min(begin + kTeamRows - 1, item.num_rows - 1);
    const KeyRange all = seen_by_rows(p_, item, first_row, last_row).all;
    whole_first_ = (max(item.lo, all.lo) + kTileKeys - 1) / kTileKeys, whole_end_ = max(0, min(item.hi, all.hi)) / kTileKeys;
    if constexpr (kCustomMask) prefetch_mask(p_, item, item_row(), tile_);
  }
  DEVICE bool at_first_tile() const { return tile_ == tiles_of(item()).first; }
  DEVICE void leave_item() {
    entry_.next();
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared_address(&shared_.q_empty[slot().at]));
    many_slots_.next();
  }
  DEVICE void next_tile() { tile_ = kCustomMask ? next_told() >> kToldBits : tile_ - 1; }
  // Goes to the next tile if every row sees every key of it; otherwise returns false.
  DEVICE bool goes_to_whole_tile() {
    if constexpr (!kCustomMask) {
      if (tile_ <= whole_first_ || tile_ > whole_end_) return false;
      --tile_;
    } else {
      if (at_first_tile()) return false;
      const int told = next_told();
      if ((told >> wg_ & 1) == 0) return false;
      tile_ = told >> kToldBits;
    }
    return true;
  }

  DEVICE void wait_for_keys() const { wait_for_tile(shared_.k_full[k_.at], k_.parity); }
  DEVICE void start_scores(Scores& s) const {
    wgmma_fence();
    cuda::start_scores(further(first_q_, slot().at * kQBytes), further(first_k_, k_.at * (kQChunks * kKvChunkBytes)), s);
  }
  DEVICE void leave_keys() const { leave(shared_.k_empty[k_.at]); }

  DEVICE void wait_for_values() const { wait_for_tile(shared_.v_full[v_.at], v_.parity); }
  DEVICE void clear_hidden_values() const {
    if (weighed_.lo <= 0 && weighed_.hi >= kTileKeys) return;
    wait_for_values();
    clear_values<kVChunks, kKvChunkBytes>(shared_address(shared_.v[v_.at]), weighed_.lo, weighed_.hi);
    meet();
  }
  DEVICE void start_output(const Weights& weights, Sums& sums) const {
    wgmma_fence();
    cuda::start_output(weights, further(first_v_, v_.at * (kVChunks * kKvChunkBytes)), sums.out);
  }
  DEVICE void leave_values() const { leave(shared_.v_empty[v_.at]); }
  // Releases the values of the tiles in front of an item's first one, from `v` on. Values keep their order: these come after the last of
  // the item before.
  DEVICE void skip_values() {
    for (; kSkipped > 0 && (v_.at != k_.at || v_.parity != k_.parity); v_.next())
      skip(shared_.v_full[v_.at], v_.parity, shared_.v_empty[v_.at]);
  }
  DEVICE void skip_values_of_next_item() {
    if constexpr (kSkipped == 0) return;
    v_.next();
    skip_values();
  }
  // The tile has been weighed: its values are next.
  template <bool edge>
  DEVICE void end_tile() {
    weighed_ = {0, kTileKeys};
    if constexpr (edge) {
      weighed_.hi = item().hi - tile_ * kTileKeys;
      if constexpr (kWindow) weighed_.lo = item().lo - tile_ * kTileKeys;
    }
    v_ = k_;
    k_.next();
  }

  // What score_mod() needs of the tile's keys goes to shared memory in front of the turn, which brings the warps together. The first of an
  // item, and the one behind tiles that a mask hides, are computed here.
  DEVICE void put_columns(ColumnValues& ahead) {
    if constexpr (kScoreColumns > 0) {
      if (kColumnsBeforeTurn && ahead_ == tile_) return;
      if (ahead_ != tile_) compute_columns(p_, item(), tile_ * kTileKeys, ahead);
      cuda::put_columns(ahead, columns());
    }
  }
  // Of the next tile's keys: in front of the turn, and while products are under way. All warps are behind the tile before then, in whose
  // place they may go.
  DEVICE void begin_columns_ahead(ColumnValues& ahead) {
    if constexpr (kScoreColumns > 0 && kColumnsBeforeTurn) compute_columns_ahead(ahead);
  }
  DEVICE void end_columns_ahead(ColumnValues& ahead) {
    if constexpr (kScoreColumns > 0 && kColumnsBeforeTurn) {
      cuda::put_columns(ahead, columns_at((k_.at + 1) % kStages));
    } else if constexpr (kScoreColumns > 0) {
      compute_columns_ahead(ahead);
    }
  }

  // Scores become weights. True where the output has to be rescaled.
  // `edge` is a template argument, because a branch while products are under way would have to wait for them.
  template <bool edge>
  DEVICE bool softmax(Rows& rows, const RowValues& values, Scores& s, Sums& sums) const {
    const int begin = tile_ * kTileKeys;
    if constexpr (kScoreMod) {
      modify_by_score_mod(p_, item(), item_row(), begin, rows, values, columns(), s);
    } else if constexpr (!kPlainLogits) {
      modify(rows, s);
    }
    if constexpr (edge && kCustomMask) {
      hide_masked(p_, item(), item_row(), tile_, s);
    } else if constexpr (edge && kTree) {
      hide_in_tree(p_, item(), item_row(), begin, s);
    } else if constexpr (edge) {
      if constexpr (!kPlainLogits) set_seen(rows, p_, item(), item_row());  // not kept meanwhile
      hide(begin, rows, s);
    }
    return weigh(p_, begin, rows, s, sums.reference, sums.sum, sums.factor, kSlack, kFresh);
  }

  // Ends an item, all of whose tiles have been weighed; its output is multiplied and stored while the next one begins.
  DEVICE void put_aside(Sums& sums) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      shared_.ended_state[warp_id() / 4][matrix_row() + 8 * h] = {sums.reference[h], sum_over<4>(sums.sum[h])};  // four lanes, the same
      sums.reference[h] = kEmptyReference, sums.sum[h] = 0.f;
    }
    __syncwarp();
  }
  DEVICE void store_ended_item(Sums& sums) const {
    const float2* const ended = shared_.ended_state[warp_id() / 4] + matrix_row();
    const float2 first = ended[0], second = ended[8];
    float references[2] = {first.x, second.x}, totals[2] = {first.y, second.y};
    const int at = (entry_.at + kItems - 1) % kItems;
    if (fold_piece(p_, shared_.piece[at], references, totals, sums.out))
      store_rows(p_, shared_.item[at], item_row(), references, totals, sums.out);
  }

 private:
  // One slot of queries goes with the items, whose places are even in number then.
  static_assert(kQSlots > 1 || kItems % 2 == 0);
  DEVICE Ring<kQSlots> slot() const { return kQSlots > 1 ? many_slots_ : ring_at<kQSlots>(entry_.at); }
  DEVICE const Item& item() const { return shared_.item[entry_.at]; }
  DEVICE int next_told() const {
    wait_for_keys();
    return shared_.told[k_.at];
  }
  DEVICE static void wait_for_tile(u64& full, u32 parity) {
    mbarrier_wait(shared_address(&full), parity);
    if constexpr (kSmallPages) async_proxy_fence();  // between the copies' writes and the matrix unit's reads
  }
  DEVICE void compute_columns_ahead(ColumnValues& ahead) {
    ahead_ = tile_ - 1;
    compute_columns(p_, item(), max(ahead_, 0) * kTileKeys, ahead);
  }
  DEVICE int* columns() const { return columns_at(k_.at); }
  // Where there are many dims, the warpgroup's number is computed anew: no register is left to keep wg_ in.
  DEVICE int* columns_at(int stage) const { return shared_.columns_of(kManyDims ? warp_id() / 4 : wg_, stage); }
  DEVICE void meet() const { named_barrier_sync(1 + kConsumers + wg_, 128); }  // of the warpgroup
  DEVICE static void leave(u64& barrier) { leave_stage(barrier, int(threadIdx.x) % 128); }
  DEVICE void skip(u64& full, u32 parity, u64& empty) const {
    skip_stage(full, parity, empty, int(threadIdx.x) % 128, [this] { meet(); });
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  const int wg_;
  const u64 first_q_, first_k_, first_v_;
  // All of these are in registers, numbered in this order, by which ptxas places them: another order is other machine code.
  int whole_first_;     // with whole_end_: the item's tiles of which every row sees every key
  Ring<kItems> entry_;  // of the item
  Ring<kQSlots> many_slots_;
  Ring<kStages> v_;   // of the tile that was weighed last
  int tile_;          // whose scores come next
  KeyRange weighed_;  // keys of the tile before, whose weights are there, counted within it
  Ring<kStages> k_;   // of `tile`
  int whole_end_;
  int ahead_;  // the tile whose columns have been computed; -1: none
};

}  // namespace imbrex::cuda

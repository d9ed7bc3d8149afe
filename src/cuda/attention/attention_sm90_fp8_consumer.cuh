#pragma once
// A warpgroup of attention_sm90_fp8.cu that multiplies and exponentiates: the steps of which its schedule, consume(), is made.
#include "attention_sm90_fp8_load.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

using Weights = WeightsOf<kE4m3>;

// Weights are rounded to e4m3, from 2^-9 to 448. A row's maximum is given 2^kFresh when it becomes the reference, and has outgrown it
// when its weight would be more than 2^kMost.
constexpr float kFresh = 6.f, kMost = 8.75f;

// `q` and `k`: descriptors of the tiles, whose addresses count in units of 16 bytes.
DEVICE void start_scores(u64 q, u64 k, Scores& s) {
  constexpr int kSteps = kWidth / 32;
#pragma unroll
  for (int step = 0; step < kDims / 32; ++step) {
    const int c = step / kSteps, within = step % kSteps * 32;
    Wgmma<kTileKeys>::shared(s, q + (c * kQChunkBytes + within) / 16, k + (c * kKvChunkBytes + within) / 16, step != 0);
  }
  wgmma_commit();
}

DEVICE void start_output(const Weights& weights, u64 turned, Fragment<kDims>& out) {
  constexpr int kSteps = kTurnedWidth / 32;
#pragma unroll
  for (int step = 0; step < kTileKeys / 32; ++step) {
    Wgmma<kDims>::registers<false>(out, weights[step], turned + (step / kSteps * kTurnedChunkBytes + step % kSteps * 32) / 16, 1);
  }
  wgmma_commit();
}

// The sums of a thread's two rows, and the references that they are relative to.
struct Sums {
  float factor[2], total[2] = {0.f, 0.f}, reference[2] = {kEmptyReference, kEmptyReference};
  Fragment<kDims> out;

  DEVICE Sums() { fill(out, 0.f); }
  // The output is made relative to new references, or it is of another item that `begins`.
  DEVICE void rescale_output(bool begins, bool moved) {
    if (begins || moved) {  // one branch for both: two keep two copies of the sums
      each(out, [=, this](float& x, int h, int) { x = begins ? 0.f : x * factor[h]; });
    }
  }
  // Without a branch that needs the sums, ptxas moves the wait for the output in front of the exponentials that should hide it. This one is
  // never taken.
  DEVICE void need_here() const {
    if (total[0] < 0.f || total[1] < 0.f) trap();
  }
};

// The sums of the item before, whose output is multiplied at the same time as the first scores of the next one.
struct Ended {
  float total[2] = {}, reference[2] = {};
};

class Consumer {
 public:
  DEVICE Consumer(const AttentionParams& p, SharedStorage& shared, int wg)
      : p_(p),
        shared_(shared),
        wg_(wg),
        row_(item_row()),
        first_q_(descriptor(shared.q[0][wg][0], kWidth)),
        first_k_(descriptor(shared.k[0][0], kWidth)),
        first_v_(descriptor(shared.turned[0], kTurnedWidth)) {}

  // Goes to the next item, if there is one, and to its last tile that the block sees.
  DEVICE bool begin_item(Rows& rows) {
    mbarrier_wait(shared_address(&shared_.q_full[slot_.at]), slot_.parity);
    const Item& item = shared_.item[entry_.at];
    if (item.num_rows == kNoItem) return false;
    const float scale = logit_scale(p_, item.kv_head);
    set_rows(rows, p_, item, row_, scale);
    const int first_row = min(wg_ * kTeamRows, item.num_rows - 1), last_row = min((wg_ + 1) * kTeamRows - 1, item.num_rows - 1);
    all_lo_ = max(item.lo, visible_keys(p_, item.position_of(last_row)).lo);
    all_hi_ = min(item.hi, visible_keys(p_, item.position_of(first_row)).hi);
    const Tiles tiles = tiles_of(item);
    tile_ = tiles.end - 1, first_tile_ = tiles.first;
    for (const int last = seen_end(p_, item) - 1; kSkipped > 0 && tile_ > last; --tile_, k_.next())
      skip_stage(shared_.k_full[k_.at], k_.parity, shared_.k_empty[k_.at], int(threadIdx.x) % 128,
                 [this] { named_barrier_sync(1 + wg_, 128); });
    return true;
  }
  DEVICE bool at_first_tile() const { return tile_ == first_tile_; }
  DEVICE void leave_item() {
    entry_.next();
    leave(shared_.q_empty[slot_.at]);
    slot_.next();
  }
  DEVICE void next_tile() { --tile_; }
  // Whether no other tile of the item follows, or one of which some row does not see some key.
  DEVICE bool whole_tiles_end() const {
    return tile_ <= first_tile_ || tile_ * kTileKeys > all_hi_ || (kWindow && (tile_ - 1) * kTileKeys < all_lo_);
  }

  DEVICE void wait_for_keys() const {
    mbarrier_wait(shared_address(&shared_.k_full[k_.at]), k_.parity);
    if constexpr (kSmallPages) async_proxy_fence();  // between the copies' writes and the matrix unit's reads
  }
  DEVICE void start_scores(Scores& s) const {
    wgmma_fence();
    cuda::start_scores(first_q_ + slot_.at * (kConsumers * kChunks * kQChunkBytes / 16), first_k_ + k_.at * (kChunks * kKvChunkBytes / 16),
                       s);
  }
  DEVICE void leave_keys() const { leave_stage(shared_.k_empty[k_.at], int(threadIdx.x) % 128); }

  DEVICE void wait_for_values() const { mbarrier_wait(shared_address(&shared_.turned_full[v_.at]), v_.parity); }
  DEVICE void start_output(const Weights& weights, Sums& sums) const {
    cuda::start_output(weights, first_v_ + v_.at * (kTileKeys * kDims / 16), sums.out);
  }
  DEVICE void leave_values() const { leave(shared_.turned_empty[v_.at]); }
  DEVICE void next_keys() { k_.next(); }
  DEVICE void next_values() { v_.next(); }

  // Scores become weights. True where the output has to be rescaled.
  // `edge` is a template argument, because a branch while products are under way would have to wait for them.
  template <bool edge>
  DEVICE bool softmax(const Rows& rows, Scores& s, Sums& sums) const {
    const int begin = tile_ * kTileKeys;
    if constexpr (!kPlainLogits) modify(rows, s);
    if constexpr (edge) hide(begin, rows, s);
    return weigh(p_, begin, rows, s, sums.reference, sums.total, sums.factor, kMost, kFresh);
  }

  // Ends an item, all of whose tiles have been weighed.
  DEVICE void put_aside(Sums& sums, Ended& ended) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      ended.reference[h] = sums.reference[h], ended.total[h] = sums.total[h];
      sums.reference[h] = kEmptyReference, sums.total[h] = 0.f;
    }
    ended_entry_ = entry_.at;
  }
  DEVICE void store_ended_item(Ended& ended, Sums& sums) const {
    float total[2] = {sum_over<4>(ended.total[0]), sum_over<4>(ended.total[1])};
    if (fold_piece(p_, shared_.piece[ended_entry_], ended.reference, total, sums.out))
      store_rows(p_, shared_.item[ended_entry_], row_, ended.reference, total, sums.out);
  }

 private:
  DEVICE static void leave(u64& barrier) {
    if (threadIdx.x % 128 == 0) mbarrier_arrive(shared_address(&barrier));
  }

  // All of these are in registers, numbered in this order, by which ptxas places them: another order is other machine code.
  int first_tile_;       // of the item
  int all_hi_;           // with all_lo_: keys that every row sees
  Ring<kItems> entry_;   // of the item
  Ring<kQSlots> slot_;   // of its queries
  int ended_entry_ = 0;  // of the item whose output is to be stored
  int tile_;             // whose scores come next
  Ring<kStages> v_;      // of the transposed values of the tile before
  const AttentionParams& p_;
  SharedStorage& shared_;
  const int wg_, row_;  // row_: of the item, and row_ + 8
  const u64 first_q_, first_k_, first_v_;
  Ring<kStages> k_;  // of `tile`
  int all_lo_;
};

}  // namespace imbrex::cuda

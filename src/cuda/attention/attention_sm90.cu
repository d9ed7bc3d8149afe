// Attention of many queries with wgmma and TMA, for sm_90a: prefill, chunked prefill and extend; planned by cuda/plan/plan.cpp. Its host
// side, with the limits of what it runs, is cuda/attention/attention_sm90.cpp.
//
// 128 rows x 128 keys x 128 dims are 8.4 M operations: 2048 cycles of the matrix unit, 1024 of the one for exponentials. Two warpgroups
// with 64 rows each take turns: while one multiplies, the other exponentiates. Of a third one, each warp has its own duty: items and their
// queries, keys, values. docs/kernels/cuda_sm90.md has the schedule.
#include "attention_sm90_load.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kVDims = kHeadDimV > 64 && kHeadDimV <= 128 ? kHeadDimV : 64 * kVChunks;  // of the output that the matrix unit computes

// Registers of a thread. The consumers get the registers that the producer's warpgroup gives up, and no more: each thread starts with
// kLaunchRegisters, and setmaxnreg waits for ever for registers that are not free.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
constexpr int kProducerRegisters = (kConsumers + 1) * kLaunchRegisters - kConsumers * kConsumerRegisters;
static_assert(kProducerRegisters >= 24, "the least that setmaxnreg takes");
constexpr bool kManyDims = kHeadDimQk > 128;  // registers are short, and products long
// Log2 units: a row's maximum weighs 2^kFresh when it becomes the reference, and may outgrow that 2^8 times. Weights that are f16 for the
// values' sake keep their bits down to 2^-21 of the maximum so.
constexpr int kValueType = kFromBytes ? int(kF16) : kQType;
constexpr float kFresh = kFromBytes ? 7.f : 0.f, kSlack = kFresh + 8.f;

constexpr int kQSteps = (kHeadDimQk + 15) / 16;

// --- consumers: a warpgroup each

DEVICE void pack_weights(const float (&s)[kTileKeys / 2], u32 (&weights)[kTileKeys / 16][4]) {
#pragma unroll
  for (int i = 0; i < kTileKeys / 4; ++i) {
    weights[i / 4][i % 4] = kValueType == kBf16 ? pack_bf16(s[2 * i], s[2 * i + 1]) : pack_f16(s[2 * i], s[2 * i + 1]);
  }
}

// A descriptor `bytes` further on, by arithmetic of 32 bits: the address is in the low half, and does not leave it.
DEVICE u64 further(u64 descriptor, int bytes) { return (descriptor & 0xffffffff00000000ul) | u32(u32(descriptor) + bytes / 16); }

DEVICE void start_scores(u64 q, u64 k, float (&s)[kTileKeys / 2]) {
#pragma unroll
  for (int step = 0; step < kQSteps; ++step) {
    Wgmma<kTileKeys>::shared(s, further(q, step / 4 * kQChunkBytes + step % 4 * 32), further(k, step / 4 * kKvChunkBytes + step % 4 * 32),
                             step != 0);
  }
  wgmma_commit();
}

DEVICE void start_output(const u32 (&weights)[kTileKeys / 16][4], u64 v, float (&out)[kVDims / 2]) {
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    Wgmma<kVDims, kValueType>::template registers<true>(out, weights[step], further(v, step * 2048), true);
  }
  wgmma_commit();
}

// Values outside of [lo, hi) may be anything, and zero times NaN is NaN. Each warpgroup clears all of them: it need not wait for the
// others.
DEVICE void clear_values(u32 v, int wg, int lo, int hi) {
#pragma unroll 1
  for (int i = int(threadIdx.x) % 128; i < kTileKeys * kVChunks * 8; i += 128) {
    const int row = i / 8 % kTileKeys, chunk = i / 8 / kTileKeys;
    if (row < lo || row >= hi) store_shared(v + chunk * kKvChunkBytes + row * 128 + i % 8 * 16, uint4{0, 0, 0, 0});
  }
  async_proxy_fence();
  named_barrier_sync(1 + kConsumers + wg, 128);
}

DEVICE void consume(const AttentionParams& p, SharedStorage& shared, int wg) {
  Ring<kQSlots> many_slots;
  Ring<kItems> entry;
  Ring<kStages> k, v;  // v is a tile behind
  const u64 first_q = wgmma_descriptor(shared_address(shared.q[0][wg]), 16, 1024, 1);
  const u64 first_k = wgmma_descriptor(shared_address(shared.k), 16, 1024, 1);
  const u64 first_v = wgmma_descriptor(shared_address(shared.v), kKvChunkBytes, 1024, 1);
  // One slot of queries goes with the items, whose places are even in number then.
  static_assert(kQSlots > 1 || kItems % 2 == 0);
  const auto slot = [&] { return kQSlots > 1 ? many_slots : ring_at<kQSlots>(entry.at); };
  const auto q_tile = [&] { return further(first_q, slot().at * kQBytes); };
  const auto k_tile = [&] { return further(first_k, k.at * (kQChunks * kKvChunkBytes)); };
  const auto v_tile = [&] { return further(first_v, v.at * (kVChunks * kKvChunkBytes)); };
  // The matrix unit goes round: a warpgroup takes it, starts its products, and passes it on.
  const auto take_turn = [&] { named_barrier_sync(1 + wg, 256); };
  const auto pass_turn = [&] { named_barrier_arrive(1 + (wg + 1) % kConsumers, 256); };
  if (wg == kConsumers - 1) pass_turn();

  const auto wait_for_tile = [](u64& full, u32 parity) {
    mbarrier_wait(shared_address(&full), parity);
    if constexpr (kSmallPages) async_proxy_fence();  // between the copies' writes and the matrix unit's reads
  };
  const auto meet = [&] { named_barrier_sync(1 + kConsumers + wg, 128); };
  const auto leave = [](u64& barrier) { leave_stage(barrier, int(threadIdx.x) % 128); };
  const auto skip = [&](u64& full, u32 parity, u64& empty) { skip_stage(full, parity, empty, int(threadIdx.x) % 128, meet); };

  Rows rows;
  int tile, whole_first, whole_end;  // of the item: the tile whose scores come next; tiles of which every row sees every key
  // While the first products of an item are under way: in front of them, it would take longer to get there.
  const auto ready_rows = [&]() __attribute__((always_inline)) {
    const Item& item = shared.item[entry.at];
    set_rows(rows, p, item, item_row(), p.scale * kv_scale(p.k, item.kv_head));
    const int begin = warp_id() / 4 * kTeamRows;  // not by wg, which would stay in a register meanwhile
    const int first_row = min(begin, item.num_rows - 1), last_row = min(begin + kTeamRows - 1, item.num_rows - 1);
    const int all_lo = max(item.lo, visible_keys(p, item.position_of(last_row)).lo);
    const int all_hi = max(0, min(item.hi, visible_keys(p, item.position_of(first_row)).hi));
    whole_first = (all_lo + kTileKeys - 1) / kTileKeys, whole_end = all_hi / kTileKeys;
    if constexpr (kCustomMask) prefetch_mask(p, item, item_row(), tile);
  };
  const auto next_told = [&] {
    wait_for_tile(shared.k_full[k.at], k.parity);
    return shared.told[k.at];
  };
  // Goes to the next tile if every row sees every key of it; otherwise returns false.
  const auto goes_to_whole_tile = [&]() __attribute__((always_inline)) {
    if constexpr (!kCustomMask) {
      if (tile <= whole_first || tile > whole_end) return false;
      --tile;
    } else {
      if (tile == tiles_of(shared.item[entry.at]).first) return false;
      const int told = next_told();
      if ((told >> wg & 1) == 0) return false;
      tile = told >> kToldBits;
    }
    return true;
  };
  const auto begin_item = [&]() __attribute__((always_inline)) {
    mbarrier_wait(shared_address(&shared.q_full[slot().at]), slot().parity);
    const Item& item = shared.item[entry.at];
    if (item.num_rows == kNoItem) return false;
    tile = tiles_of(item).end - 1;
    for (const int last = seen_end(p, item) - 1; kSkipped > 0 && tile > last; --tile, k.next())
      skip(shared.k_full[k.at], k.parity, shared.k_empty[k.at]);
    return true;
  };
  const auto leave_queries = [&]() __attribute__((always_inline)) {
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared_address(&shared.q_empty[slot().at]));
    many_slots.next();
  };

  float out[kVDims / 2], reference[2] = {kEmptyReference, kEmptyReference}, sum[2] = {0.f, 0.f}, factor[2];
  u32 weights[kTileKeys / 16][4];
  KeyRange weighed;  // keys of the tile that the weights belong to, counted within it
#pragma unroll
  for (int i = 0; i < kVDims / 2; ++i) out[i] = 0.f;
  // `edge` is a template argument, because a branch while products are under way would have to wait for them.
  const auto softmax = [&]<bool edge>(float(&s)[kTileKeys / 2], Edge<edge>) __attribute__((always_inline)) {
    const int begin = tile * kTileKeys;
    if constexpr (!kPlainLogits) modify(rows, s);
    if constexpr (edge && kCustomMask) {
      hide_masked(p, shared.item[entry.at], item_row(), tile, s);
    } else if constexpr (edge) {
      if constexpr (!kPlainLogits) set_seen(rows, p, shared.item[entry.at], item_row());  // not kept meanwhile
      hide(begin, rows, s);
    }
    return weigh(p, begin, rows, s, reference, sum, factor, kSlack, kFresh);
  };
  const auto next_tile = [&]<bool edge>(Edge<edge>) __attribute__((always_inline)) {
    weighed = {0, kTileKeys};
    if constexpr (edge) {
      const Item& item = shared.item[entry.at];
      weighed.hi = item.hi - tile * kTileKeys;
      if constexpr (kWindow) weighed.lo = item.lo - tile * kTileKeys;
    }
    v = k;
    k.next();
  };
  const auto wait_for_values = [&] { wait_for_tile(shared.v_full[v.at], v.parity); };
  const auto clear_hidden_values = [&]() __attribute__((always_inline)) {
    if (weighed.lo <= 0 && weighed.hi >= kTileKeys) return;
    wait_for_values();
    clear_values(shared_address(shared.v[v.at]), wg, weighed.lo, weighed.hi);
  };
  // Releases the values of the tiles in front of an item's first one, from `v` on. Values keep their order: these come after the last of
  // the item before.
  const auto skip_values = [&]() __attribute__((always_inline)) {
    for (; kSkipped > 0 && (v.at != k.at || v.parity != k.parity); v.next()) skip(shared.v_full[v.at], v.parity, shared.v_empty[v.at]);
  };
  if (begin_item()) {
    {
      float s[kTileKeys / 2];
      wait_for_tile(shared.k_full[k.at], k.parity);
      take_turn();
      wgmma_fence();
      start_scores(q_tile(), k_tile(), s);
      pass_turn();
      ready_rows();
      wgmma_wait<0>();
      pin(s);
      leave(shared.k_empty[k.at]);
      softmax(s, Edge<true>{});
      pack_weights(s, weights);
      skip_values();
      next_tile(Edge<true>{});
    }
    const auto end_item = [&]() __attribute__((always_inline)) {
      const float2* const ended = shared.ended_state[warp_id() / 4] + matrix_row();
      const float2 first = ended[0], second = ended[8];
      float references[2] = {first.x, second.x}, totals[2] = {first.y, second.y};
      const int at = (entry.at + kItems - 1) % kItems;
      if (fold_piece(p, shared.piece[at], references, totals, out)) store_rows(p, shared.item[at], item_row(), references, totals, out);
    };
    // Scores of `tile` and the output of the one before it, which may be the last of another item.
    const auto turn = [&]<bool edge>(Edge<edge> kind, bool begins) __attribute__((always_inline)) {
      float s[kTileKeys / 2];
      wait_for_tile(shared.k_full[k.at], k.parity);
      clear_hidden_values();
      take_turn();
      wgmma_fence();
      start_scores(q_tile(), k_tile(), s);
      wait_for_values();
      wgmma_fence();
      start_output(weights, v_tile(), out);
      pass_turn();
      if constexpr (edge) ready_rows();  // of each tile at an edge: a branch would have to wait for the products
      wgmma_wait<1>();
      pin(s);
      leave(shared.k_empty[k.at]);
      const bool moved = softmax(s, kind);
      // This branch is never taken. Without a branch that needs the sums, ptxas moves the wait in front of the exponentials.
      if (kManyDims && (sum[0] < 0.f || sum[1] < 0.f)) asm volatile("trap;");
      wgmma_wait<0>();
      pin(out);
      leave(shared.v_empty[v.at]);
      if (kSkipped > 0 && begins) {
        v.next();
        skip_values();
      }
      pack_weights(s, weights);
      for (auto& w : weights) pin(w);
      if (begins) end_item();
      if (begins && !kManyDims) {
#pragma unroll
        for (float& x : out) x = 0.f;
      } else if (begins || moved) {  // two branches may keep two copies of the sums
#pragma unroll
        for (int i = 0; i < kVDims / 2; ++i) out[i] = begins ? 0.f : out[i] * factor[i / 2 % 2];
      }
      next_tile(kind);
    };
    for (;;) {
      const bool begins = tile == tiles_of(shared.item[entry.at]).first;
      if (begins) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          shared.ended_state[warp_id() / 4][matrix_row() + 8 * h] = {reference[h], sum_over<4>(sum[h])};  // four lanes, the same
          reference[h] = kEmptyReference, sum[h] = 0.f;
        }
        __syncwarp();
        entry.next();
        leave_queries();
        if (!begin_item()) break;
      } else {
        tile = kCustomMask ? next_told() >> kToldBits : tile - 1;
      }
      turn(Edge<true>{}, begins);
      while (goes_to_whole_tile()) turn(Edge<false>{}, false);
    }
    clear_hidden_values();
    wait_for_values();
    wgmma_fence();
    start_output(weights, v_tile(), out);
    wgmma_wait<0>();
    pin(out);
    leave(shared.v_empty[v.at]);
    end_item();
  }
  if (wg == 0) take_turn();  // what the last warpgroup reported last
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                   const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  if (is_idle(p)) return;
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const int wg = shuffle(int(threadIdx.x / 128), 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQSlots; ++i) {
      mbarrier_init(shared_address(&shared.q_full[i]), 1);
      mbarrier_init(shared_address(&shared.q_empty[i]), 4 * kConsumers);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&shared.k_full[i]), kKeyLoaders);
      mbarrier_init(shared_address(&shared.v_full[i]), kValueLoaders);
      mbarrier_init(shared_address(&shared.k_empty[i]), kConsumers * kCluster);
      mbarrier_init(shared_address(&shared.v_empty[i]), kConsumers * kCluster);
    }
    for (int i = 0; i < kItems; ++i) mbarrier_init(shared_address(&shared.item_full[i]), 1);
    mbarrier_init(shared_address(&shared.item_ends), 1);
    init_handed(shared.handed);
    init_staging(shared);
    mbarrier_fence_init();
  }
  begin_cluster();
  constexpr bool kBoxes = !kWidens && !kSmallPages;
  if (warp_id() == 0) fetch_ahead<kBoxes ? kQChunks : 0, kBoxes ? kVChunks : 0>(p, k_map, v_map);
  if (!begin_launch(p)) return;
  if (wg == kConsumers) {
    registers_shrink<kProducerRegisters>();
    switch (warp_id() - 4 * kConsumers) {
      case 0: produce_items(p, q_map, shared); break;
      case 1: produce_keys(p, k_map, shared, 0); break;
      case 2: produce_values(p, v_map, shared); break;
      case 3:
        if constexpr (kWidens) produce_keys(p, k_map, shared, 1);
        break;
    }
  } else {
    registers_grow<kConsumerRegisters>();
    consume(p, shared, wg);
  }
  end_cluster();
  end_launch(p);
}

}  // namespace imbrex::cuda

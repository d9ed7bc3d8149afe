// Attention of many queries with wgmma and TMA, for sm_90a: prefill, chunked prefill and extend; planned by cuda/plan/plan.cpp. Its host
// side, with the limits of what it runs, is cuda/attention/attention_sm90.cpp.
//
// 128 rows x 128 keys x 128 dims are 8.4 M operations: 2048 cycles of the matrix unit, 1024 of the one for exponentials. Two warpgroups
// with 64 rows each take turns: while one multiplies, the other exponentiates. Of a third one, each warp has its own duty: items and their
// queries, keys, values. docs/kernels/cuda_sm90.md has the schedule.
#include "attention_sm90_consumer.cuh"

namespace imbrex::cuda {

constexpr int kThreads = 128 * (kConsumers + 1);

// Registers of a thread. The consumers get the registers that the producer's warpgroup gives up, and no more: each thread starts with
// kLaunchRegisters, and setmaxnreg waits for ever for registers that are not free.
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;
constexpr int kProducerRegisters = (kConsumers + 1) * kLaunchRegisters - kConsumers * kConsumerRegisters;
static_assert(kProducerRegisters >= 24, "the least that setmaxnreg takes");

// --- consumers: a warpgroup each

DEVICE void consume(const AttentionParams& p, SharedStorage& shared, int wg) {
  Consumer consumer(p, shared, wg);
  Rows rows;
  Sums sums;
  Weights weights;
  RowValues values;
  ColumnValues columns;
  if (wg == kConsumers - 1) consumer.pass_turn();
  if (consumer.begin_item()) {
    {
      Scores s;
      consumer.wait_for_keys();
      consumer.put_columns(columns);
      consumer.begin_columns_ahead(columns);
      consumer.take_turn();
      consumer.start_scores(s);
      consumer.pass_turn();
      consumer.ready_rows(rows, values);
      consumer.end_columns_ahead(columns);
      finish<0>(s);
      consumer.leave_keys();
      consumer.softmax<true>(rows, values, s, sums);
      pack_weights<kValueType>(s, weights);
      consumer.skip_values();
      consumer.end_tile<true>();
    }
    // The scores of a tile, and the output of the one before it, which may be the last of another item.
    const auto turn = [&]<bool edge>(Edge<edge>, bool begins) __attribute__((always_inline)) {
      Scores s;
      consumer.wait_for_keys();
      consumer.clear_hidden_values();
      consumer.put_columns(columns);
      consumer.begin_columns_ahead(columns);
      consumer.take_turn();
      consumer.start_scores(s);
      consumer.wait_for_values();
      consumer.start_output(weights, sums);
      consumer.pass_turn();
      if constexpr (edge) consumer.ready_rows(rows, values);  // of each tile at an edge: a branch would have to wait for the products
      consumer.end_columns_ahead(columns);
      finish<1>(s);
      consumer.leave_keys();
      const bool moved = consumer.softmax<edge>(rows, values, s, sums);
      sums.need_here();
      finish<0>(sums.out);
      consumer.leave_values();
      if (begins) consumer.skip_values_of_next_item();
      pack_weights<kValueType>(s, weights);
      pin(weights);
      if (begins) consumer.store_ended_item(sums);
      sums.rescale_output(begins, moved);
      consumer.end_tile<edge>();
    };
    for (;;) {
      const bool begins = consumer.at_first_tile();
      if (begins) {
        consumer.put_aside(sums);
        consumer.leave_item();
        if (!consumer.begin_item()) break;
      } else {
        consumer.next_tile();
      }
      turn(Edge<true>{}, begins);
      while (consumer.goes_to_whole_tile()) turn(Edge<false>{}, false);
    }
    consumer.clear_hidden_values();
    consumer.wait_for_values();
    consumer.start_output(weights, sums);
    finish<0>(sums.out);
    consumer.leave_values();
    consumer.store_ended_item(sums);
  }
  if (wg == 0) consumer.take_turn();  // what the last warpgroup reported last
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

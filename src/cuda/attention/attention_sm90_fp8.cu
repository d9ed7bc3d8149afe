// Attention of many queries in e4m3 with wgmma and TMA, for sm_90a: queries, keys, values and weights are all bytes. Its host side is
// cuda/attention/attention_sm90_fp8.cpp.
//
// 128 rows x 128 keys x 128 dims are 8.4 M operations: 1024 cycles of the matrix unit, as many of the one for exponentials, and 1110 of
// shared memory's 128 bytes. Two warpgroups have 64 rows each, and no order between them: turns at the matrix unit cost 3 %. Of a third,
// one warp loads and three transpose values, since wgmma wants keys to be the contiguous dimension of them. docs/kernels/cuda_sm90.md has
// the schedule.
#include "attention_sm90_fp8_consumer.cuh"

namespace imbrex::cuda {

constexpr int kThreads = 128 * (kConsumers + 1);

DEVICE void consume(const AttentionParams& p, SharedStorage& shared, int wg) {
  Consumer consumer(p, shared, wg);
  Rows rows;
  Sums sums;
  Weights weights;
  if (consumer.begin_item(rows)) {
    {
      Scores s;
      consumer.wait_for_keys();
      consumer.start_scores(s);
      finish<0>(s);
      consumer.leave_keys();
      consumer.softmax<true>(rows, s, sums);
      pack_weights<kE4m3>(s, weights);
      consumer.next_keys();
    }
    Ended ended;
    // The scores of a tile, and the output of the one before it, which may be the last of another item.
    const auto turn = [&]<bool edge>(Edge<edge>, bool begins) __attribute__((always_inline)) {
      Scores s;
      consumer.wait_for_keys();
      consumer.wait_for_values();
      consumer.start_scores(s);
      consumer.start_output(weights, sums);
      finish<1>(s);
      consumer.leave_keys();
      const bool moved = consumer.softmax<edge>(rows, s, sums);
      sums.need_here();
      finish<0>(sums.out);
      consumer.leave_values();
      pack_weights<kE4m3>(s, weights);
      if (begins) consumer.store_ended_item(ended, sums);
      sums.rescale_output(begins, moved);
      consumer.next_keys();
      consumer.next_values();
    };
    for (;;) {
      const bool begins = consumer.at_first_tile();
      if (begins) {
        consumer.put_aside(sums, ended);
        consumer.leave_item();
        if (!consumer.begin_item(rows)) break;
      } else {
        consumer.next_tile();
      }
      turn(Edge<true>{}, begins);
      while (!consumer.whole_tiles_end()) {
        consumer.next_tile();
        turn(Edge<false>{}, false);
      }
    }
    consumer.wait_for_values();
    wgmma_fence();
    consumer.start_output(weights, sums);
    finish<0>(sums.out);
    consumer.store_ended_item(ended, sums);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90_fp8(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                       const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  if (is_idle(p)) return;
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const int wg = warp_id() / 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQSlots; ++i) {
      mbarrier_init(shared_address(&shared.q_full[i]), 1);
      mbarrier_init(shared_address(&shared.q_empty[i]), kConsumers + kTransposers);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&shared.k_full[i]), kLoaders);
      mbarrier_init(shared_address(&shared.k_empty[i]), kConsumers * kCluster);
      mbarrier_init(shared_address(&shared.v_full[i]), kLoaders);
      mbarrier_init(shared_address(&shared.v_empty[i]), kTransposers * kCluster);
      mbarrier_init(shared_address(&shared.turned_full[i]), kTransposers);
      mbarrier_init(shared_address(&shared.turned_empty[i]), kConsumers);
    }
    init_handed(shared.handed);
    mbarrier_fence_init();
  }
  begin_cluster();
  if (!begin_launch(p)) return;
  if (wg == kConsumers) {
    registers_shrink<56>();
    if (const int warp = warp_id() % 4; warp == 0) {
      produce(p, q_map, k_map, v_map, shared);
    } else {
      transpose(p, shared, warp - 1);
    }
  } else {
    registers_grow<224>();
    consume(p, shared, wg);
  }
  end_cluster();
  end_launch(p);
}

}  // namespace imbrex::cuda

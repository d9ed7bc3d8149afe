#pragma once
// Finds the items of the thread blocks of a cluster, which take their turns together.
#include "attention_sm90_stream.cuh"

namespace imbrex::cuda {

// Numbers that the cluster's first block has taken, as it tells them to the `others`.
struct ClusterNumbers {
  static constexpr int kSlots = 3;
  int told[kSlots];
  u64 full[kSlots], empty[kSlots];

  DEVICE void begin(u32 others = 1) {
    for (int i = 0; i < kSlots; ++i) mbarrier_init(shared_address(&full[i]), 1), mbarrier_init(shared_address(&empty[i]), others);
  }
};

// A block's task of those that have such a number. Where an item's rows are two tasks of several tokens each, not all of them see the same
// keys: then blocks that bring each other keys take those that either of them needs, and a task without rows takes one tile.
template <int tasks_each>
DEVICE Item item_of_block(const AttentionParams& p, int number, int rank) {
  Item item = item_of(p, number * tasks_each + rank % tasks_each);
  if constexpr (kRowBlocks > 1 && kItemRows > kGroup) {
    if constexpr (tasks_each > 1) {
      static_assert(tasks_each == 2);
      const Item other = item_of(p, number * tasks_each + (rank ^ 1) % tasks_each);
      item.lo = min(item.lo, other.lo), item.hi = max(item.hi, other.hi);
    } else if (item.num_rows <= 0) {
      item.hi = item.lo;
    }
  }
  return item;
}

// Finds a block's first item in front of griddep_wait(), if no kernel in front may be writing lists; false: find_items_together() has to.
template <int tasks_each, class Shared>
DEVICE bool find_first_item(const AttentionParams& p, int rank, int blocks, Shared& shared) {
  const int first = int(blockIdx.x) / blocks;
  if (!p.lists_are_there || first >= num_tasks(p) / tasks_each) return false;
  publish_item(shared, 0, true, item_of_block<tasks_each>(p, first, rank));
  return true;
}

// As find_items() does for a block alone, when the first block wants an item: the cluster takes `tasks_each` tasks at a time, one for all
// blocks or one for each. `found`: what find_first_item() said.
template <int tasks_each, class Shared>
DEVICE void find_items_together(const AttentionParams& p, int rank, int blocks, Shared& shared, bool found = false) {
  const int first = int(blockIdx.x) / blocks, lane = lane_id(), turns = num_tasks(p) / tasks_each;
  if (!found) prefetch_item(p, first * tasks_each);
  ClusterNumbers& numbers = shared.numbers;
  Ring<Shared::kItemSlots> slot;
  Ring<ClusterNumbers::kSlots> told;
  const auto next_number = [&] {
    int number = 0;
    if (rank == 0) {
      mbarrier_wait(shared_address(&numbers.empty[told.at]), told.parity ^ 1);
      if (lane == 0) {
        number = take_number(p, int(gridDim.x) / blocks, turns);
        for (int block = 1; block < blocks; ++block)
          hand_over(shared_address(&numbers.told[told.at]), number, shared_address(&numbers.full[told.at]), u32(block));
      }
      number = shuffle(number, 0);
    } else {
      const u32 full = shared_address(&numbers.full[told.at]);
      if (lane == 0) mbarrier_arrive_expect(full, sizeof numbers.told[0]);
      __syncwarp();
      mbarrier_wait(full, told.parity);
      number = *static_cast<volatile int*>(&numbers.told[told.at]);
      __syncwarp();
      if (lane == 0) mbarrier_arrive_at<true>(shared_address(&numbers.empty[told.at]), 0);
    }
    told.next();
    return number;
  };
  static_assert(Shared::kItemSlots % 2 != 0, "an item's slot tells whether the number of items before it is odd: registers are few");
  for (int number = first < turns ? first : next_number();; number = next_number(), slot.next(), found = false) {
    if (!found) {
      mbarrier_wait(shared_address(&shared.item_empty[slot.at]), slot.parity ^ 1);
      const bool exists = number < turns;
      Item item;
      if (exists) item = item_of_block<tasks_each>(p, number, rank);
      publish_item(shared, slot.at, exists, item);
      if (!exists) break;
    }
    if (rank == 0) mbarrier_wait(shared_address(&shared.item_wanted), (u32(slot.at) ^ slot.parity) & 1);
  }
}

}  // namespace imbrex::cuda

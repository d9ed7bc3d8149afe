#pragma once
// Stands in for src/cuda/kernels/async.cuh where kernel texts run on the host: kernels follow each other, mbarriers lie beside shared
// memory, and a box of TMA, a word for another block or a group of products arrives at once or as late as it may: when somebody waits for
// it.
#include "cuda/lanes/launch.h"
#include "ptx.cuh"

#define __align__(n)

namespace imbrex::cuda {

using test::TensorMap;

inline void griddep_wait() {}
inline void griddep_launch() {}

// --- mbarriers

template <int size>
struct Ring {
  int at = 0;
  u32 parity = 0;
  void next() {
    if (++at == size) at = 0, parity ^= 1;
  }
};
template <int size>
Ring<size> ring_at(u32 steps) {
  return {int(steps % size), steps / size % 2};
}

inline lanes::MBarrier& mbarrier_at(u32 barrier, int rank = lanes::block.rank()) {
  const auto found = lanes::block.mbarriers[rank].find(barrier);
  if (found == lanes::block.mbarriers[rank].end()) lanes::fail("no mbarrier");
  return found->second;
}
inline void mbarrier_end_phase(lanes::MBarrier& b) {
  if (b.pending == 0 && b.bytes == 0) ++b.phase, b.pending = b.arrivals;
}
inline void mbarrier_count_bytes(lanes::MBarrier& b, long bytes) {
  constexpr long kMostBytes = (1 << 20) - 1;
  b.bytes += bytes;
  if (std::abs(b.bytes) > kMostBytes) lanes::fail("more bytes than an mbarrier can count");
}
inline void mbarrier_arrive_expect(lanes::MBarrier& b, u32 bytes) {
  if (b.pending == 0) lanes::fail("an arrival too many at an mbarrier");
  mbarrier_count_bytes(b, bytes);
  --b.pending;
  mbarrier_end_phase(b);
}
inline void mbarrier_init(u32 barrier, u32 arrivals) {
  lanes::block.mbarriers[lanes::block.rank()][barrier] = {arrivals, arrivals, 0, 0, {}};
}
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) { mbarrier_arrive_expect(mbarrier_at(barrier), bytes); }
inline void mbarrier_arrive(u32 barrier) { mbarrier_arrive_expect(barrier, 0); }
template <bool releases>
void mbarrier_arrive_at(u32 barrier, u32 block) {
  mbarrier_arrive_expect(mbarrier_at(barrier, int(block)), 0);
}
inline void mbarrier_wait(u32 barrier, u32 parity) {
  lanes::wait_until([&b = mbarrier_at(barrier), parity] {
    if (u32(b.phase & 1) == parity && b.pending == 0)
      for (const auto& write : std::exchange(b.writes, {})) write();
    return u32(b.phase & 1) != parity;
  });
}
inline bool mbarrier_is_over(u32 barrier, u32 parity) { return u32(mbarrier_at(barrier).phase & 1) != parity; }
// An asynchronous `write`, whose bytes the barrier counts.
template <class Write>
void write_later(lanes::MBarrier& b, u32 bytes, Write write) {
  const auto all = [&b, bytes, write] {
    write();
    mbarrier_count_bytes(b, -long(bytes));
    mbarrier_end_phase(b);
  };
  if (lanes::block.late_copies) {
    b.writes.push_back(all);
  } else {
    all();
  }
}

// Copies count as one byte that arrives with them.
inline void mbarrier_arrive_after_copies(u32 barrier) {
  lanes::MBarrier& b = mbarrier_at(barrier);
  const std::vector<lanes::Copy> copies = std::exchange(lanes::block.fiber().open, {});
  mbarrier_arrive_expect(b, 1);
  write_later(b, 1, [copies] {
    for (const lanes::Copy& copy : copies) perform(copy);
  });
}

// --- clusters

inline u32 cluster_rank() { return u32(lanes::block.rank()); }
inline void cluster_sync() {
  __syncwarp();
  lanes::wait_at(lanes::block.of_cluster, int(lanes::block.fibers.size()));
}
inline void hand_over(u32 to, int value, u32 barrier, u32 block) {
  write_later(mbarrier_at(barrier, int(block)), sizeof value,
              [place = lanes::shared_at(to, sizeof value, int(block)), value] { std::memcpy(place, &value, sizeof value); });
}

inline u32 block_address(u32 address, u32 block) { return block << 24 | address; }
inline u32 place_in_block(u32 address) { return address & 0xffffff; }
template <class T>
void hand_over(u32 to, const T& value, u32 barrier) {
  if (to % sizeof value != 0 || to >> 24 != barrier >> 24) lanes::fail("what is sent and its barrier are not in one block");
  write_later(mbarrier_at(place_in_block(barrier), int(to >> 24)), sizeof value,
              [at = lanes::shared_at(place_in_block(to), sizeof value, int(to >> 24)), value] { std::memcpy(at, &value, sizeof value); });
}
inline void bulk_hand_over(u32 to, u32 from, u32 bytes, u32 barrier) {
  if ((to | from | bytes) % 16 != 0 || to >> 24 != barrier >> 24) lanes::fail("what is sent and its barrier are not in one block");
  const u32 place = place_in_block(to);
  const int rank = int(to >> 24);
  lanes::shared_at(place + bytes - 16, 16), lanes::shared_at(from + bytes - 16, 16);  // their last units are in shared memory too
  write_later(mbarrier_at(place_in_block(barrier), rank), bytes,
              [at = lanes::shared_at(place, 16, rank), source = lanes::shared_at(from, 16), bytes] { std::memcpy(at, source, bytes); });
}

// --- TMA

inline bool elect_one() {
  __syncwarp();
  return lane_id() == 0;
}
inline void tma_prefetch_map(const TensorMap&) {}
inline void tma_prefetch(const TensorMap&, u64, int, int, int, int) {}
inline void bulk_prefetch(const void* from, u32 bytes) {
  if ((reinterpret_cast<unsigned long>(from) | bytes) % 16 != 0) lanes::fail("a misaligned prefetch");
}
inline u64 l2_first_out() { return 0; }
inline u64 l2_normal() { return 0; }
inline void async_proxy_fence_global() {}
inline void async_proxy_fence() {}
inline void bulk_load_of(int rank, u32 to, const void* from, u32 bytes, u32 barrier) {
  if (to % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0) lanes::fail("a bulk load that is not of whole units");
  lanes::shared_at(to + bytes - 16, 16, rank);  // its last unit is in shared memory too
  write_later(mbarrier_at(barrier, rank), bytes,
              [place = lanes::shared_at(to, 16, rank), from, bytes] { std::memcpy(place, from, bytes); });
}
inline void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) { bulk_load_of(lanes::block.rank(), to, from, bytes, barrier); }

inline void bulk_load_to(u32 blocks, u32 to, const void* from, u32 bytes, u32 barrier) {
  for (int rank = 0; rank < int(kMostBlocks); ++rank)
    if ((blocks >> rank & 1) != 0) bulk_load_of(rank, to, from, bytes, barrier);
}

// The pieces of 16 bytes in a row of 128 (64, 32) bytes change places by bits 7 and up of their address, as many as number them.
inline u32 swizzled(u32 address, u32 row_bytes) { return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4; }

// A box of a tensor and of shared memory, of which TMA copies one to the other.
struct TmaBox {
  TensorMap map;
  std::array<long, 4> at;  // in the tensor
  int rank;                // of the block whose shared memory it is
  u32 place;

  u32 row_bytes() const { return u32(map.box[0] * map.element_bytes); }
  u32 bytes() const { return row_bytes() * u32(map.box[1] * map.box[2] * map.box[3]); }
  bool swizzles() const { return row_bytes() == 128 || row_bytes() == 64; }
  void check() const {
    if (row_bytes() % 16 != 0 || map.box[0] > 256) lanes::fail("a box of rows that TMA cannot copy");
    if (place % (swizzles() ? 8 * row_bytes() : 128) != 0) lanes::fail("a box that does not begin with a swizzle, or 128 bytes");
  }
  // Calls visit(where an element lies in shared memory, and in the tensor, and whether it is one of the tensor's).
  template <class Visit>
  void each_element(const Visit& visit) const {
    u32 next = place;
    for (long l = at[3]; l < at[3] + map.box[3]; ++l)
      for (long k = at[2]; k < at[2] + map.box[2]; ++k)
        for (long j = at[1]; j < at[1] + map.box[1]; ++j)
          for (long i = at[0]; i < at[0] + map.box[0]; ++i, next += u32(map.element_bytes)) {
            const long index[] = {i, j, k, l};
            const char* element = map.data;
            bool inside = true;
            for (int d = 0; d < 4; ++d) {
              inside = inside && index[d] >= 0 && index[d] < map.sizes[d];
              element += index[d] * map.strides[d];
            }
            visit(lanes::shared_at(swizzles() ? swizzled(next, row_bytes()) : next, u32(map.element_bytes), rank), element, inside);
          }
  }
};

inline void tma_load_to(int rank, u32 to, const TensorMap& map, u32 barrier, int x, int y, int z, int w) {
  const TmaBox box{map, {x, y, z, w}, rank, to};
  box.check();
  write_later(mbarrier_at(barrier, rank), box.bytes(), [box] {
    const size_t size = size_t(box.map.element_bytes);
    box.each_element([=](char* shared, const char* element, bool inside) {
      inside ? std::memcpy(shared, element, size) : std::memset(shared, 0, size);
    });
  });
}
inline void tma_load(u32 to, const TensorMap& map, u32 barrier, u64, int x, int y, int z, int w = 0) {
  tma_load_to(lanes::block.rank(), to, map, barrier, x, y, z, w);
}
inline void tma_load_to_all(u32 to, const TensorMap& map, u32 barrier, u64, int blocks, int x, int y, int z, int w = 0) {
  for (int rank = 0; rank < blocks; ++rank) tma_load_to(rank, to, map, barrier, x, y, z, w);
}

// What is stored is what lies there when the thread waits at the latest: who changes it before that is told by the outputs.
inline void tma_store(const TensorMap& map, u32 from, int x, int y, int z) {
  const TmaBox box{map, {x, y, z, 0}, lanes::block.rank(), from};
  box.check();
  const auto store = [box] {
    box.each_element([&](const char* shared, const char* element, bool inside) {
      if (inside) std::memcpy(const_cast<char*>(element), shared, size_t(box.map.element_bytes));
    });
  };
  lanes::block.late_copies ? lanes::block.fiber().open_stores.push_back(store) : store();
}
inline void bulk_store(void* to, u32 from, u32 bytes) {
  if (from % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0)
    lanes::fail("a bulk store that is not of whole units");
  lanes::shared_at(from + bytes - 16, 16);
  const auto store = [to, source = lanes::shared_at(from, 16), bytes] { std::memcpy(to, source, bytes); };
  if (lanes::block.late_copies) {
    lanes::block.fiber().open_stores.push_back(store);
  } else {
    store();
  }
}
inline void tma_wait_for_stores() {
  for (const auto& store : std::exchange(lanes::block.fiber().open_stores, {})) store();
}

// --- registers and wgmma

// setmaxnreg: what a warp gives back, others may take; who asks for more than there is waits.
template <int registers>
void registers_set() {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
  __syncwarp();
  if (lane_id() == 0) {
    int &mine = lanes::block.warp().registers, &spare = lanes::block.spare_registers[lanes::block.rank()];
    lanes::wait_until([&] { return spare + mine >= registers; });
    spare += mine - registers, mine = registers;
  }
  __syncwarp();
}
template <int registers>
void registers_grow() {
  if (registers < lanes::block.warp().registers) lanes::fail("registers would shrink");
  registers_set<registers>();
}
template <int registers>
void registers_shrink() {
  if (registers > lanes::block.warp().registers) lanes::fail("registers would grow");
  registers_set<registers>();
}

inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_pin(float&) {}
inline void wgmma_pin(u32&) {}
inline u64 wgmma_descriptor(u32 address, u32 leading, u32 stride, u32 swizzle) {
  return u64((address & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | u64(swizzle) << 62;
}

template <class Product>
void multiply_later(Product product) {
  if (lanes::block.late_copies) {
    lanes::block.fiber().open_products.push_back(product);
  } else {
    product();
  }
}
inline void wgmma_commit() {
  lanes::Fiber& fiber = lanes::block.fiber();
  fiber.product_groups.push_back(std::exchange(fiber.open_products, {}));
  __syncwarp();
  if (lane_id() == 0) ++lanes::block.warp().committed;
}
// A product is one of four warps: done when all of them have come to it.
template <int pending>
void wgmma_wait() {
  __syncwarp();
  lanes::Warp& mine = lanes::block.warp();
  const long groups = mine.committed - pending;
  const auto all_warps = [first = &lanes::block.warps[size_t(lanes::block.current / 128 * 4)], groups](long lanes::Warp::*done) {
    return std::all_of(first, first + 4, [=](const lanes::Warp& warp) { return warp.*done >= groups; });
  };
  lanes::wait_until([&] { return all_warps(&lanes::Warp::committed); });
  auto& open = lanes::block.fiber().product_groups;
  for (; open.size() > pending; open.erase(open.begin()))
    for (const auto& product : open.front()) product();
  __syncwarp();
  if (lane_id() == 0) mine.performed = max(mine.performed, groups);
  lanes::wait_until([&] { return all_warps(&lanes::Warp::performed); });
}

}  // namespace imbrex::cuda

#pragma once
// Stands in for src/cuda/kernels/async.cuh where kernel texts run on the host: kernels follow each other, mbarriers lie beside shared
// memory, and a box of TMA arrives at once or as late as it may: when somebody waits for it.
#include "cuda/lanes/tensor_map.h"
#include "ptx.cuh"

#define __align__(n)

namespace imbrex::cuda {

using test::TensorMap;

inline void griddep_wait() {}
inline void griddep_launch() {}

template <int size>
struct Ring {
  int at = 0;
  u32 parity = 0;
  void next() {
    if (++at == size) at = 0, parity ^= 1;
  }
};

inline lanes::MBarrier& mbarrier_at(u32 barrier) {
  const auto found = lanes::block.mbarriers.find(barrier);
  if (found == lanes::block.mbarriers.end()) lanes::fail("no mbarrier");
  return found->second;
}
inline void mbarrier_end_phase(lanes::MBarrier& b) {
  if (b.pending == 0 && b.bytes == 0) ++b.phase, b.pending = b.arrivals;
}
inline void mbarrier_init(u32 barrier, u32 arrivals) { lanes::block.mbarriers[barrier] = {arrivals, arrivals, 0, 0, {}}; }
inline void mbarrier_fence_init() {}
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  lanes::MBarrier& b = mbarrier_at(barrier);
  if (b.pending == 0) lanes::fail("an arrival too many at an mbarrier");
  --b.pending, b.bytes += bytes;
  mbarrier_end_phase(b);
}
inline void mbarrier_arrive(u32 barrier) { mbarrier_arrive_expect(barrier, 0); }
inline void mbarrier_wait(u32 barrier, u32 parity) {
  lanes::wait_until([barrier, parity] {
    lanes::MBarrier& b = mbarrier_at(barrier);
    if (u32(b.phase & 1) == parity && b.pending == 0)
      for (const auto& load : std::exchange(b.loads, {})) load();
    return u32(b.phase & 1) != parity;
  });
}

inline void tma_prefetch_map(const TensorMap&) {}
inline u64 l2_first_out() { return 0; }
inline void async_proxy_fence() {}

// The pieces of 16 bytes in a row of 128 change places by the row's number.
inline void tma_load(u32 to, const TensorMap& map, u32 barrier, u64, int x, int y, int z, int w) {
  const auto load = [to, &map, barrier, at = std::array<long, 4>{x, y, z, w}] {
    const int line = map.box[0] * map.element_bytes;
    if (line != 128) lanes::fail("a box that is not 128 bytes wide");
    u32 row = to / 128;
    for (long l = at[3]; l < at[3] + map.box[3]; ++l)
      for (long k = at[2]; k < at[2] + map.box[2]; ++k)
        for (long j = at[1]; j < at[1] + map.box[1]; ++j, ++row)
          for (long byte = 0; byte < line; byte += map.element_bytes) {
            const long i = at[0] + byte / map.element_bytes, index[] = {i, j, k, l};
            const char* from = map.data;
            bool inside = true;
            for (int d = 0; d < 4; ++d) {
              inside = inside && index[d] >= 0 && index[d] < map.sizes[d];
              from += index[d] * map.strides[d];
            }
            char* const place = lanes::shared_at(row * 128 + (u32(byte / 16) ^ row % 8) * 16 + u32(byte % 16), u32(map.element_bytes));
            inside ? std::memcpy(place, from, size_t(map.element_bytes)) : std::memset(place, 0, size_t(map.element_bytes));
          }
    lanes::MBarrier& b = mbarrier_at(barrier);
    b.bytes -= (row - to / 128) * 128;
    mbarrier_end_phase(b);
  };
  if (to % 1024 % (8 * 128) != 0) lanes::fail("a box that does not begin with a swizzle");
  if (lanes::block.late_copies) {
    mbarrier_at(barrier).loads.push_back(load);
  } else {
    load();
  }
}

}  // namespace imbrex::cuda

#pragma once
// Instructions that came with sm_90, for kernels with a producer and consumers: mbarriers, TMA, wgmma's fences, moving registers between
// warpgroups, programmatic dependent launch.
#include "ptx.cuh"

namespace imbrex::cuda {

// --- dependent launch (LaunchShape::programmatic); before sm_90 kernels simply follow each other

// Blocks until everything the kernel in front wrote can be seen. Before the first read of it.
DEVICE void griddep_wait() {
  if constexpr (kArch >= 900) asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Lets the next kernel begin once every block has come here or ended. At the end of a kernel that does not fill the GPU: blocks which wait
// beside its own would share multiprocessors among themselves when it is their turn.
DEVICE void griddep_launch() {
  if constexpr (kArch >= 900) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// --- mbarriers: 8 bytes of shared memory by their address

DEVICE void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the inits, before the __syncthreads that publishes them: makes them known to TMA and to the cluster.
DEVICE void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// Arrives, and makes the phase wait for as many bytes of TMA loads too.
DEVICE void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives once all copies that this thread has begun (copy_async) are there.
DEVICE void mbarrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Whether the phase of that parity is over, without waiting.
DEVICE bool mbarrier_is_over(u32 barrier, u32 parity) {
  u32 over;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}
// Waits until the phase of that parity is over. A fresh barrier is in phase 0: waiting for parity 1 returns at once.
DEVICE void mbarrier_wait(u32 barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// A place in a ring of mbarriers and what they guard, and the parity of its current phase.
template <int size>
struct Ring {
  int at = 0;
  u32 parity = 0;
  DEVICE void next() {
    if (++at == size) at = 0, parity ^= 1;
  }
};

// After `steps` of them. Where registers are few, several rings can do with one number.
template <int size>
DEVICE Ring<size> ring_at(u32 steps) {
  return {int(steps % size), steps / size % 2};
}

// --- clusters

DEVICE u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Writes to the same place in another block, and reports four bytes to the barrier there.
DEVICE void hand_over(u32 to, int value, u32 barrier, u32 block) {
  asm volatile(
      "{\n.reg .b32 remote_to, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote_to, %0, %3;\n"
      "mapa.shared::cluster.u32 remote_barrier, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [remote_to], %1, [remote_barrier];\n}" ::"r"(to),
      "r"(value), "r"(barrier), "r"(block)
      : "memory");
}
// Where an address of this block's shared memory lies in another block: an operand of the next function.
DEVICE u32 block_address(u32 address, u32 block) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  return remote;
}
// Writes to another block, and reports 8 bytes to a barrier there.
DEVICE void hand_over(u32 to, const float2& value, u32 barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(value.x), "f"(value.y),
               "r"(barrier)
               : "memory");
}
// Copies this block's shared memory, as TMA sees it, to another block, and reports the bytes there. `to` and `barrier` are the other
// block's; addresses and bytes are multiples of 16.
DEVICE void bulk_hand_over(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// At the same barrier in another block.
template <bool releases>
DEVICE void mbarrier_arrive_at(u32 barrier, u32 block) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(barrier), "r"(block));
  if constexpr (releases) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
  } else {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
  }
}
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// --- TMA

// True in one lane of a warp, all of whose lanes are here. The compiler knows that it is one: of instructions whose operands are the same
// in all lanes, such as those of TMA, it makes no loop over lanes.
DEVICE bool elect_one() {
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

// The descriptor that the driver encodes (CUtensorMap); a __grid_constant__ parameter.
struct alignas(128) TensorMap {
  u64 opaque[16];
};

DEVICE void tma_prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Hints for L2 about the lines of a load: an operand of the loads below.
DEVICE u64 l2_first_out() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}
DEVICE u64 l2_normal() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
  return policy;
}

// A box of the tensor to shared memory; `barrier` gets its bytes. Coordinates innermost first; what lies outside of the tensor is zero.
DEVICE void tma_load(u32 to, const TensorMap& map, u32 barrier, u64 l2, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], "
      "%6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(l2)
      : "memory");
}
DEVICE void tma_load(u32 to, const TensorMap& map, u32 barrier, u64 l2, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], "
      "%7;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(l2)
      : "memory");
}

// A box into L2 alone.
DEVICE void tma_prefetch(const TensorMap& map, u64 l2, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.L2::cache_hint [%0, {%1, %2, %3, %4}], %5;" ::"l"(&map), "r"(x), "r"(y), "r"(z),
               "r"(w), "l"(l2)
               : "memory");
}

// The box goes to the same place in each of the cluster's first `blocks` thread blocks, and its bytes to the barrier there.
DEVICE void tma_load_to_all(u32 to, const TensorMap& map, u32 barrier, u64 l2, int blocks, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %8, %7;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(l2), "h"(static_cast<unsigned short>((1 << blocks) - 1))
      : "memory");
}

DEVICE void tma_load_to_all(u32 to, const TensorMap& map, u32 barrier, u64 l2, int blocks, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5}], [%2], %7, %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(l2), "h"(static_cast<unsigned short>((1 << blocks) - 1))
      : "memory");
}

// A box of shared memory to the tensor; what lies outside of it is left out. The box may change once this thread has waited.
DEVICE void tma_store(const TensorMap& map, u32 from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\ncp.async.bulk.commit_group;" ::"l"(&map),
               "r"(from), "r"(x), "r"(y), "r"(z)
               : "memory");
}
DEVICE void tma_wait_for_stores() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Contiguous bytes of shared memory, which may change once this thread has waited as above. Both addresses and the number are multiples of
// 16.
DEVICE void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// Contiguous bytes to shared memory; `barrier` gets them. Both addresses and the number are multiples of 16.
DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

// To the same place in each of the cluster's thread blocks whose bit is set in `blocks`, and the number to the barrier there.
DEVICE void bulk_load_to(u32 blocks, u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "h"(static_cast<unsigned short>(blocks))
               : "memory");
}

// Contiguous bytes into L2 alone. The address and the number are multiples of 16.
DEVICE void bulk_prefetch(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// Makes what this thread wrote to global memory visible to TMA.
DEVICE void async_proxy_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Makes what this thread wrote to shared memory visible to TMA and wgmma.
DEVICE void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- registers and wgmma (sm_90a; registers also sm_100a)

// Registers a thread of this warpgroup may use from here on: a multiple of 8, all four warps together.
template <int registers>
DEVICE void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
DEVICE void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Before the first wgmma that uses registers written by other instructions.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Pins an accumulator: the compiler may not move its uses across.
DEVICE void wgmma_pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void wgmma_pin(u32& x) { asm volatile("" : "+r"(x)::"memory"); }

// How a tile lies in shared memory: address, distances in bytes (leading and stride dimension), swizzle 1 for 128, 2 for 64, 3 for 32
// bytes, 0 for none.
DEVICE u64 wgmma_descriptor(u32 address, u32 leading, u32 stride, u32 swizzle) {
  return u64((address & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | u64(swizzle) << 62;
}

}  // namespace imbrex::cuda

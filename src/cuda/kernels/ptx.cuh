#pragma once
// The words that kernels are written in: lanes, shuffles, copies, matrix products, approximations, one PTX instruction each.
// No CUDA header: they would cost more time to read than the kernel to compile. Element types are in convert.cuh; barriers, TMA and
// what else sm_90 brought are in async.cuh.
#include "config.cuh"

#define DEVICE __device__ __forceinline__

namespace imbrex::cuda {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long;
using i64 = long;

constexpr u32 kFullWarp = 0xffffffffu;
constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;

// --- threads

DEVICE int lane_id() { return int(threadIdx.x & 31); }
// The number of the warp, in a register that is the same for the whole warp, so that branches on it are uniform to the compiler.
DEVICE int warp_id() { return __shfl_sync(kFullWarp, int(threadIdx.x / 32), 0); }

DEVICE float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(kFullWarp, x, lanes); }
DEVICE u32 shuffle_xor(u32 x, int lanes) { return __shfl_xor_sync(kFullWarp, x, lanes); }
DEVICE float shuffle(float x, int lane) { return __shfl_sync(kFullWarp, x, lane); }
DEVICE u32 shuffle(u32 x, int lane) { return __shfl_sync(kFullWarp, x, lane); }
DEVICE int shuffle(int x, int lane) { return __shfl_sync(kFullWarp, x, lane); }

// Over groups of `lanes` neighbours (a power of two); every lane gets the result. The order of additions is fixed.
template <int lanes = 32>
DEVICE float sum_over(float x) {
#pragma unroll
  for (int i = lanes / 2; i > 0; i /= 2) x += shuffle_xor(x, i);
  return x;
}
template <int lanes = 32>
DEVICE float max_over(float x) {
#pragma unroll
  for (int i = lanes / 2; i > 0; i /= 2) x = fmaxf(x, shuffle_xor(x, i));
  return x;
}

// Four neighbouring lanes have a row of a 4 x 4 matrix each; then, a column each.
DEVICE void transpose_quad(u32 (&x)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = (lane_id() & step) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      u32 &low = x[pair * (3 - step)], &high = x[pair * (3 - step) + step];
      const u32 other = shuffle_xor(upper ? low : high, step);
      if (upper) {
        low = other;
      } else {
        high = other;
      }
    }
  }
}

// Number of the lowest and of the highest bit of x that is set; x is not 0.
DEVICE int lowest_bit(u32 x) { return __ffs(int(x)) - 1; }
DEVICE int highest_bit(u32 x) { return 31 - __clz(int(x)); }

DEVICE bool any_lane(bool x) { return __any_sync(kFullWarp, x); }

// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads: wait for all, or only report to the threads that wait.
DEVICE void named_barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEVICE void named_barrier_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Meets the other threads at a named barrier, and returns whether x is true for one of them.
DEVICE bool named_barrier_any(int id, int threads, bool x) {
  u32 any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(u32(x))
      : "memory");
  return any != 0;
}

// x, of which the compiler knows nothing: what follows from it is computed here, and not kept in registers from before a loop.
DEVICE int computed_here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The same of a place in global memory.
template <class T>
DEVICE T* computed_here(T* x) {
  u64 place = u64(__cvta_generic_to_global(x));
  asm volatile("" : "+l"(place));
  return reinterpret_cast<T*>(__cvta_global_to_generic(place));
}

// Ends the kernel with an error.
DEVICE void trap() { asm volatile("trap;"); }

// --- bits and approximations

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 x) { return __uint_as_float(x); }
constexpr u32 kInfinityBits = 0x7f800000u;
DEVICE float infinity() { return float_of(kInfinityBits); }

// The four bytes that the nibbles of `selector` pick from b:a, lowest first.
DEVICE u32 pick_bytes(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// At most 2 units in the last place wrong; 2^-inf is 0, 2^x of a subnormal x is 1.
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2(0) is -inf.
DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- global memory

// Loads 16 bytes that no other thread reads: past L1. `p` is aligned to 16 bytes, here and below to the bytes that are moved.
DEVICE uint4 load_once_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
DEVICE uint2 load_once_8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
DEVICE void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Loads memory that other blocks, or the kernel in front, may write meanwhile: past L1, which may have older bytes.
DEVICE int load_l2(const int* p) { return __ldcg(p); }
DEVICE float2 load_l2(const float2* p) { return __ldcg(p); }
DEVICE float4 load_l2(const float4* p) { return __ldcg(p); }
// A load that ptxas does not reorder with others of the same thread. It moves ordinary loads together, as many as it finds registers for,
// and then lacks some.
DEVICE float4 load_in_order(const float4* p) {
  float4 x;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
  return x;
}
DEVICE void store_in_order(float4* p, const float4& x) {
  asm volatile("st.volatile.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
// A fence: a thread that sees what this thread writes after it also sees what this thread wrote before.
DEVICE void memory_fence() { __threadfence(); }

// --- shared memory

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

DEVICE uint4 load_shared(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
DEVICE void store_shared(u32 to, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void store_shared(u32 to, const uint2& v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(v.x), "r"(v.y) : "memory");
}

DEVICE void store_shared(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
DEVICE void store_shared(u32 to, u8 v) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(u32(v)) : "memory"); }

// One element of `size` bytes (2 or 4).
template <int size>
DEVICE u32 load_shared_element(u32 from) {
  u32 x;
  if constexpr (size == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  } else {
    static_assert(size == 2);
    u16 half;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(from) : "memory");
    x = half;
  }
  return x;
}

// Copies 16 bytes to shared memory in the background: the first `bytes`, and zeros behind them. Whole lines come into L2: rows of keys are
// lines or more, and asking by sectors costs 3 % of the bandwidth of an H200.
DEVICE void copy_async_first(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Copies to shared memory in the background, `size` bytes each (4, 8 or 16). With `valid` false nothing is read and zeros are written;
// the address must be a readable one all the same for some tools, so callers clamp it.
template <int size>
DEVICE void copy_async(u32 to, const void* from, bool valid = true) {
  static_assert(size == 4 || size == 8 || size == 16);
  const u32 bytes = valid ? size : 0;
  if constexpr (size == 16) {
    copy_async_first(to, from, bytes);
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(size), "r"(bytes) : "memory");
  }
}
DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` groups of this thread are under way.
template <int pending>
DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// 8x8 matrices of 16-bit elements, one row an address: lanes 0-7 give the rows of the first, 8-15 of the second, and so on. Lane i gets
// elements 2(i % 4) and the next of row i / 4; transposed: of column i / 4.
DEVICE void load_matrix(u32 (&d)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}
DEVICE void load_matrix(u32 (&d)[2], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(row) : "memory");
}
DEVICE void load_matrix_transposed(u32 (&d)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row)
               : "memory");
}
DEVICE void load_matrix_transposed(u32 (&d)[2], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(row) : "memory");
}
// The other way: lane i gives elements 2(i % 4) and the next of row i / 4, for each of four matrices. For sm_90 and later.
DEVICE void store_matrix(u32 row, u32 d0, u32 d1, u32 d2, u32 d3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(d0), "r"(d1), "r"(d2), "r"(d3)
               : "memory");
}

// With columns for rows: as load_matrix_transposed() reads them. The two matrices take the addresses of lanes 0 to 15.
DEVICE void store_matrix_transposed(u32 row, const u32 (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(d[0]), "r"(d[1]), "r"(d[2]),
               "r"(d[3])
               : "memory");
}
DEVICE void store_matrix_transposed(u32 row, const u32 (&d)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(d[0]), "r"(d[1]) : "memory");
}

// --- matrix products

// d[16 x 8] += a[16 x 16] * b[16 x 8], one warp. With g = lane / 4 and t = lane % 4, a lane holds
//   a: rows g and g + 8 at columns 2t, 2t + 1 (a[0], a[1]) and at 2t + 8, 2t + 9 (a[2], a[3])
//   b: rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1) of column g
//   d: columns 2t, 2t + 1 of row g (d[0], d[1]) and of row g + 8 (d[2], d[3])
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace imbrex::cuda

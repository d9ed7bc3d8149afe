#pragma once
// Stands in for src/cuda/kernels/ptx.cuh where kernel texts run on the host: the words that they use, by the definitions of the PTX ISA.
#include <algorithm>
#include <cmath>
#include <utility>

#include "config.cuh"
#include "core/small_floats.h"
#include "cuda/lanes/machine.h"
#include "cuda/lanes/widen.h"

#define DEVICE inline
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace imbrex::cuda {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long;
using i64 = long;
using std::max, std::min;

struct Index {
  unsigned x;
};
inline Index gridDim, first_block;  // of the cluster that runs
#define blockIdx (::imbrex::cuda::Index{::imbrex::cuda::first_block.x + unsigned(::imbrex::lanes::block.rank())})
#define threadIdx (::imbrex::cuda::Index{unsigned(::imbrex::lanes::block.current % ::imbrex::lanes::block.threads)})
#define blockDim (::imbrex::cuda::Index{unsigned(::imbrex::lanes::block.threads)})

constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;
constexpr u32 kInfinityBits = 0x7f800000u;

inline int lane_id() { return int(threadIdx.x) % 32; }
inline int computed_here(int x) { return x; }
template <class T>
inline T* computed_here(T* x) {
  return x;
}
inline void trap() { lanes::fail("a trap"); }

enum Kind { kShuffle, kVote, kLoad, kLoadTransposed, kStore, kMultiply, kSyncWarp, kSyncBlock };  // instructions at which lanes meet

inline float shuffle_xor(float x, int lanes) {
  return lanes::meet(kShuffle, x, [at = lane_id() ^ lanes](const float* all) { return all[at]; });
}
inline u32 shuffle_xor(u32 x, int lanes) {
  return lanes::meet(kShuffle, x, [at = lane_id() ^ lanes](const u32* all) { return all[at]; });
}
inline int shuffle(int x, int lane) {
  return lanes::meet(kShuffle, x, [lane](const int* all) { return all[lane % 32]; });
}
inline u32 shuffle(u32 x, int lane) { return u32(shuffle(int(x), lane)); }
inline float shuffle(float x, int lane) {
  return lanes::meet(kShuffle, x, [lane](const float* all) { return all[lane % 32]; });
}
// The library's is a call.
inline float fmaxf(float a, float b) { return a > b || b != b ? a : b; }
template <int lanes = 32>
float sum_over(float x) {
  for (int i = lanes / 2; i > 0; i /= 2) x += shuffle_xor(x, i);
  return x;
}
template <int lanes = 32>
float max_over(float x) {
  for (int i = lanes / 2; i > 0; i /= 2) x = fmaxf(x, shuffle_xor(x, i));
  return x;
}
constexpr u32 kFullWarp = 0xffffffffu;
inline u32 __ballot_sync(u32, bool x) {
  return lanes::meet(kVote, x, [](const bool* all) {
    u32 votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= u32(all[lane]) << lane;
    return votes;
  });
}
inline int __popc(u32 x) { return std::popcount(x); }
inline int __popcll(u64 x) { return std::popcount(x); }
inline int lowest_bit(u32 x) { return std::countr_zero(x); }
inline int highest_bit(u32 x) { return 31 - std::countl_zero(x); }
// Four neighbouring lanes have a row of a 4 x 4 matrix each; then, a column each.
inline void transpose_quad(u32 (&x)[4]) {
  struct Row {
    u32 of[4];
  };
  const Row column = lanes::meet(kShuffle, Row{{x[0], x[1], x[2], x[3]}}, [lane = lane_id()](const Row* all) {
    Row r;
    for (int i = 0; i < 4; ++i) r.of[i] = all[lane / 4 * 4 + i].of[lane % 4];
    return r;
  });
  std::copy(column.of, column.of + 4, x);
}
inline bool any_lane(bool x) {
  return lanes::meet(kVote, x, [](const bool* all) { return std::any_of(all, all + 32, [](bool b) { return b; }); });
}

inline void __syncwarp() {
  lanes::meet(kSyncWarp, 0, [](const int*) { return 0; });
}
// Kernels shuffle for it: so a lane that asks alone waits for the others.
inline int warp_id() {
  __syncwarp();
  return int(threadIdx.x) / 32;
}
inline void named_barrier_sync(int id, int threads) {
  lanes::meet(kSyncBlock + id, 0, [](const int*) { return 0; });
  lanes::wait_at(lanes::block.barriers[lanes::block.rank()][size_t(id)], threads);
}
inline void named_barrier_arrive(int id, int threads) {
  lanes::meet(kSyncBlock + id, 0, [](const int*) { return 0; });
  lanes::arrive_at(lanes::block.barriers[lanes::block.rank()][size_t(id)], threads);
}
inline bool named_barrier_any(int id, int threads, bool x) {
  bool& any = lanes::block.votes[lanes::block.rank()][size_t(id)];
  any = any || x;
  named_barrier_sync(id, threads);
  const bool found = any;
  named_barrier_sync(id, threads);
  any = false;
  named_barrier_sync(id, threads);
  return found;
}
inline void __syncthreads() { named_barrier_sync(0, lanes::block.threads); }
inline int __syncthreads_or(int x) { return named_barrier_any(0, lanes::block.threads, x != 0); }

inline u32 bits_of(float x) { return std::bit_cast<u32>(x); }
inline float float_of(u32 x) { return std::bit_cast<float>(x); }
inline float infinity() { return float_of(kInfinityBits); }
inline u32 pick_bytes(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(b) << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; ++i) d |= (u32(bytes >> 8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
  return d;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }

inline int atomicAdd(int* p, int x) { return std::exchange(*p, *p + x); }
inline u32 atomicOr(u32* p, u32 x) { return std::exchange(*p, *p | x); }
inline int atomicMax(int* p, int x) { return std::exchange(*p, max(*p, x)); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
inline void prefetch_l1(const void*) {}
inline void prefetch_l2(const void*) {}
inline int load_l2(const int* p) { return *p; }
inline float2 load_l2(const float2* p) { return *p; }
inline float4 load_l2(const float4* p) { return *p; }
inline float4 load_in_order(const float4* p) { return *p; }
inline void store_in_order(float4* p, const float4& x) { *p = x; }
inline void memory_fence() {}
inline uint4 load_once_16(const void* p) {
  lanes::check_aligned(p, 16);
  return *static_cast<const uint4*>(p);
}
inline uint2 load_once_8(const void* p) {
  lanes::check_aligned(p, 8);
  return *static_cast<const uint2*>(p);
}

inline u32 shared_address(const void* p) { return u32(static_cast<const char*>(p) - lanes::shared()); }
inline uint4 load_shared(u32 from) {
  uint4 v;
  std::memcpy(&v, lanes::shared_at(from, 16), 16);
  return v;
}
inline void store_shared(u32 to, const uint4& v) { std::memcpy(lanes::shared_at(to, 16), &v, 16); }
inline void store_shared(u32 to, u32 v) { std::memcpy(lanes::shared_at(to, 4), &v, 4); }
inline void store_shared(u32 to, u8 v) { std::memcpy(lanes::shared_at(to, 1), &v, 1); }
inline void store_shared(u32 to, const uint2& v) { std::memcpy(lanes::shared_at(to, 8), &v, 8); }

template <int size>
u32 load_shared_element(u32 from) {
  u32 x = 0;
  std::memcpy(&x, lanes::shared_at(from, size), size);
  return x;
}

inline void begin_copy(u32 to, const void* from, int size, int valid) {
  if (valid > 0) lanes::check_aligned(from, size);
  const lanes::Copy copy{lanes::shared_at(to, size), from, size, valid};
  if (!lanes::block.late_copies) perform(copy);
  lanes::block.fiber().open.push_back(copy);
}
template <int size>
void copy_async(u32 to, const void* from, bool valid = true) {
  begin_copy(to, from, size, valid ? size : 0);
}
inline void copy_async_first(u32 to, const void* from, u32 bytes) { begin_copy(to, from, 16, int(bytes)); }
inline void copy_async_commit() { lanes::block.fiber().groups.push_back(std::exchange(lanes::block.fiber().open, {})); }
template <int pending>
void copy_async_wait() {
  auto& groups = lanes::block.fiber().groups;
  for (; groups.size() > pending; groups.erase(groups.begin())) {
    if (!lanes::block.late_copies) continue;
    for (const lanes::Copy& copy : groups.front()) perform(copy);
  }
}

// ldmatrix: lane 8 i + r gives the address of row r of matrix i. Lane l gets elements 2(l % 4) and the next of row l / 4; transposed: of
// column l / 4.
template <bool transposed, int count>
void load_matrices(u32 (&d)[count], u32 address) {
  const int lane = lane_id();
  struct Words {
    u32 of[count];
  };
  const Words words = lanes::meet(transposed ? kLoadTransposed : kLoad, address, [lane](const u32* rows) {
    Words w;
    for (int i = 0; i < count; ++i) {
      u16 pair[2];
      for (int k = 0; k < 2; ++k) {
        const int down = transposed ? lane % 4 * 2 + k : lane / 4, along = transposed ? lane / 4 : lane % 4 * 2 + k;
        std::memcpy(&pair[k], lanes::shared_at(rows[8 * i + down], 16) + 2 * along, 2);
      }
      w.of[i] = u32(pair[0]) | u32(pair[1]) << 16;
    }
    return w;
  });
  std::copy(words.of, words.of + count, d);
}
inline void load_matrix(u32 (&d)[4], u32 address) { load_matrices<false>(d, address); }
inline void load_matrix_transposed(u32 (&d)[4], u32 address) { load_matrices<true>(d, address); }
inline void load_matrix_transposed(u32 (&d)[2], u32 address) { load_matrices<true>(d, address); }
// stmatrix, the other way: of `count` matrices, whose rows, or with `transposed` columns, lanes store at the addresses that they give.
template <int count, bool transposed>
void store_matrices(u32 address, const u32 (&d)[count]) {
  struct Row {
    u32 address, words[count];
  };
  Row mine{address, {}};
  std::copy(d, d + count, mine.words);
  lanes::meet(kStore, mine, [lane = lane_id()](const Row* all) {
    if (lane / 8 >= count) return 0;
    char* const to = lanes::shared_at(all[lane].address, 16);
    for (int i = 0; i < 8; ++i) {  // element i of row lane % 8 of the matrix
      const int row = transposed ? i : lane % 8, column = transposed ? lane % 8 : i;
      const u16 element = u16(all[row * 4 + column / 2].words[lane / 8] >> column % 2 * 16);
      std::memcpy(to + 2 * i, &element, 2);
    }
    return 0;
  });
  __syncwarp();  // a lane stores a row of what all have
}
inline void store_matrix(u32 address, u32 d0, u32 d1, u32 d2, u32 d3) { store_matrices<4, false>(address, {d0, d1, d2, d3}); }
template <int count>
void store_matrix_transposed(u32 address, const u32 (&d)[count]) {
  store_matrices<count, true>(address, d);
}

// mma.m16n8k16, with the lane's group g = lane / 4 and its place t in it, by the tables of the PTX ISA:
//   a_i (i < 8): row g for i % 4 < 2, else g + 8; column 2t + i % 2, + 8 for i >= 4
//   b_i (i < 4): row 2t + i % 2, + 8 for i >= 2; column g
//   d_i (i < 4): row g for i < 2, else g + 8; column 2t + i % 2
template <class Format>
void multiply_lanes(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Words {  // of two elements each
    u32 a[4], b[2];
  };
  struct Sums {
    float of[4];
  };
  const Sums sums = lanes::meet(kMultiply, Words{{a[0], a[1], a[2], a[3]}, {b0, b1}}, [lane = lane_id()](const Words* all) {
    u32 codes[2][2][8];  // of rows g and g + 8, and of columns 2t and 2t + 1
    for (int i = 0; i < 2; ++i)
      for (int k = 0; k < 8; ++k) {
        codes[0][i][k] = all[lane / 4 * 4 + k % 4].a[i + k / 4 * 2];
        codes[1][i][k] = all[(lane % 4 * 2 + i) * 4 + k % 4].b[k / 4];
      }
    lanes::Floats<16> terms;
    lanes::Doubles<16> lines[2][2];
    for (int i = 0; i < 4; ++i) {
      lanes::widen<Format, 16>(reinterpret_cast<const u16*>(codes[i / 2][i % 2]), terms);
      lines[i / 2][i % 2] = __builtin_convertvector(terms, lanes::Doubles<16>);
    }
    Sums s;
    for (int i = 0; i < 4; ++i) s.of[i] = float(lanes::sum_of<16, double>(lines[0][i / 2] * lines[1][i % 2]));
    return s;
  });
  for (int i = 0; i < 4; ++i) d[i] += sums.of[i];
}
inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply_lanes<lanes::Bf16>(d, a, b0, b1); }
inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply_lanes<lanes::F16>(d, a, b0, b1); }

}  // namespace imbrex::cuda

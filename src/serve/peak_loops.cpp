// See peak_loops.h.
#include "serve/peak_loops.h"

namespace imbrex::serve {
namespace {

typedef uint64_t U128 __attribute__((vector_size(16)));
typedef float F128 __attribute__((vector_size(16)));

// Eight lines apart in flight; the sum is only there so that the loads are made.
template <class V>
[[gnu::always_inline]] inline uint64_t read_lines(const char* data, int64_t bytes) {
  V sums[8] = {};
  for (int64_t i = 0; i + 512 <= bytes; i += 512) {
    for (int s = 0; s < 8; ++s) {
      for (int64_t part = 0; part < 64; part += int64_t(sizeof(V))) {
        sums[s] += *reinterpret_cast<const V*>(data + i + s * 64 + part);
      }
    }
  }
  V sum = sums[0];
  for (int s = 1; s < 8; ++s) sum += sums[s];
  uint64_t total = 0;
  for (size_t i = 0; i < sizeof(V); i += 8) total += reinterpret_cast<const uint64_t*>(&sum)[i / 8];
  return total;
}

// Twelve independent chains hide the latency of a multiply-add on every machine with up to three of them a cycle.
constexpr int kChains = 12;
template <class V>
[[gnu::always_inline]] inline float multiply_add(int64_t rounds) {
  V sums[kChains] = {}, factor = {}, term = {};
  for (size_t i = 0; i < sizeof(V) / sizeof(float); ++i) {
    factor[i] = 0.999f;
    term[i] = 0.001f;
  }
  for (V& sum : sums) __asm__ volatile("" : "+m"(sum));  // else the compiler sees that all chains are equal and runs one
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sums[c] = sums[c] * factor + term;
  }
  float total = 0;
  for (const V& sum : sums) total += sum[0];
  return total;
}

[[gnu::noinline]] uint64_t read_portable(const char* data, int64_t bytes) { return read_lines<U128>(data, bytes); }
[[gnu::noinline]] float fma_portable(int64_t rounds) { return multiply_add<F128>(rounds); }

#if defined(__x86_64__)
typedef uint64_t U512 __attribute__((vector_size(64)));
typedef float F512 __attribute__((vector_size(64)));
typedef float F256 __attribute__((vector_size(32)));

[[gnu::target("avx512f"), gnu::noinline]] uint64_t read_avx512(const char* data, int64_t bytes) { return read_lines<U512>(data, bytes); }
[[gnu::target("avx512f"), gnu::noinline]] float fma_avx512(int64_t rounds) { return multiply_add<F512>(rounds); }
[[gnu::target("avx2,fma"), gnu::noinline]] float fma_avx2(int64_t rounds) { return multiply_add<F256>(rounds); }

// The loop is one block of assembly, which keeps the chains of sums in registers.
[[gnu::target("avx512f,avx512bf16"), gnu::noinline]] float multiply_pairs(int64_t rounds) {
  F512 a = {}, b = {}, c = {}, d = {}, e = {}, f = {}, g = {}, h = {}, i = {}, j = {}, k = {}, l = {};
  const F512 zeros = {};
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__(
        "vdpbf16ps %12, %12, %0\n vdpbf16ps %12, %12, %1\n vdpbf16ps %12, %12, %2\n vdpbf16ps %12, %12, %3\n"
        "vdpbf16ps %12, %12, %4\n vdpbf16ps %12, %12, %5\n vdpbf16ps %12, %12, %6\n vdpbf16ps %12, %12, %7\n"
        "vdpbf16ps %12, %12, %8\n vdpbf16ps %12, %12, %9\n vdpbf16ps %12, %12, %10\n vdpbf16ps %12, %12, %11\n"
        : "+v"(a), "+v"(b), "+v"(c), "+v"(d), "+v"(e), "+v"(f), "+v"(g), "+v"(h), "+v"(i), "+v"(j), "+v"(k), "+v"(l)
        : "v"(zeros));
  }
  const F512 sum = a + b + c + d + e + f + g + h + i + j + k + l;
  return sum[0];
}

// Four accumulators, two operand tiles a side, as the attention kernels have them; all tiles 16 rows of 64 bytes.
constexpr int64_t kTileFlops = 2 * 16 * 16 * 32;
[[gnu::target("amx-tile,amx-bf16"), gnu::noinline]] float multiply_tiles(int64_t rounds) {
  alignas(64) static const uint8_t zeros[1024] = {};
  alignas(64) uint8_t config[64] = {1};
  for (int t = 0; t < 8; ++t) {
    config[16 + 2 * t] = 64;
    config[48 + t] = 16;
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
  const int64_t stride = 64;
  __asm__ volatile(
      "tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n"
      "tileloadd (%0,%1,1), %%tmm4\n tileloadd (%0,%1,1), %%tmm5\n tileloadd (%0,%1,1), %%tmm6\n tileloadd (%0,%1,1), %%tmm7\n"
      :
      : "r"(zeros), "r"(stride)
      : "memory");
  for (int64_t i = 0; i < rounds; ++i) {
    __asm__ volatile(
        "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
        "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n tdpbf16ps %%tmm7, %%tmm5, %%tmm3\n" ::);
  }
  __asm__ volatile("tilerelease" ::);
  return 0;
}
#endif

}  // namespace

#if defined(__x86_64__)
uint64_t read_all(CpuIsa isa, const char* data, int64_t bytes) {
  return isa >= CpuIsa::avx512 ? read_avx512(data, bytes) : read_portable(data, bytes);
}
float fma_rounds(CpuIsa isa, int64_t rounds) {
  return isa >= CpuIsa::avx512 ? fma_avx512(rounds) : isa >= CpuIsa::avx2 ? fma_avx2(rounds) : fma_portable(rounds);
}
float pair_rounds(CpuIsa, int64_t rounds) { return multiply_pairs(rounds); }
float tile_rounds(CpuIsa, int64_t rounds) { return multiply_tiles(rounds); }
double fma_flops(CpuIsa isa) { return 2. * kChains * (isa >= CpuIsa::avx512 ? 16 : isa >= CpuIsa::avx2 ? 8 : 4); }
double pair_flops(CpuIsa isa) { return isa >= CpuIsa::avx512_bf16 ? 4. * kChains * 16 : 0; }
double tile_flops(CpuIsa isa) { return isa == CpuIsa::amx ? 4. * double(kTileFlops) : 0; }
#else
uint64_t read_all(CpuIsa, const char* data, int64_t bytes) { return read_portable(data, bytes); }
float fma_rounds(CpuIsa, int64_t rounds) { return fma_portable(rounds); }
float pair_rounds(CpuIsa, int64_t) { return 0; }
float tile_rounds(CpuIsa, int64_t) { return 0; }
double fma_flops(CpuIsa) { return 2. * kChains * 4; }
double pair_flops(CpuIsa) { return 0; }
double tile_flops(CpuIsa) { return 0; }
#endif

}  // namespace imbrex::serve

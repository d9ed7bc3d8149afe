// What the machine can do at best: read bandwidth and arithmetic rate, measured with the simplest loops that reach them.
#include "serve/ceilings.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "core/check.h"
#include "imbrex/parallel.h"

namespace imbrex::serve {
namespace {

using Clock = std::chrono::steady_clock;
typedef uint64_t U512 __attribute__((vector_size(64)));
typedef float F512 __attribute__((vector_size(64)));
typedef float F256 __attribute__((vector_size(32)));

// Eight lines apart in flight; the sum is only there so that the loads are made.
template <class V>
[[gnu::always_inline]] inline uint64_t read_all(const char* data, int64_t bytes) {
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

[[gnu::target("avx512f"), gnu::noinline]] uint64_t read_avx512(const char* data, int64_t bytes) { return read_all<U512>(data, bytes); }
[[gnu::noinline]] uint64_t read_portable(const char* data, int64_t bytes) { return read_all<uint64_t>(data, bytes); }

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

[[gnu::target("avx512f"), gnu::noinline]] float fma_avx512(int64_t rounds) { return multiply_add<F512>(rounds); }
[[gnu::target("avx2,fma"), gnu::noinline]] float fma_avx2(int64_t rounds) { return multiply_add<F256>(rounds); }
[[gnu::noinline]] float fma_portable(int64_t rounds) {
  float sums[kChains * 4] = {};
  __asm__ volatile("" : "+m"(sums));
  for (int64_t round = 0; round < rounds; ++round) {
    for (float& sum : sums) sum = sum * 0.999f + 0.001f;
  }
  return sums[0];
}

// In one piece of assembly, which keeps the chains in registers.
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
[[gnu::target("amx-tile,amx-bf16"), gnu::noinline]] void multiply_tiles(int64_t rounds) {
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
}

// Best rate of `unit_per_call` while `seconds` last; body(worker) is one short repetition on every thread.
double best_rate(const ParallelFor& threads, double unit_per_call, double seconds, const std::function<void(int)>& body) {
  double best = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  do {
    const auto start = Clock::now();
    const auto call = [](void* argument, int worker) { (*static_cast<const std::function<void(int)>*>(argument))(worker); };
    threads.invoke(threads.context, threads.num_workers, call, const_cast<std::function<void(int)>*>(&body));
    const double time = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, unit_per_call / time);
  } while (Clock::now() < end);
  return best;
}

// Pages of its own, huge where the system has them, filled with ones by the thread that will read them.
class ReadBuffer {
 public:
  ReadBuffer(const ParallelFor& threads, int64_t bytes) : threads_(threads), bytes_(bytes) {
    void* memory = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "ceilings.memory", "{} bytes for the bandwidth measurement, got none", bytes);
    data_ = static_cast<char*>(memory);
    madvise(memory, size_t(bytes), MADV_HUGEPAGE);
    best_rate(threads_, 1, 0, [&](int worker) { std::fill_n(part(worker), part_bytes(), char(1)); });
  }
  ~ReadBuffer() { munmap(data_, size_t(bytes_)); }
  ReadBuffer(const ReadBuffer&) = delete;
  ReadBuffer& operator=(const ReadBuffer&) = delete;

  // Reads the first `bytes` of every thread's part, `repeat` times a measurement.
  double rate(int64_t bytes, int repeat, double seconds, bool avx512) const {
    std::vector<uint64_t> sums(size_t(threads_.num_workers) * 8);  // a cache line each
    return best_rate(threads_, double(bytes) * repeat * threads_.num_workers, seconds, [&](int worker) {
      uint64_t sum = 0;
      for (int i = 0; i < repeat; ++i) {
        sum += avx512 ? read_avx512(part(worker), bytes) : read_portable(part(worker), bytes);
        __asm__ volatile("" : : : "memory");  // else the compiler sees that the sums are equal and reads once
      }
      sums[size_t(worker) * 8] = sum;
    });
  }
  int64_t part_bytes() const { return bytes_ / threads_.num_workers / 4096 * 4096; }

 private:
  char* part(int worker) const { return data_ + worker * part_bytes(); }
  ParallelFor threads_;
  int64_t bytes_;
  char* data_ = nullptr;
};

}  // namespace

Ceilings measure_ceilings(const DeviceInfo& cpu, int num_threads, double seconds) {
  ThreadPool pool(num_threads);
  const ParallelFor threads = pool.parallel_for();
  Ceilings result;
  result.num_threads = threads.num_workers;
  const bool avx512 = cpu.isa >= CpuIsa::avx512;
  const double part = seconds / 6;

  // Larger than the last-level cache, but never more than an eighth of the memory; at most 512 MiB, because filling it takes time too.
  const int64_t wanted = std::clamp<int64_t>(4 * cpu.l3_bytes, int64_t(128) << 20, int64_t(512) << 20);
  const int64_t dram_bytes = cpu.memory_bytes > 0 ? std::min(wanted, cpu.memory_bytes / 8) : wanted;
  const ReadBuffer buffer(threads, dram_bytes);
  result.dram_read = buffer.rate(buffer.part_bytes(), 1, part * 1.5, avx512);
  const int64_t l2 = cpu.l2_bytes > 0 ? cpu.l2_bytes : int64_t(1) << 20;
  if (cpu.l3_bytes >= 4 * l2) {
    const int64_t share = std::min(cpu.l3_bytes / 2 / threads.num_workers, 8 * l2);
    result.l3_read = buffer.rate(std::min(std::max(share, 2 * l2) / 512 * 512, buffer.part_bytes()), 4, part, avx512);
  }

  constexpr int64_t kRounds = 200'000;
  std::vector<float> sums(size_t(threads.num_workers) * 16);
  const int width = avx512 ? 16 : cpu.isa >= CpuIsa::avx2 ? 8 : 4;
  result.fma = best_rate(threads, 2.0 * kChains * width * kRounds * threads.num_workers, part, [&](int worker) {
    sums[size_t(worker) * 16] = avx512 ? fma_avx512(kRounds) : cpu.isa >= CpuIsa::avx2 ? fma_avx2(kRounds) : fma_portable(kRounds);
  });
  if (cpu.isa >= CpuIsa::avx512_bf16) {
    result.pairs = best_rate(threads, 4.0 * kChains * 16 * kRounds * threads.num_workers, part,
                             [&](int worker) { sums[size_t(worker) * 16] = multiply_pairs(kRounds); });
  }
  if (cpu.isa == CpuIsa::amx) {
    result.amx = best_rate(threads, 4.0 * double(kTileFlops) * kRounds * threads.num_workers, part, [&](int) { multiply_tiles(kRounds); });
  }
  return result;
}

double Ceilings::flops_for(std::string_view backend, std::string_view q_dtype) const {
  if (tensor > 0) return tensor;
  const auto names = [&](std::string_view part) { return backend.find(part) != std::string_view::npos; };
  if (names("amx") && amx > 0) return amx;
  if (names("avx512") && q_dtype == to_string(DType::bf16) && pairs > 0) return 2 / (1 / pairs + 1 / fma);
  return fma;
}

Ceilings ceilings_of(const DeviceInfo& device, int num_threads, double seconds) {
  if (device.device.type == DeviceType::cpu) return measure_ceilings(device, num_threads, seconds);
  return {.dram_read = device.peak_bytes_per_s, .tensor = device.peak_flops};
}

}  // namespace imbrex::serve

// Measures the ceilings of this machine: read bandwidth and arithmetic rate, with the simplest loops that reach them (peak_loops.h).
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
#include "serve/peak_loops.h"

namespace imbrex::serve {
namespace {

using Clock = std::chrono::steady_clock;
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
  double rate(int64_t bytes, int repeat, double seconds, CpuIsa isa) const {
    std::vector<uint64_t> sums(size_t(threads_.num_workers) * 8);  // a cache line each
    return best_rate(threads_, double(bytes) * repeat * threads_.num_workers, seconds, [&](int worker) {
      uint64_t sum = 0;
      for (int i = 0; i < repeat; ++i) {
        sum += read_all(isa, part(worker), bytes);
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
  const double part = seconds / 6;

  // Larger than the last-level cache, but never more than an eighth of the memory; at most 512 MiB, because filling it takes time too.
  const int64_t wanted = std::clamp<int64_t>(4 * cpu.l3_bytes, int64_t(128) << 20, int64_t(512) << 20);
  const int64_t dram_bytes = cpu.memory_bytes > 0 ? std::min(wanted, cpu.memory_bytes / 8) : wanted;
  const ReadBuffer buffer(threads, dram_bytes);
  result.dram_read = buffer.rate(buffer.part_bytes(), 1, part * 1.5, cpu.isa);
  const int64_t l2 = cpu.l2_bytes > 0 ? cpu.l2_bytes : int64_t(1) << 20;
  if (cpu.l3_bytes >= 4 * l2) {
    const int64_t share = std::min(cpu.l3_bytes / 2 / threads.num_workers, 8 * l2);
    result.l3_read = buffer.rate(std::min(std::max(share, 2 * l2) / 512 * 512, buffer.part_bytes()), 4, part, cpu.isa);
  }

  constexpr int64_t kRounds = 200'000;
  std::vector<float> sums(size_t(threads.num_workers) * 16);
  const auto rate = [&](double flops_a_round, float (*loop)(CpuIsa, int64_t)) {
    return best_rate(threads, flops_a_round * kRounds * threads.num_workers, part,
                     [&](int worker) { sums[size_t(worker) * 16] = loop(cpu.isa, kRounds); });
  };
  result.fma = rate(fma_flops(cpu.isa), fma_rounds);
  if (pair_flops(cpu.isa) > 0) result.pairs = rate(pair_flops(cpu.isa), pair_rounds);
  if (tile_flops(cpu.isa) > 0) result.amx = rate(tile_flops(cpu.isa), tile_rounds);
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

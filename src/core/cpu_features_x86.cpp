// CPU features of x86-64: cpuid, what the system saves on a task switch, and permission for the tile state of AMX.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "core/cpu_features.h"
#include "core/text.h"

namespace imbrex {
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

// Register sets that the operating system saves on a task switch (XCR0); without its bit an instruction set must not be used.
uint64_t enabled_state() {
  if (!(cpuid(1).ecx & (1u << 27))) return 0;  // OSXSAVE
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

// The kernel hands out the 8 KiB of tile state per process, on request.
bool request_tiles() {
#ifdef SYS_arch_prctl
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::string brand_string() {
  if (unsigned(__get_cpuid_max(0x80000000u, nullptr)) < 0x80000004u) return "x86 CPU";
  char text[49] = {};
  for (unsigned i = 0; i < 3; ++i) {
    const Registers r = cpuid(0x80000002u + i);
    std::memcpy(text + 16 * i, &r, 16);
  }
  return std::string(trim(text));
}

CpuFeatures ask() {
  struct Flag {
    const char* name;
    bool present;
  };
  const auto first_missing = [](std::initializer_list<Flag> flags) -> std::string {
    for (const Flag& flag : flags)
      if (!flag.present) return std::string(flag.name) + " not in cpuid";
    return {};
  };
  const Registers base = cpuid(1), extended = cpuid(7), more = cpuid(7, 1);
  const uint64_t state = enabled_state();
  const auto has = [](unsigned word, int bit) { return ((word >> bit) & 1) != 0; };
  constexpr uint64_t kVector = 0x6, kVector512 = 0xe6, kTiles = 0x60000;

  CpuFeatures f;
  f.name = brand_string();
  f.avx2 = first_missing({{"avx2", has(extended.ebx, 5)}, {"fma", has(base.ecx, 12)}, {"f16c", has(base.ecx, 29)}});
  if (f.avx2.empty() && (state & kVector) != kVector) f.avx2 = "avx state not enabled by the system";
  f.avx512 = f.avx2;
  if (f.avx512.empty())
    f.avx512 = first_missing({{"avx512f", has(extended.ebx, 16)},
                              {"avx512bw", has(extended.ebx, 30)},
                              {"avx512dq", has(extended.ebx, 17)},
                              {"avx512vl", has(extended.ebx, 31)}});
  if (f.avx512.empty() && (state & kVector512) != kVector512) f.avx512 = "avx512 state not enabled by the system";
  f.avx512_bf16 = f.avx512;
  if (f.avx512_bf16.empty()) f.avx512_bf16 = first_missing({{"avx512vbmi", has(extended.ecx, 1)}, {"avx512bf16", has(more.eax, 5)}});
  f.amx = f.avx512_bf16;
  if (f.amx.empty()) f.amx = first_missing({{"amx-tile", has(extended.edx, 24)}, {"amx-bf16", has(extended.edx, 22)}});
  if (f.amx.empty() && (state & kTiles) != kTiles) f.amx = "tile state not enabled by the system";
  if (f.amx.empty() && !request_tiles()) f.amx = "the system refused tile state to this process";
  if (!f.amx.empty()) f.note = "amx: " + f.amx;
  return f;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = ask();
  return features;
}

}  // namespace imbrex
#endif

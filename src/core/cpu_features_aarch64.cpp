// CPU features of aarch64, as the Linux kernel tells them to every process. Kernels are compiled for NEON, which all of these CPUs have.
#if defined(__aarch64__)
#include <fmt/format.h>
#include <sys/auxv.h>

#include <cstdint>

#include "core/cpu_features.h"

namespace imbrex {
namespace {

// Implementer and part number of MIDR_EL1, as Arm's and Ampere's manuals give them. Programs may read it where the kernel says so.
std::string name_of_cpu() {
  if (!(getauxval(AT_HWCAP) & HWCAP_CPUID)) return "aarch64 CPU";
  uint64_t midr = 0;
  __asm__("mrs %0, midr_el1" : "=r"(midr));
  const unsigned implementer = unsigned(midr >> 24) & 0xff, part = unsigned(midr >> 4) & 0xfff;
  struct Known {
    unsigned implementer, part;
    const char* name;
  };
  constexpr Known kKnown[] = {{0x41, 0xd08, "Cortex-A72"},  {0x41, 0xd0b, "Cortex-A76"},  {0x41, 0xd0c, "Neoverse N1"},
                              {0x41, 0xd40, "Neoverse V1"}, {0x41, 0xd49, "Neoverse N2"}, {0x41, 0xd4f, "Neoverse V2"},
                              {0xc0, 0xac3, "Ampere-1"},    {0xc0, 0xac4, "Ampere-1A"}};
  for (const Known& cpu : kKnown)
    if (cpu.implementer == implementer && cpu.part == part) return cpu.name;
  return fmt::format("aarch64 CPU (implementer {:#x}, part {:#x})", implementer, part);
}

// Those extensions of the CPU that attention kernels could use, as a text for isa_note.
std::string extensions() {
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  std::string text = "neon";
  if (first & HWCAP_ASIMDHP) text += ", fp16";
  if (first & HWCAP_ASIMDDP) text += ", dotprod";
  if (second & HWCAP2_BF16) text += ", bf16";
  if (second & HWCAP2_I8MM) text += ", i8mm";
  if (first & HWCAP_SVE) text += ", sve";
  if (second & HWCAP2_SVE2) text += ", sve2";
  return text;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = [] {
    const std::string missing = "not an instruction set of aarch64";
    return CpuFeatures{.name = name_of_cpu(),
                       .note = fmt::format("aarch64 with {}; kernels use neon", extensions()),
                       .avx2 = missing,
                       .avx512 = missing,
                       .avx512_bf16 = missing,
                       .amx = missing};
  }();
  return features;
}

}  // namespace imbrex
#endif

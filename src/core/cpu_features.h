#pragma once
// What the processor of this machine is called and has, asked from it: cpu_features_x86.cpp or cpu_features_aarch64.cpp.
#include <string>

#include "imbrex/device.h"

namespace imbrex {

// Whether this build has the kernels of CpuIsa::avx2 and all above it.
#if defined(__x86_64__)
constexpr bool kX86 = true;
#else
constexpr bool kX86 = false;
#endif

struct CpuFeatures {
  std::string name;                            // "AMD EPYC 9354 32-Core Processor", "Neoverse V2"
  std::string note;                            // DeviceInfo::isa_note of the best instruction set
  std::string avx2, avx512, avx512_bf16, amx;  // the first thing that is missing for each instruction set, or empty

  const std::string& missing(CpuIsa isa) const {
    static const std::string nothing;
    switch (isa) {
      case CpuIsa::generic: return nothing;
      case CpuIsa::avx2: return avx2;
      case CpuIsa::avx512: return avx512;
      case CpuIsa::avx512_bf16:
      case CpuIsa::amx_emulated: return avx512_bf16;
      case CpuIsa::amx: return amx;
    }
    return nothing;
  }
};

const CpuFeatures& cpu_features();  // asked once

}  // namespace imbrex

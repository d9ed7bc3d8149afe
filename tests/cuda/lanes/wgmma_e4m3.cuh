#pragma once
// Stands in for src/cuda/kernels/wgmma_e4m3.cuh where kernel texts run on the host.
#include "wgmma.cuh"

namespace imbrex::cuda {

template <int n>
struct WgmmaE4m3 : WarpgroupProduct<n, u8, fp8_e4m3_to_float> {
  static void registers(float (&d)[n / 2], const u32 (&a)[4], u64 b, int add) {
    WarpgroupProduct<n, u8, fp8_e4m3_to_float>::template registers<false>(d, a, b, add);
  }
};

}  // namespace imbrex::cuda

#pragma once
// Stands in for src/cuda/kernels/wgmma_e4m3.cuh where kernel texts run on the host.
#include "wgmma.cuh"

namespace imbrex::cuda {

template <int n>
struct WgmmaE4m3 : WarpgroupProduct<n, lanes::E4m3> {
  static void registers(float (&d)[n / 2], const u32 (&a)[4], u64 b, int add) {
    WarpgroupProduct<n, lanes::E4m3>::template registers<false>(d, a, b, add);
  }
};

}  // namespace imbrex::cuda

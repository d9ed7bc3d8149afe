#pragma once
// The end of wgmma's products: their sums are in registers, and may be used.
#include "async.cuh"

namespace imbrex::cuda {

template <class T, int n>
DEVICE void pin(T (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if constexpr (requires { wgmma_pin(x[i]); }) {
      wgmma_pin(x[i]);
    } else {
      pin(x[i]);
    }
  }
}
// Waits for the products, all but the last `pending` of them, and for their sums with it.
template <int pending, class Sums>
DEVICE void finish(Sums& sums) {
  wgmma_wait<pending>();
  pin(sums);
}

}  // namespace imbrex::cuda

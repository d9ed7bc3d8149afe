#pragma once
// The bend of a soft cap, for kernels that have a logit to bend for each product of a query and a key.
#include "expression/short_operations.h"
#include "ptx.cuh"

namespace imbrex::cuda {

using operations::kTanhUnit;

// tanh(x / kTanhUnit), off by 1e-6 at most; NaN of NaN. The instruction for it is off by 2^-11, which a cap of 50 makes visible.
//
// `many_products`: there are few registers, and a logit's product takes longer than a reciprocal and two exponentials. With e = 2^-x it is
// 2 / (1 + e) - 1 then, also where e is infinite.
template <bool many_products>
DEVICE float tanh_of_units(float x) {
  if constexpr (many_products) return fmaf(2.f, reciprocal_approx(1.f + exp2_approx(-x)), -1.f);
  return operations::tanh_of_units(x);
}

}  // namespace imbrex::cuda

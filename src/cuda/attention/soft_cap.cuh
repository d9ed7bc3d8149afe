#pragma once
// The bend of a soft cap, for kernels that have a logit to bend for each product of a query and a key.
#include "ptx.cuh"

namespace imbrex::cuda {

constexpr float kTanhUnit = 2.f * kLog2e;

// tanh(x / kTanhUnit), off by 1e-6 at most; NaN of NaN. The instruction for it is off by 2^-11, which a cap of 50 makes visible. With
// e = 2^-x it is 2 / (1 + e) - 1, also where e is infinite.
//
// Reciprocals come from the unit for exponentials, which takes eight times as long as the one for multiply-adds. Five of these do instead,
// but need registers. `many_products`: there are few of those, and a logit's product takes longer than a reciprocal and two exponentials.
template <bool many_products>
DEVICE float tanh_of_units(float x) {
  if constexpr (many_products) return fmaf(2.f, reciprocal_approx(1.f + exp2_approx(-x)), -1.f);
  // e is computed from |x|, so that it is at most 1. A parabola of e is a guess of the reciprocal that is 1 % off, and another one, of the
  // guess times 1 + e, corrects it. Their coefficients are those for which the largest error of tanh is smallest, without error at 0.
  const float e = exp2_approx(-fabsf(x)), guess = fmaf(fmaf(e, 0.40709585f, -1.01846743f), e, 1.24706602f);
  const float off = fmaf(-(1.f + e), guess, 1.88993216f);
  return copysignf(fmaf(fmaf(off, off, 1.19048703f), guess, -1.f), x);
}

}  // namespace imbrex::cuda

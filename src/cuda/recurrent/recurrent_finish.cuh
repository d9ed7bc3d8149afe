#pragma once
// The gate and the norm of outputs, number by number: recurrent_outputs.cu does them behind other kernels, recurrent_step.cuh in a thread
// block that has all values of a head.
#include "recurrent_token.cuh"

namespace imbrex::cuda {

constexpr bool kGated = kOutGate != kNoOutputGate, kNormed = kOutNorm != kNoNorm, kGateFirst = kOutNorm != kNormBeforeGate;

DEVICE float gated(float x, float z) {
  if (kOutGate == kSiluOutputs) x *= z;
  return kGated ? x * sigmoid_of(z) : x;
}
// The factor of a norm over numbers whose squares have this sum.
DEVICE float norm_factor(float squares, float inverse_numbers, float eps) { return inverse_root(__fmaf_rn(squares, inverse_numbers, eps)); }

}  // namespace imbrex::cuda

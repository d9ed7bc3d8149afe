#pragma once
// Short forms of operations that take long on a GPU, for texts of ExpressionFloats::approximate: without branches, and with factors that a
// row multiplies its numbers by once. Quotients are two ulps off, powers two ulps and as many as the argument's last bit makes, tanh and
// sigmoid 1e-6. No headers, since NVRTC reads this file too; on the host, where texts are tested, they are as exact as operations.h.
#ifndef __CUDA_ARCH__
#include "expression/operations.h"
#endif

namespace imbrex::operations {

// What exp_of_units(), sigmoid_of_units() and tanh_of_units() want their argument multiplied by.
constexpr float kExpUnit = 1.44269504f, kSigmoidUnit = -1.44269504f, kTanhUnit = 2.88539008f;

#ifdef __CUDA_ARCH__
inline float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
inline float power_of_two(float a) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));
  return y;
}
inline float short_log(float a) { return __logf(a); }
inline float short_quotient(float a, float b) { return __fdividef(a, b); }
inline float magnitude(float a) { return fabsf(a); }
inline float with_sign_of(float a, float sign) { return copysignf(a, sign); }
#else
inline float power_of_two(float a) { return exp(a * 0.693147181f); }
inline float short_log(float a) { return log(a); }
inline float short_quotient(float a, float b) { return a / b; }
inline float magnitude(float a) { return abs(a); }
inline float with_sign_of(float a, float sign) { return __builtin_copysignf(a, sign); }
#endif

// A score in a row of keys: `number` times the product of query and key, above 0, `step` times the key's number, and the rest.
struct AffineScore {
  float number, step, rest;
};

inline float exp_of_units(float a) { return power_of_two(a); }
inline float sigmoid_of_units(float a) { return short_quotient(1.f, 1.f + power_of_two(a)); }
// tanh(a / kTanhUnit), NaN of NaN. e = 2^-|a| is at most 1. Reciprocals come from the unit for exponentials, which takes eight times as
// long as the one for multiply-adds: five of these do instead. A parabola of e is a guess of 1 / (1 + e) that is 1 % off, and another one,
// of the guess times 1 + e, corrects it. Their coefficients are those for which the largest error of tanh is smallest, without error at 0.
inline float tanh_of_units(float a) {
  const float e = power_of_two(-magnitude(a)), guess = fused(fused(e, 0.40709585f, -1.01846743f), e, 1.24706602f);
  const float off = fused(-(1.f + e), guess, 1.88993216f);
  return with_sign_of(fused(fused(off, off, 1.19048703f), guess, -1.f), a);
}

}  // namespace imbrex::operations

#pragma once
// What each operation of an expression does to its values: the one definition, for constants, for one element, for rows and for generated
// kernel texts. No headers, since NVRTC reads this file too. Loops over these functions become vectors: they choose, and do not branch.
// What uses them on the host is compiled without contracting products and sums, so that every use has the same bits.

namespace imbrex {

// What a generated text computes with.
struct ExpressionTensorData {
  const void* data;
  int sizes[3];
  long strides[3];  // in elements
};
struct ExpressionInputs {
  float score;  // times `scale`: the logit
  int batch, head, q, kv, q_len, kv_len;
  const ExpressionTensorData* tensors;  // in the order of Expression::tensors()
  float scale = 1.f;
  // For texts of ExpressionFloats::approximate: kv is the sum of both, and the first is the same for many keys.
  int first_kv = 0;
  float key = 0.f;
};

namespace operations {

constexpr int kIntMin = -2147483647 - 1, kIntMax = 2147483647;

#ifdef __CUDA_ARCH__
inline float as_float(unsigned bits) { return __int_as_float(int(bits)); }
inline unsigned as_bits(float x) { return unsigned(__float_as_int(x)); }
#else
inline float as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned as_bits(float x) { return __builtin_bit_cast(unsigned, x); }
#endif

inline int add(int a, int b) { return int(unsigned(a) + unsigned(b)); }
inline int subtract(int a, int b) { return int(unsigned(a) - unsigned(b)); }
inline int multiply(int a, int b) { return int(unsigned(a) * unsigned(b)); }
inline int negate(int a) { return int(0u - unsigned(a)); }
inline int abs(int a) { return a < 0 ? negate(a) : a; }
inline float add(float a, float b) { return a + b; }
inline float subtract(float a, float b) { return a - b; }
inline float multiply(float a, float b) { return a * b; }
inline float divide(float a, float b) { return a / b; }
inline float negate(float a) { return -a; }
inline float abs(float a) { return as_float(as_bits(a) & 0x7fffffffu); }
// The same, never contracted to fused operations: for values that decide something.
#ifdef __CUDA_ARCH__
inline float add_exact(float a, float b) { return __fadd_rn(a, b); }
inline float subtract_exact(float a, float b) { return __fsub_rn(a, b); }
inline float multiply_exact(float a, float b) { return __fmul_rn(a, b); }
#else
inline float add_exact(float a, float b) { return a + b; }
inline float subtract_exact(float a, float b) { return a - b; }
inline float multiply_exact(float a, float b) { return a * b; }
#endif

#ifdef __CUDA_ARCH__
inline int floor_divide(int a, int b) {
  if (b == 0) return 0;
  if (b == -1) return negate(a);
  const int quotient = a / b;
  return quotient - (quotient * b != a && (a < 0) != (b < 0) ? 1 : 0);
}
#else
// The quotient of doubles, rounded, has the same floor as the exact one: where that is no whole number, it is further from the next one
// than rounding takes it.
inline int floor_divide(int a, int b) {
  const double quotient = double(a) / (b == 0 ? 1.0 : double(b));
  const double fits = quotient > 2147483647.0 ? -2147483648.0 : quotient;  // the least int by -1 wraps
  const int whole = int(fits);
  return b == 0 ? 0 : whole - (double(whole) > fits ? 1 : 0);
}
#endif
inline int modulo(int a, int b) { return b == 0 ? 0 : subtract(a, multiply(floor_divide(a, b), b)); }

template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
inline bool equal(T a, T b) {
  return a == b;
}
template <class T>
inline bool not_equal(T a, T b) {
  return a != b;
}
template <class T>
inline bool less(T a, T b) {
  return a < b;
}
template <class T>
inline bool less_equal(T a, T b) {
  return a <= b;
}
inline bool logical_not(bool a) { return !a; }
inline bool logical_and(bool a, bool b) { return bool(a & b); }
inline bool logical_or(bool a, bool b) { return bool(a | b); }
inline bool logical_xor(bool a, bool b) { return a != b; }
inline int bit_and(int a, int b) { return a & b; }
inline int bit_or(int a, int b) { return a | b; }
inline int bit_xor(int a, int b) { return a ^ b; }
inline int shift_left(int a, int b) {
  const int shifted = int(unsigned(a) << (unsigned(b) & 31u));
  return unsigned(b) < 32u ? shifted : 0;
}
inline int shift_right(int a, int b) { return a >> (unsigned(b) < 32u ? b : 31); }
template <class T>
inline T where(bool condition, T a, T b) {
  return condition ? a : b;
}

inline float to_real(int a) { return float(a); }
inline float to_real(bool a) { return a ? 1.f : 0.f; }
inline int to_integer(bool a) { return a ? 1 : 0; }
inline int to_integer(float a) {
  const float fits = a >= -2147483648.f && a < 2147483648.f ? a : 0.f;
  const int whole = int(fits);
  return a >= 2147483648.f ? kIntMax : a < -2147483648.f ? kIntMin : whole;
}

#ifdef __CUDA_ARCH__
inline float floor(float a) { return floorf(a); }
inline float exp(float a) { return expf(a); }
inline float log(float a) { return logf(a); }
inline float sqrt(float a) { return sqrtf(a); }
inline float tanh(float a) { return tanhf(a); }
inline float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
inline float floor(float a) {
  const bool whole = !(abs(a) < 8388608.f);  // and infinities, and NaN
  const float inside = whole ? 0.f : a;
  const float rounded = float(int(inside));
  const float below = rounded > inside ? rounded - 1.f : rounded;
  return whole ? a : as_float(as_bits(below) | (as_bits(a) & 0x80000000u));
}

// Of functions only, so that every processor gives the same bits: one without such an instruction computes it, slowly.
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// (e^r - 1 - r) / r^2 for |r| <= ln(2) / 2: seven terms of the series of e^r are exact to a tenth of an ulp.
inline float exp_tail(float r) {
  float sum = fused(1.f / 5040.f, r, 1.f / 720.f);
  sum = fused(sum, r, 1.f / 120.f);
  sum = fused(sum, r, 1.f / 24.f);
  sum = fused(sum, r, 1.f / 6.f);
  return fused(sum, r, 0.5f);
}

// e^a = 2^n e^r.
inline float exp(float a) {
  const float low = a < -110.f ? -110.f : a, x = low > 90.f ? 90.f : low;
  const float shifted = fused(x, 1.44269504f, 12582912.f);  // its low bits count powers of two
  const float n = shifted - 12582912.f;
  const float r = fused(n, -1.42860677e-6f, fused(n, -0.693145752f, x));
  const float fraction = 1.f + fused(r * r, exp_tail(r), r);
  // 2^n in two factors, each a normal number.
  const int power = int(as_bits(shifted) - 0x4b400000u), half = power >> 1;
  const float first = as_float((unsigned(half) + 127u) << 23), second = as_float((unsigned(power) - unsigned(half) + 127u) << 23);
  return a != a ? a : fraction * first * second;
}

// log(2^n (1 + f)) with 1 + f between sqrt(1/2) and sqrt(2), from the series of log((1 + s) / (1 - s)), s = f / (2 + f).
inline float log(float a) {
  const bool small = a < 1.17549435e-38f;
  const float x = small ? a * 8388608.f : a;
  const unsigned shifted = as_bits(x) - 0x3f3504f3u;
  const float n = float(int(shifted) >> 23) - (small ? 23.f : 0.f);
  const float f = as_float((shifted & 0x7fffffu) + 0x3f3504f3u) - 1.f;
  const float s = f / (2.f + f), z = s * s;
  const float tail = z * (2.f / 3.f + z * (2.f / 5.f + z * (2.f / 7.f + z * (2.f / 9.f))));
  const float inside = n * 0.693145752f - ((s * (f - tail) - n * 1.42860677e-6f) - f);
  const float infinity = as_float(0x7f800000u), nan = as_float(0x7fc00000u);
  const float not_negative = a == 0.f ? -infinity : a == infinity ? infinity : inside;
  return a != a ? a : a < 0.f ? nan : not_negative;
}

inline float sqrt(float a) { return __builtin_sqrtf(a); }

// (e^2x - 1) / (e^2x + 1) of the magnitude, with e^2x - 1 = 2^n (e^r - 1) + (2^n - 1), which is exact to an ulp near 0 too.
inline float tanh(float a) {
  const float magnitude = abs(a), x = magnitude > 10.f ? 10.f : magnitude, twice = x + x;  // 1 from 9.02 on; NaN stays
  const float shifted = fused(twice, 1.44269504f, 12582912.f);                             // its low bits are n
  const float n = shifted - 12582912.f;
  const float r = fused(n, -1.42860677e-6f, fused(n, -0.693145752f, twice));
  const float power = as_float((as_bits(shifted) << 23) + 0x3f800000u);
  const float less_one = fused(power, fused(r * r, exp_tail(r), r), power - 1.f);
  return as_float(as_bits(less_one / (less_one + 2.f)) | (as_bits(a) & 0x80000000u));
}
#endif
inline float sigmoid(float a) { return 1.f / (1.f + exp(-a)); }

// The sine of an angle and some quarter turns. What is left of the angle without whole quarter turns is exact to an ulp, from a quarter
// turn in three parts: whole ones times the first part are a multiple of 2^-23, as the angle is. Of that at most an eighth of a turn is
// left, for which four terms of the series of the sine and five of the cosine's are exact to a tenth of an ulp.
inline float sine(float a, int quarters) {
  const bool inside = abs(a) < 4194304.f;
  const float x = inside ? a : 0.f, shifted = fused(x, 0.636619772f, 12582912.f);  // its low bits count quarter turns
  const float n = shifted - 12582912.f;
  const float r = fused(n, 1.71512451e-15f, fused(n, 4.37113883e-8f, fused(n, -1.57079637f, x))), z = r * r;
  const float odd = fused(fused(fused(1.f / 362880.f, z, -1.f / 5040.f), z, 1.f / 120.f), z, -1.f / 6.f);
  const float even = fused(fused(fused(fused(-1.f / 3628800.f, z, 1.f / 40320.f), z, -1.f / 720.f), z, 1.f / 24.f), z, -0.5f);
  const unsigned quadrant = as_bits(shifted) - 0x4b400000u + unsigned(quarters);
  const float of_eighth = (quadrant & 1u) != 0 ? fused(even, z, 1.f) : fused(odd, r * z, r);
  return inside ? as_float(as_bits(of_eighth) ^ (quadrant & 2u) << 30) : as_float(0x7fc00000u);
}
inline float sin(float a) { return sine(a, 0); }
inline float cos(float a) { return sine(a, 1); }

// Below 1 a polynomial that is fitted to erf(x) / x in the square of x, above it one minus e to one that is fitted to log(1 - erf(x)) up
// to 4.
inline float erf(float a) {
  const float x = abs(a), z = x * x, far = x > 4.f ? 4.f : x;
  float inside = fused(-9.67359119e-06f, z, 0.000112682537f);
  inside = fused(fused(inside, z, -0.000848439639f), z, 0.00522105349f);
  inside = fused(fused(inside, z, -0.0268654376f), z, 0.112837829f);
  inside = fused(fused(inside, z, -0.376126379f), z, 1.12837923f);
  float tail = fused(1.46843036e-06f, far, -4.30832552e-05f);
  tail = fused(fused(tail, far, 0.00057463639f), far, -0.00466845138f);
  tail = fused(fused(tail, far, 0.0261950046f), far, -0.109733097f);
  tail = fused(fused(tail, far, -0.632148087f), far, -1.13006783f);
  const float outside = 1.f - exp(fused(tail, far, 0.000283942005f));
  return as_float(as_bits(x < 1.f ? x * inside : outside) | (as_bits(a) & 0x80000000u));
}

// An element of a tensor; 0 where an index is out of range.
#ifdef __CUDA_ARCH__
// Without a branch, so that a row of keys loads what no key takes part in once: element 0 is there, in an empty tensor too.
template <class T>
inline T element(const ExpressionTensorData& tensor, int i, int j = 0, int k = 0) {
  const bool inside =
      unsigned(i) < unsigned(tensor.sizes[0]) && unsigned(j) < unsigned(tensor.sizes[1]) && unsigned(k) < unsigned(tensor.sizes[2]);
  const long at = i * tensor.strides[0] + j * tensor.strides[1] + k * tensor.strides[2];
  const T value = __ldg(static_cast<const T*>(tensor.data) + (inside ? at : 0));
  return inside ? value : T(0);
}
#else
template <class T>
inline T element(const ExpressionTensorData& tensor, int i, int j = 0, int k = 0) {
  if (unsigned(i) >= unsigned(tensor.sizes[0]) || unsigned(j) >= unsigned(tensor.sizes[1]) || unsigned(k) >= unsigned(tensor.sizes[2]))
    return T(0);
  return static_cast<const T*>(tensor.data)[i * tensor.strides[0] + j * tensor.strides[1] + k * tensor.strides[2]];
}
#endif
inline bool element_bool(const ExpressionTensorData& tensor, int i, int j = 0, int k = 0) {
  return element<unsigned char>(tensor, i, j, k) != 0;
}

}  // namespace operations
}  // namespace imbrex

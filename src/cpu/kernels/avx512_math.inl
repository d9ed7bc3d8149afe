// Vector vocabulary of the AVX-512 and AMX kernels: exp2, tanh, transposition.
#include <immintrin.h>

namespace imbrex::cpu {
namespace {

typedef __m512 vf;
typedef __m512i vi;

#define IMBREX_INLINE inline __attribute__((always_inline))
#define IMBREX_PRAGMA(x) _Pragma(#x)
#if defined(IMBREX_NO_UNROLL)
#define IMBREX_UNROLL(n)
#elif defined(__clang__)
#define IMBREX_UNROLL(n) IMBREX_PRAGMA(unroll n)
#else
#define IMBREX_UNROLL(n) IMBREX_PRAGMA(GCC unroll n)
#endif

// 2^x from the fraction in [0, 1) (imm 1 = floor, which vscalef needs). -inf gives 0, 0 gives exactly 1. Minimax, 2^0 exact.
IMBREX_INLINE vf exp2_f32(vf x) {  // relative error 8e-8
  const vf f = _mm512_reduce_ps(x, 1);
  vf p = _mm512_set1_ps(0.00186713057f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.00901702925f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0557999139f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24016445f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693151312f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, x);
}
IMBREX_INLINE vf exp2_bf16(vf x) {  // relative error 9e-5: a twentieth of the rounding to bf16 that follows
  const vf f = _mm512_reduce_ps(x, 1);
  vf p = _mm512_set1_ps(0.0770670732f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.227644957f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.695116794f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  return _mm512_scalef_ps(p, x);
}

// Scaling a logit and subtracting the maximum are one multiply-add, so the exponent of the maximum itself is its rounding error. From this
// maximum on that error would be too large: logits are then rounded before the subtraction, so that the maximum's exponent is zero.
constexpr float kLargeLogit = 1 << 27;
// A product that the compiler cannot fuse with an addition.
IMBREX_INLINE vf rounded_product(vf a, vf b) { return _mm512_mul_round_ps(a, b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// cap * tanh(x / cap), as cap (e / (e + 2)) with e = exp(2x / cap) - 1. `twice` is 2 log2(e) / cap. Relative error 3e-7, near 0 too: there
// a cap changes nothing, however large it is. The limit is the first operand of min, which returns the second where one is NaN.
IMBREX_INLINE vf soft_cap_f32(vf x, float twice, float cap) {
  const vf y = _mm512_min_ps(_mm512_set1_ps(30.f), _mm512_mul_ps(x, _mm512_set1_ps(twice)));
  const vf f = _mm512_reduce_ps(y, 0), power = _mm512_scalef_ps(_mm512_set1_ps(1.f), _mm512_sub_ps(y, f));
  vf p = _mm512_set1_ps(0.000154531634f);  // of (2^f - 1) / f from -1/2 to 1/2
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.00133908633f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.00961808302f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0555035695f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240226507f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693147182f));
  const vf e = _mm512_fmadd_ps(power, _mm512_mul_ps(p, f), _mm512_sub_ps(power, _mm512_set1_ps(1.f)));
  return _mm512_mul_ps(_mm512_set1_ps(cap), _mm512_div_ps(e, _mm512_add_ps(e, _mm512_set1_ps(2.f))));
}
// A soft cap with a shorter polynomial and a reciprocal instead of the division: absolute error cap * 1.5e-6.
IMBREX_INLINE vf soft_cap_bf16(vf x, float twice, float cap) {
  const vf y = _mm512_min_ps(_mm512_set1_ps(60.f), _mm512_mul_ps(x, _mm512_set1_ps(twice))), f = _mm512_reduce_ps(y, 1);
  vf p = _mm512_set1_ps(0.0134266886f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0522424672f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.241280208f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693044844f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.f));
  const vf d = _mm512_add_ps(_mm512_scalef_ps(p, y), _mm512_set1_ps(1.f));
  const vf r = _mm512_rcp14_ps(d);
  const vf q = _mm512_mul_ps(r, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(2.f)));
  return _mm512_fnmadd_ps(q, _mm512_set1_ps(2 * cap), _mm512_set1_ps(cap));
}

// Rounds to nearest even; a NaN becomes a quiet one.
IMBREX_INLINE __m256i round_bf16(vf x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  vi u = _mm512_castps_si512(x);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const vi odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  u = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  u = _mm512_mask_mov_epi32(_mm512_srli_epi32(u, 16), nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(u);
#endif
}

IMBREX_INLINE __mmask16 first(int n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : __mmask16((1u << n) - 1); }

// 16 x 16 transposition of 32-bit elements, in two halves: first each four neighbouring rows, then each four rows that are four apart.
IMBREX_INLINE void transpose_within_lanes(vi r[4]) {
  const vi t[4] = {_mm512_unpacklo_epi32(r[0], r[1]), _mm512_unpackhi_epi32(r[0], r[1]), _mm512_unpacklo_epi32(r[2], r[3]),
                   _mm512_unpackhi_epi32(r[2], r[3])};
  r[0] = _mm512_unpacklo_epi64(t[0], t[2]);
  r[1] = _mm512_unpackhi_epi64(t[0], t[2]);
  r[2] = _mm512_unpacklo_epi64(t[1], t[3]);
  r[3] = _mm512_unpackhi_epi64(t[1], t[3]);
}
IMBREX_INLINE void transpose_lanes(vi& a, vi& b, vi& c, vi& d) {
  const vi ab_even = _mm512_shuffle_i32x4(a, b, 0x88), ab_odd = _mm512_shuffle_i32x4(a, b, 0xdd);
  const vi cd_even = _mm512_shuffle_i32x4(c, d, 0x88), cd_odd = _mm512_shuffle_i32x4(c, d, 0xdd);
  a = _mm512_shuffle_i32x4(ab_even, cd_even, 0x88);
  b = _mm512_shuffle_i32x4(ab_odd, cd_odd, 0x88);
  c = _mm512_shuffle_i32x4(ab_even, cd_even, 0xdd);
  d = _mm512_shuffle_i32x4(ab_odd, cd_odd, 0xdd);
}
// In place.
IMBREX_INLINE void transpose(vi r[16]) {
  IMBREX_UNROLL(4)
  for (int i = 0; i < 4; ++i) transpose_within_lanes(r + 4 * i);
  IMBREX_UNROLL(4)
  for (int i = 0; i < 4; ++i) transpose_lanes(r[i], r[i + 4], r[i + 8], r[i + 12]);
}

// f with its template argument taken from a run-time element type.
#define IMBREX_BY_TYPE(type, f, ...)          \
  switch (type) {                             \
    case kF32: f<kF32>(__VA_ARGS__); break;   \
    case kF16: f<kF16>(__VA_ARGS__); break;   \
    case kBf16: f<kBf16>(__VA_ARGS__); break; \
    case kE4m3: f<kE4m3>(__VA_ARGS__); break; \
    default: f<kE5m2>(__VA_ARGS__); break;    \
  }

}  // namespace
}  // namespace imbrex::cpu

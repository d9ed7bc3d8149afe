// Vectors as wide as the instruction set's registers, of the compiler's types: loads, stores and conversions of f32, f16 and bf16. Included
// after convert.inl.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace imbrex::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef u32 Words __attribute__((vector_size(4 * kLanes)));
typedef u16 Halves __attribute__((vector_size(2 * kLanes)));

// 16-bit codes as floats, and floats rounded to codes. Conversions of f16 are one instruction from AVX2 on.
template <int type>
inline Floats from_halves(Halves h) {
#if defined(__AVX512F__)
  if constexpr (type == kF16) return (Floats)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  if constexpr (type == kF16) return (Floats)_mm256_cvtph_ps((__m128i)h);
#endif
  const Words w = __builtin_convertvector(h, Words);
  if constexpr (type == kBf16) return (Floats)(w << 16);
  const Words magnitude = (w & 0x7fff) << 13;
  const Words finite = (Words)((Floats)magnitude * 0x1p112f), special = magnitude | 0x7f800000u;
  return (Floats)((magnitude >= 0x0f800000u ? special : finite) | (w & 0x8000) << 16);
}
// The code is the upper half of each word; the lower one is anything.
inline Words rounded_to_bf16(Floats f) {
  const Words u = (Words)f;
  return f != f ? u | 0x400000 : u + 0x7fff + ((u >> 16) & 1);
}
template <int type>
inline Halves to_halves(Floats f) {
#if defined(__AVX512F__)
  if constexpr (type == kF16) return (Halves)_mm512_cvtps_ph((__m512)f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  if constexpr (type == kF16) return (Halves)_mm256_cvtps_ph((__m256)f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
  if constexpr (type == kBf16) return __builtin_convertvector(rounded_to_bf16(f) >> 16, Halves);
  return __builtin_convertvector(f16_codes<Words>(f), Halves);
}

// The first n elements of a vector, zero behind them.
template <int type>
inline Floats load_vector(const char* p, int n) {
  if constexpr (type == kF32) {
    Floats f = {};
    n == kLanes ? __builtin_memcpy(&f, p, 4 * kLanes) : __builtin_memcpy(&f, p, 4ul * n);
    return f;
  } else {
    Halves h = {};
    n == kLanes ? __builtin_memcpy(&h, p, 2 * kLanes) : __builtin_memcpy(&h, p, 2ul * n);
    return from_halves<type>(h);
  }
}

template <int type>
inline void store_vector(Floats f, int n, char* p) {
  if constexpr (type == kF32) {
    n == kLanes ? __builtin_memcpy(p, &f, 4 * kLanes) : __builtin_memcpy(p, &f, 4ul * n);
  } else {
    const Halves h = to_halves<type>(f);
    n == kLanes ? __builtin_memcpy(p, &h, 2 * kLanes) : __builtin_memcpy(p, &h, 2ul * n);
  }
}

}  // namespace
}  // namespace imbrex::cpu

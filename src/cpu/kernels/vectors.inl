// Vectors as wide as the instruction set's registers, of the compiler's types: loads, stores and conversions of f32, f16 and bf16. Included
// after convert.inl.

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
    const Words w = __builtin_convertvector(h, Words);
    if constexpr (type == kBf16) return (Floats)(w << 16);
    const Words magnitude = (w & 0x7fff) << 13;
    const Words finite = (Words)((Floats)magnitude * 0x1p112f), special = magnitude | 0x7f800000u;
    return (Floats)((magnitude >= 0x0f800000u ? special : finite) | (w & 0x8000) << 16);
  }
}

// Rounds floats to 16-bit codes, in the lower half of each word.
template <int type>
inline Words to_codes(Floats f) {
  const Words u = (Words)f;
  if constexpr (type == kBf16) {
    const Words rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return f != f ? (u >> 16) | 0x40 : rounded;
  } else {
    return f16_codes<Words>(f);
  }
}

template <int type>
inline void store_vector(Floats f, int n, char* p) {
  if constexpr (type == kF32) {
    n == kLanes ? __builtin_memcpy(p, &f, 4 * kLanes) : __builtin_memcpy(p, &f, 4ul * n);
  } else {
    const Halves h = __builtin_convertvector(to_codes<type>(f), Halves);
    n == kLanes ? __builtin_memcpy(p, &h, 2 * kLanes) : __builtin_memcpy(p, &h, 2ul * n);
  }
}

}  // namespace
}  // namespace imbrex::cpu

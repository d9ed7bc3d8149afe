// Element conversions as bit arithmetic, for every kernel file: written so that loops over them vectorise. No headers.
// They agree bit for bit with core/float_types.h; a test runs both over all codes.

namespace imbrex::cpu {
namespace {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

inline float as_float(u32 u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
inline u32 as_bits(float f) {
  u32 u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}

inline float from_bf16(u16 b) { return as_float(u32(b) << 16); }
inline float from_f16(u16 h) {
  const u32 magnitude = u32(h & 0x7fff) << 13;
  const float scaled = as_float(magnitude) * 0x1p112f;  // moves the exponent bias; exact for subnormals too
  const u32 finite = as_bits(scaled), special = magnitude | 0x7f800000u;
  return as_float((magnitude >= 0x0f800000u ? special : finite) | u32(h & 0x8000) << 16);
}
inline float from_e4m3(u8 b) {
  const u32 magnitude = b & 0x7f;
  const u32 finite = as_bits(as_float(magnitude << 20) * 0x1p120f);
  return as_float((magnitude == 0x7f ? 0x7fc00000u : finite) | u32(b & 0x80) << 24);
}
inline float from_e5m2(u8 b) { return from_f16(u16(b << 8)); }

inline u16 to_bf16(float f) {
  const u32 u = as_bits(f);
  const u32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return u16((u & 0x7fffffff) > 0x7f800000u ? (u >> 16) | 0x40 : rounded);
}

// Rounds to `mantissa` bits and an exponent of `exponent` bits, ties to even. `top` is the largest finite magnitude as a float's
// bits; larger finite values become `overflow`, infinities `infinite`, NaN `nan` and the upper bits of the
// payload (codes without sign). Where these two are the same, F and U may also be vectors of float and u32.
template <int exponent, int mantissa, int sign_shift, u32 top, u32 overflow, u32 infinite, u32 nan, class U = u32, class F = float>
inline U to_small_float(F f) {
  constexpr int shift = 23 - mantissa, bias = (1 << (exponent - 1)) - 1;
  constexpr u32 smallest_normal = u32(127 - bias + 1) << 23;
  const U u = __builtin_bit_cast(U, f), magnitude = u & 0x7fffffff;
  // Subnormal results: adding 2^k with the right k lets the float adder round at the wanted bit.
  constexpr u32 magic = u32(127 - bias + 1 - mantissa + 23) << 23;
  const U subnormal = __builtin_bit_cast(U, __builtin_bit_cast(F, magnitude) + __builtin_bit_cast(float, magic)) - magic;
  const U normal = ((magnitude + ((1u << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift) - (u32(127 - bias) << mantissa);
  U code = magnitude < smallest_normal ? subnormal : normal;
  code = magnitude > top ? U{} + overflow : code;
  if constexpr (infinite != overflow) code += u32(magnitude == 0x7f800000u) * (infinite - overflow);  // `?:` would become a branch
  code = magnitude > 0x7f800000u ? nan | (magnitude >> shift & ((1u << mantissa) - 1)) : code;
  return code | (u >> 31) << sign_shift;
}

// f16: everything that rounds to 2^16 or more overflows to infinity: that is, from 65520 on.
template <class U, class F>
inline U f16_codes(F f) {
  return to_small_float<5, 10, 15, 0x477fefffu, 0x7c00, 0x7c00, 0x7e00, U>(f);
}
inline u16 to_f16(float f) { return u16(f16_codes<u32>(f)); }
// fp8 saturates, as caches want it: a key beyond the range is better clipped than lost. e4m3 has no infinity.
inline u8 to_e4m3(float f) { return u8(to_small_float<4, 3, 7, 0x43e00000u, 0x7e, 0x7e, 0x7f>(f)); }
inline u8 to_e5m2(float f) { return u8(to_small_float<5, 2, 7, 0x47600000u, 0x7b, 0x7c, 0x7e>(f)); }

inline long element_size(int type) { return type == kF32 ? 4 : type == kF16 || type == kBf16 ? 2 : 1; }

inline float load_element(const char* p, int type) {
  u16 h;
  switch (type) {
    case kF32: {
      float f;
      __builtin_memcpy(&f, p, 4);
      return f;
    }
    case kF16: __builtin_memcpy(&h, p, 2); return from_f16(h);
    case kBf16: __builtin_memcpy(&h, p, 2); return from_bf16(h);
    case kE4m3: return from_e4m3(u8(*p));
    default: return from_e5m2(u8(*p));
  }
}
inline void store_element(char* p, int type, float f) {
  u16 h;
  switch (type) {
    case kF32: __builtin_memcpy(p, &f, 4); break;
    case kF16: h = to_f16(f), __builtin_memcpy(p, &h, 2); break;
    case kBf16: h = to_bf16(f), __builtin_memcpy(p, &h, 2); break;
    case kE4m3: *p = char(to_e4m3(f)); break;
    default: *p = char(to_e5m2(f)); break;
  }
}

// A row of n elements as floats. The type is looked at once, so that the loops vectorise.
inline void load_row(const char* p, long stride, int type, int n, float* out) {
  if (stride != element_size(type)) {
    for (int i = 0; i < n; ++i) out[i] = load_element(p + i * stride, type);
    return;
  }
  const u16* h = reinterpret_cast<const u16*>(p);
  const u8* b = reinterpret_cast<const u8*>(p);
  switch (type) {
    case kF32: __builtin_memcpy(out, p, 4ul * n); break;
    case kF16:
      for (int i = 0; i < n; ++i) out[i] = from_f16(h[i]);
      break;
    case kBf16:
      for (int i = 0; i < n; ++i) out[i] = from_bf16(h[i]);
      break;
    case kE4m3:
      for (int i = 0; i < n; ++i) out[i] = from_e4m3(b[i]);
      break;
    default:
      for (int i = 0; i < n; ++i) out[i] = from_e5m2(b[i]);
  }
}
inline void store_row(char* p, long stride, int type, int n, const float* in) {
  if (stride != element_size(type)) {
    for (int i = 0; i < n; ++i) store_element(p + i * stride, type, in[i]);
    return;
  }
  u16* h = reinterpret_cast<u16*>(p);
  u8* b = reinterpret_cast<u8*>(p);
  switch (type) {
    case kF32: __builtin_memcpy(p, in, 4ul * n); break;
    case kF16:
      for (int i = 0; i < n; ++i) h[i] = to_f16(in[i]);
      break;
    case kBf16:
      for (int i = 0; i < n; ++i) h[i] = to_bf16(in[i]);
      break;
    case kE4m3:
      for (int i = 0; i < n; ++i) b[i] = to_e4m3(in[i]);
      break;
    default:
      for (int i = 0; i < n; ++i) b[i] = to_e5m2(in[i]);
  }
}

}  // namespace
}  // namespace imbrex::cpu

#pragma once
// Element types: to and from f32, in pairs. They round and saturate as core/float_types.h does; a NaN stays a NaN, without its payload.
#include "cuda/params.h"
#include "ptx.cuh"

namespace imbrex::cuda {

constexpr int element_bytes(int type) { return type == kF32 ? 4 : type == kF16 || type == kBf16 ? 2 : 1; }

// --- 16 bits; the first argument goes to the lower half

// The upper halves of two floats, of which the lower ones are cut off; of NaN any that is one too.
DEVICE u32 upper_halves(float low, float high) {
  u32 pair;
  asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE u32 pack_bf16(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
DEVICE u32 pack_f16(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
DEVICE float2 unpack_bf16(u32 pair) { return {float_of(pair << 16), float_of(pair & 0xffff0000u)}; }
// Products of pairs of bf16, rounded to bf16 once. sm_90 and later.
DEVICE u32 multiply_bf16(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE u32 multiply_f16(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEVICE float2 unpack_f16(u32 pair) {
  float2 d;
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n}"
      : "=f"(d.x), "=f"(d.y)
      : "r"(pair));
  return d;
}

// --- from 8 bits; four elements of a word become two pairs

// Bytes 0 and 1 (half 0) or 2 and 3 (half 1) as the upper bytes of two 16-bit halves.
DEVICE u32 spread_bytes(u32 four, int half) { return pick_bytes(four, 0, half == 0 ? 0x1404 : 0x3424); }

// `bits`, all ones below the sign, in those halves that hold an e4m3 NaN (magnitude 0x7f in the upper byte); zero in the others.
DEVICE u32 e4m3_nan(u32 spread, u32 bits) { return ((((spread & 0x7f007f00u) + 0x01000100u) >> 15) & 0x00010001u) * bits; }

// For devices without the instruction: the fields fit, only the bias differs, by 8. Exact for subnormals too.
DEVICE u32 e4m3_to_f16_by_bits(u32 four, int half) {
  u32 d;
  const u32 spread = spread_bytes(four, half), moved = (spread & 0x80008000u) | (spread & 0x7f007f00u) >> 1;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(moved), "r"(0x5c005c00u));
  return d | e4m3_nan(spread, 0x7e00);
}
DEVICE u32 e4m3_to_f16(u32 four, int half) {
  if constexpr (kArch >= 890) {
    u32 d;
    const u16 pair = u16(half == 0 ? four : four >> 16);
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(pair));
    return d;
  } else {
    return e4m3_to_f16_by_bits(four, half);
  }
}
// e5m2 is the upper byte of f16.
DEVICE u32 e5m2_to_f16(u32 four, int half) { return spread_bytes(four, half); }

DEVICE float2 unpack_e4m3(u32 four, int half) { return unpack_f16(e4m3_to_f16(four, half)); }
DEVICE float2 unpack_e5m2(u32 four, int half) { return unpack_f16(e5m2_to_f16(four, half)); }

// --- to 8 bits, saturating

// Rounds to a narrow type without its instruction: to `mantissa` bits, ties to even, by integer arithmetic (normal results) or by an
// addition that ends at the wanted bit (subnormal ones). Magnitudes above `top` become `overflow`.
template <int exponent, int mantissa, u32 top, u32 overflow, u32 infinite, u32 nan>
DEVICE u32 round_to_byte(float x) {
  constexpr int shift = 23 - mantissa, bias = (1 << (exponent - 1)) - 1;
  constexpr u32 smallest_normal = u32(127 - bias + 1) << 23, magic = u32(127 - bias + 1 - mantissa + 23) << 23;
  const u32 bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const u32 subnormal = bits_of(float_of(magnitude) + float_of(magic)) - magic;
  const u32 normal = ((magnitude + (1u << (shift - 1)) - 1 + ((magnitude >> shift) & 1)) >> shift) - (u32(127 - bias) << mantissa);
  u32 code = magnitude < smallest_normal ? subnormal : normal;
  code = magnitude > top ? overflow : code;
  code = magnitude == kInfinityBits ? infinite : code;
  code = magnitude > kInfinityBits ? nan : code;
  return code | (bits >> 31) << 7;
}

DEVICE u32 pack_e4m3_by_bits(float low, float high) {
  return round_to_byte<4, 3, 0x43e00000u, 0x7e, 0x7e, 0x7f>(low) | round_to_byte<4, 3, 0x43e00000u, 0x7e, 0x7e, 0x7f>(high) << 8;
}
DEVICE u32 pack_e5m2_by_bits(float low, float high) {
  return round_to_byte<5, 2, 0x47600000u, 0x7b, 0x7c, 0x7e>(low) | round_to_byte<5, 2, 0x47600000u, 0x7b, 0x7c, 0x7e>(high) << 8;
}

DEVICE u32 pack_e4m3(float low, float high) {
  if constexpr (kArch >= 890) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    return d;
  } else {
    return pack_e4m3_by_bits(low, high);
  }
}
DEVICE u32 pack_e5m2(float low, float high) {
  if constexpr (kArch >= 890) {
    u16 d;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    // The instruction makes 57344 of an infinity, which has a code of its own.
    const u32 low_infinite = (bits_of(low) & 0x7fffffffu) == kInfinityBits, high_infinite = (bits_of(high) & 0x7fffffffu) == kInfinityBits;
    return d + low_infinite + (high_infinite << 8);
  } else {
    return pack_e5m2_by_bits(low, high);
  }
}

}  // namespace imbrex::cuda

#pragma once
// Stands in for src/cuda/kernels/convert.cuh where kernel texts run on the host: the conversions of core/float_types.h.
#include "cuda/params.h"
#include "ptx.cuh"

namespace imbrex::cuda {

constexpr int element_bytes(int type) { return type == kF32 ? 4 : type == kF16 || type == kBf16 ? 2 : 1; }

inline u32 pack_bf16(float low, float high) { return u32(float_to_bf16(low)) | u32(float_to_bf16(high)) << 16; }
inline u32 upper_halves(float low, float high) {
  const auto half = [](float x) { return x != x ? 0x7fffu : std::bit_cast<u32>(x) >> 16; };
  return half(low) | half(high) << 16;
}
inline u32 pack_f16(float low, float high) { return u32(float_to_f16(low)) | u32(float_to_f16(high)) << 16; }
inline u32 pack_e4m3(float low, float high) { return u32(float_to_fp8_e4m3(low)) | u32(float_to_fp8_e4m3(high)) << 8; }
inline u32 pack_e5m2(float low, float high) { return u32(float_to_fp8_e5m2(low)) | u32(float_to_fp8_e5m2(high)) << 8; }
inline float2 unpack_bf16(u32 pair) { return {bf16_to_float(u16(pair)), bf16_to_float(u16(pair >> 16))}; }
inline u32 multiply_bf16(u32 a, u32 b) {
  const float2 x = unpack_bf16(a), y = unpack_bf16(b);
  return pack_bf16(x.x * y.x, x.y * y.y);
}
inline float2 unpack_f16(u32 pair) { return {f16_to_float(u16(pair)), f16_to_float(u16(pair >> 16))}; }
inline float2 unpack_e4m3(u32 four, int half) {
  return {fp8_e4m3_to_float(u8(four >> half * 16)), fp8_e4m3_to_float(u8(four >> (half * 16 + 8)))};
}
inline float2 unpack_e5m2(u32 four, int half) {
  return {fp8_e5m2_to_float(u8(four >> half * 16)), fp8_e5m2_to_float(u8(four >> (half * 16 + 8)))};
}
inline u32 multiply_f16(u32 a, u32 b) {
  const float2 x = unpack_f16(a), y = unpack_f16(b);
  return pack_f16(x.x * y.x, x.y * y.y);
}
inline u32 e4m3_to_f16(u32 four, int half) { return pack_f16(unpack_e4m3(four, half).x, unpack_e4m3(four, half).y); }
inline u32 e5m2_to_f16(u32 four, int half) { return pack_f16(unpack_e5m2(four, half).x, unpack_e5m2(four, half).y); }

}  // namespace imbrex::cuda

#pragma once
// The float types of checkpoints and activations, and their conversions to f32 and back; rounding is to nearest even.
#include <bit>
#include <cstdint>

namespace llama {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
inline float to_float(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, magnitude = x.bits & 0x7fff;
  // The exponent is moved to that of f32 by a product, which is exact and also right for subnormal numbers.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  const uint32_t infinite = magnitude >= 0x7c00 ? 0x7f800000 : 0;  // and not a number
  return std::bit_cast<float>(sign | infinite | std::bit_cast<uint32_t>(scaled));
}

inline void from_float(float x, float& to) { to = x; }
inline void from_float(float x, BFloat16& to) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  to.bits = nan ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace llama

#pragma once
// Conversions between float and the narrow float types. Kernels have their own vector versions; this file is the definition they are tested
// against. It includes next to nothing, since each text of a GPU kernel that runs on the host is compiled with it.
#include <bit>
#include <cstdint>
#include <limits>

namespace imbrex {

// An IEEE-like format below 32 bits: sign, exponent, mantissa. Codes grow with the magnitude, which rounding relies on.
template <int kExponentBits, int kMantissaBits>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;

  // Code of the magnitude of a finite float, rounded to nearest even as if the exponent had no upper end.
  static constexpr uint32_t round_magnitude(uint32_t magnitude) {
    const int exponent = int(magnitude >> 23) - 127;
    constexpr int kDropped = 23 - kMantissaBits;
    if (exponent >= 1 - kBias) {
      const uint32_t rounded = (magnitude + (1u << (kDropped - 1)) - 1 + ((magnitude >> kDropped) & 1)) >> kDropped;
      return rounded - (uint32_t(127 - kBias) << kMantissaBits);
    }
    const int shift = kDropped + (1 - kBias - exponent);
    if (shift > 24) return 0;  // below half of the smallest subnormal; includes the subnormals of float
    const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    return (significand + (1u << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift;
  }

  // Value of a magnitude code that is neither infinity nor NaN.
  static constexpr float value(uint32_t code) {
    const uint32_t exponent = code >> kMantissaBits, mantissa = code & ((1u << kMantissaBits) - 1);
    if (exponent != 0) return std::bit_cast<float>(((exponent + 127 - kBias) << 23) | (mantissa << (23 - kMantissaBits)));
    return float(mantissa) * std::bit_cast<float>(uint32_t(127 + 1 - kBias - kMantissaBits) << 23);
  }
};

constexpr float with_sign(float magnitude, bool negative) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | (negative ? 0x80000000u : 0u));
}

constexpr uint32_t kFloatInfinity = 0x7f800000u;  // magnitudes above it are NaN

constexpr float bf16_to_float(uint16_t code) { return std::bit_cast<float>(uint32_t(code) << 16); }

constexpr uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > kFloatInfinity) return uint16_t((bits >> 16) | 0x40u);  // quiet, so that it cannot become infinity
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

constexpr float f16_to_float(uint16_t code) {
  const uint32_t magnitude = code & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>((uint32_t(code & 0x8000u) << 16) | kFloatInfinity | ((magnitude & 0x3ffu) << 13));
  return with_sign(SmallFloat<5, 10>::value(magnitude), code >> 15);
}

constexpr uint16_t float_to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
  if (magnitude > kFloatInfinity) return uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude == kFloatInfinity) return uint16_t(sign | 0x7c00u);
  const uint32_t code = SmallFloat<5, 10>::round_magnitude(magnitude);
  return uint16_t(sign | (code > 0x7c00u ? 0x7c00u : code));
}

// OCP FP8 E4M3 (float8_e4m3fn): no infinities, 0x7f and 0xff are NaN, largest value 448.
constexpr float fp8_e4m3_to_float(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return with_sign(std::numeric_limits<float>::quiet_NaN(), code >> 7);
  return with_sign(SmallFloat<4, 3>::value(magnitude), code >> 7);
}

// Saturates: everything above 448, infinity included, becomes 448.
constexpr uint8_t float_to_fp8_e4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 24) & 0x80u;
  if (magnitude > kFloatInfinity) return uint8_t(sign | 0x7fu);
  const uint32_t code = SmallFloat<4, 3>::round_magnitude(magnitude);
  return uint8_t(sign | (code > 0x7eu ? 0x7eu : code));
}

// OCP FP8 E5M2: infinities and NaN as in IEEE, largest value 57344.
constexpr float fp8_e5m2_to_float(uint8_t code) { return f16_to_float(uint16_t(code << 8)); }

// Saturates finite values to 57344; infinity stays infinity.
constexpr uint8_t float_to_fp8_e5m2(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu, sign = (bits >> 24) & 0x80u;
  if (magnitude > kFloatInfinity) return uint8_t(sign | 0x7eu | ((magnitude >> 21) & 0x3u));
  if (magnitude == kFloatInfinity) return uint8_t(sign | 0x7cu);
  const uint32_t code = SmallFloat<5, 2>::round_magnitude(magnitude);
  return uint8_t(sign | (code > 0x7bu ? 0x7bu : code));
}

// The float that, rounded on to a narrower type, gives what rounding the double directly would give (round to odd).
constexpr float narrow_to_odd(double x) {
  const float nearest = float(x);
  if (double(nearest) == x || x != x) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const bool away_from_zero = x < 0 ? double(nearest) < x : double(nearest) > x;
  if (away_from_zero) --bits;
  return std::bit_cast<float>(bits | 1u);
}

}  // namespace imbrex

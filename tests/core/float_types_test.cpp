// The narrow float types against their definition: every code, and rounding against a search for the nearest value.
#include "core/float_types.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "expect_error.h"

namespace imbrex {
namespace {

struct Format {
  const char* name;
  DType dtype;
  int exponent_bits, mantissa_bits;
  bool has_infinity, saturates;
  double largest, smallest;
  std::function<float(uint32_t)> decode;
  std::function<uint32_t(float)> encode;

  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  uint32_t sign() const { return 1u << (bits() - 1); }
};

const std::vector<Format>& formats() {
  static const std::vector<Format> all = {
      {"bf16", DType::bf16, 8, 7, true, false, 0x1.fep127, 0x1p-133, [](uint32_t c) { return bf16_to_float(uint16_t(c)); }, float_to_bf16},
      {"f16", DType::f16, 5, 10, true, false, 65504, 0x1p-24, [](uint32_t c) { return f16_to_float(uint16_t(c)); }, float_to_f16},
      {"e4m3", DType::fp8_e4m3, 4, 3, false, true, 448, 0x1p-9, [](uint32_t c) { return fp8_e4m3_to_float(uint8_t(c)); },
       float_to_fp8_e4m3},
      {"e5m2", DType::fp8_e5m2, 5, 2, true, true, 57344, 0x1p-16, [](uint32_t c) { return fp8_e5m2_to_float(uint8_t(c)); },
       float_to_fp8_e5m2},
  };
  return all;
}

// What the code of a magnitude stands for by definition, in double precision.
double defined_value(const Format& f, uint32_t magnitude) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1, top = (1 << f.exponent_bits) - 1;
  const int exponent = int(magnitude >> f.mantissa_bits), mantissa = int(magnitude & ((1u << f.mantissa_bits) - 1));
  if (f.has_infinity && exponent == top) return mantissa == 0 ? INFINITY : NAN;
  if (!f.has_infinity && magnitude == f.sign() - 1) return NAN;
  if (exponent == 0) return std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return std::ldexp(mantissa + (1 << f.mantissa_bits), exponent - bias - f.mantissa_bits);
}

TEST(FloatTypes, EveryCodeDecodesToItsDefinitionAndComesBack) {
  for (const Format& f : formats()) {
    for (uint32_t code = 0; code < 2 * f.sign(); ++code) {
      const double expected = defined_value(f, code & (f.sign() - 1));
      const float value = f.decode(code);
      ASSERT_EQ(std::signbit(value), (code & f.sign()) != 0) << f.name << " " << code;
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(value)) << f.name << " " << code;
        ASSERT_TRUE(std::isnan(f.decode(f.encode(value)))) << f.name << " " << code;
        continue;
      }
      ASSERT_EQ(std::fabs(double(value)), expected) << f.name << " " << code;
      ASSERT_EQ(f.encode(value), code) << f.name;
    }
  }
}

TEST(FloatTypes, ExtremesAreThoseOfTheStandards) {
  for (const Format& f : formats()) {
    EXPECT_EQ(double(f.decode(1)), f.smallest) << f.name;
    double largest = 0;
    for (uint32_t code = 0; code < f.sign(); ++code)
      if (std::isfinite(f.decode(code))) largest = std::max(largest, double(f.decode(code)));
    EXPECT_EQ(largest, f.largest) << f.name;
  }
  EXPECT_TRUE(std::isnan(fp8_e4m3_to_float(0x7f)));
  EXPECT_TRUE(std::isnan(fp8_e4m3_to_float(0xff)));
  EXPECT_EQ(fp8_e5m2_to_float(0x7c), INFINITY);
}

// Nearest code by search among all values, the even code in a tie.
uint32_t nearest_code(const Format& f, const std::vector<double>& values, double x) {
  const uint32_t sign = std::signbit(x) ? f.sign() : 0;
  x = std::fabs(x);
  const uint32_t last = uint32_t(values.size()) - 1;
  if (std::isinf(x) && f.has_infinity) return sign | (last + 1);
  if (x >= values[last]) {
    if (f.saturates) return sign | last;
    const double next = values[last] + (values[last] - values[last - 1]);  // where the next value would be
    return sign | (x - values[last] < next - x ? last : last + 1);         // in the tie infinity has the even code
  }
  const uint32_t above = uint32_t(std::upper_bound(values.begin(), values.end(), x) - values.begin()), below = above - 1;
  const double down = x - values[below], up = values[above] - x;
  if (down == up) return sign | (below % 2 == 0 ? below : above);
  return sign | (down < up ? below : above);
}

std::vector<double> finite_values(const Format& f) {
  std::vector<double> values;
  for (uint32_t code = 0; code < f.sign() && std::isfinite(defined_value(f, code)); ++code) values.push_back(defined_value(f, code));
  return values;
}

TEST(FloatTypes, RoundsToTheNearestEvenAroundEveryMidpoint) {
  for (const Format& f : formats()) {
    const std::vector<double> values = finite_values(f);
    for (size_t i = 0; i + 1 < values.size(); ++i) {
      const float middle = float((values[i] + values[i + 1]) / 2);
      for (float x : {middle, std::nextafter(middle, 0.f), std::nextafter(middle, INFINITY)})
        for (float y : {x, -x}) ASSERT_EQ(f.encode(y), nearest_code(f, values, y)) << f.name << " " << y;
    }
  }
}

TEST(FloatTypes, RoundsToTheNearestOverAllOfFloat) {
  for (const Format& f : formats()) {
    const std::vector<double> values = finite_values(f);
    for (uint64_t bits = 0; bits < (uint64_t(1) << 32); bits += 9973) {
      const float x = std::bit_cast<float>(uint32_t(bits));
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(f.decode(f.encode(x)))) << f.name << " " << bits;
      } else {
        ASSERT_EQ(f.encode(x), nearest_code(f, values, x)) << f.name << " " << x;
      }
    }
  }
}

TEST(FloatTypes, OverflowSaturatesInFp8AndIsInfiniteOtherwise) {
  EXPECT_EQ(float_to_fp8_e4m3(1e30f), 0x7e);
  EXPECT_EQ(float_to_fp8_e4m3(-INFINITY), 0xfe);
  EXPECT_EQ(float_to_fp8_e4m3(464.f), 0x7e);
  EXPECT_EQ(float_to_fp8_e5m2(1e30f), 0x7b);
  EXPECT_EQ(float_to_fp8_e5m2(-INFINITY), 0xfc);
  EXPECT_EQ(float_to_f16(65520.f), 0x7c00);
  EXPECT_EQ(float_to_f16(std::nextafter(65520.f, 0.f)), 0x7bff);
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(FloatTypes, NanWithOnlyLowBitsStaysNan) {
  const float nan = std::bit_cast<float>(0x7f800001u);
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(nan))));
  EXPECT_TRUE(std::isnan(f16_to_float(float_to_f16(nan))));
  EXPECT_TRUE(std::isnan(fp8_e5m2_to_float(float_to_fp8_e5m2(nan))));
}

TEST(FloatTypes, StoringADoubleRoundsOnce) {
  std::mt19937_64 random(1);
  for (const Format& f : formats()) {
    const std::vector<double> values = finite_values(f);
    uint64_t stored = 0;
    for (int n = 0; n < 20000; ++n) {
      // A hair beside a midpoint: rounding to float first would land on the midpoint itself.
      const size_t i = random() % (values.size() - 1);
      const double middle = (values[i] + values[i + 1]) / 2;
      for (double x : {std::nextafter(middle, 0), std::nextafter(middle, INFINITY), -std::nextafter(middle, INFINITY), middle}) {
        stored = 0;
        store_from_double(&stored, f.dtype, 0, x);
        ASSERT_EQ(stored, nearest_code(f, values, x)) << f.name << " " << x;
      }
    }
  }
}

TEST(FloatTypes, ElementsAreReadAndWrittenByType) {
  unsigned char memory[65] = {};
  for (DType t : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2}) {
    void* unaligned = memory + 1;
    store_from_float(unaligned, t, 3, -1.5f);
    EXPECT_EQ(load_as_float(unaligned, t, 3), -1.5f) << to_string(t);
    EXPECT_EQ(load_as_float(unaligned, t, 2), 0.f) << to_string(t);
    store_from_float(unaligned, t, 3, 0.f);
  }
  const int64_t wide[] = {0, (int64_t(1) << 40) + 1};
  EXPECT_EQ(load_as_double(wide, DType::i64, 1), 1099511627777.0);
  const int32_t narrow[] = {-7};
  EXPECT_EQ(load_as_float(narrow, DType::i32, 0), -7.f);
  EXPECT_EQ(load_as_float("\xff", DType::u8, 0), 255.f);
  for (DType t : {DType::u8, DType::i32, DType::i64})
    EXPECT_EQ(test::error_code([&] { store_from_float(memory, t, 0, 1.f); }), "dtype.not_float") << to_string(t);
}

}  // namespace
}  // namespace imbrex

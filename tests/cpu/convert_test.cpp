// The conversions of the CPU kernels against their definition in core/float_types.h: every code, and floats around every boundary.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "core/float_types.h"
#include "cpu/params.h"
// A kernel file includes params.h before this.
#include "cpu/kernels/convert.inl"

namespace imbrex::cpu {
namespace {

uint32_t bits(float f) { return std::bit_cast<uint32_t>(f); }

struct Format {
  const char* name;
  int type;
  DType dtype;
  int mantissa_bits;
  uint32_t num_codes;
};
constexpr Format kFormats[] = {{"f16", kF16, DType::f16, 10, 65536},
                               {"bf16", kBf16, DType::bf16, 7, 65536},
                               {"e4m3", kE4m3, DType::fp8_e4m3, 3, 256},
                               {"e5m2", kE5m2, DType::fp8_e5m2, 2, 256}};

// A code as the bytes of an element, and back.
uint32_t code_at(const char* p, const Format& f) {
  uint16_t code = 0;
  std::memcpy(&code, p, size_t(size_of(f.dtype)));
  return code;
}
std::vector<char> all_codes(const Format& f) {
  std::vector<char> row(f.num_codes * size_t(size_of(f.dtype)));
  for (uint32_t c = 0; c < f.num_codes; ++c) std::memcpy(&row[c * size_t(size_of(f.dtype))], &c, size_t(size_of(f.dtype)));
  return row;
}

TEST(Convert, TypesMatchTheLibrary) {
  EXPECT_EQ(kF32, int(DType::f32));
  EXPECT_EQ(element_size(kF32), size_of(DType::f32));
  for (const Format& f : kFormats) {
    EXPECT_EQ(f.type, int(f.dtype));
    EXPECT_EQ(element_size(f.type), size_of(f.dtype));
  }
}

TEST(Convert, EveryCodeDecodesAsDefined) {
  for (const Format& f : kFormats) {
    const std::vector<char> row = all_codes(f);
    std::vector<float> values(f.num_codes);
    load_row(row.data(), element_size(f.type), f.type, int(f.num_codes), values.data());
    for (uint32_t c = 0; c < f.num_codes; ++c) {
      const float expected = load_as_float(row.data(), f.dtype, c);
      // A float that went through a double is quiet; the kernels keep a signalling NaN as it is.
      const uint32_t quiet = expected != expected ? 0x400000u : 0u;
      ASSERT_EQ(bits(values[c]) | quiet, bits(expected) | quiet) << f.name << " code " << c;
      ASSERT_EQ(bits(load_element(row.data() + c * size_t(element_size(f.type)), f.type)), bits(values[c])) << f.name << " code " << c;
    }
  }
}

// Floats at which a conversion could go wrong: every code's value, the middle between neighbours, and their neighbours as floats; all
// exponents with mantissas of few bits; NaNs with payloads; random bit patterns.
std::vector<float> probes(const Format& f) {
  std::vector<uint32_t> magnitudes = {0, 1, 0x7fffff, 0x800000, 0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fa00000, 0x7fc00000, 0x7fffffff};
  const std::vector<char> codes = all_codes(f);
  const uint32_t half_step = 1u << (22 - f.mantissa_bits);
  for (uint32_t c = 0; c < f.num_codes / 2; ++c) {
    const uint32_t value = bits(load_as_float(codes.data(), f.dtype, c));
    for (uint32_t at : {value, value + half_step})  // normal codes: the middle to the next
      for (uint32_t delta : {-1u, 0u, 1u}) magnitudes.push_back((at + delta) & 0x7fffffff);
    if (c + 1 < f.num_codes / 2) {  // subnormal ones too
      const double middle = (load_as_double(codes.data(), f.dtype, c) + load_as_double(codes.data(), f.dtype, c + 1)) / 2;
      for (uint32_t delta : {-1u, 0u, 1u}) magnitudes.push_back((bits(float(middle)) + delta) & 0x7fffffff);
    }
  }
  for (uint32_t exponent = 0; exponent < 256; ++exponent)
    for (int bit = 0; bit < 23; ++bit)
      for (uint32_t mantissa : {1u << bit, 0x7fffffu >> bit, 0x7fffffu << bit & 0x7fffffu}) magnitudes.push_back(exponent << 23 | mantissa);
  std::mt19937 random(5);
  for (int i = 0; i < 100000; ++i) magnitudes.push_back(uint32_t(random()) & 0x7fffffff);
  std::vector<float> values;
  for (uint32_t m : magnitudes)
    for (uint32_t sign : {0u, 0x80000000u}) values.push_back(std::bit_cast<float>(m | sign));
  return values;
}

TEST(Convert, FloatsEncodeAsDefined) {
  for (const Format& f : kFormats) {
    const std::vector<float> in = probes(f);
    const size_t size = size_t(element_size(f.type));
    std::vector<char> row(in.size() * size), expected(in.size() * size), one(size);
    store_row(row.data(), long(size), f.type, int(in.size()), in.data());
    for (size_t i = 0; i < in.size(); ++i) {
      store_from_float(expected.data(), f.dtype, int64_t(i), in[i]);
      ASSERT_EQ(code_at(&row[i * size], f), code_at(&expected[i * size], f)) << f.name << " of float " << std::hex << bits(in[i]);
      store_element(one.data(), f.type, in[i]);
      ASSERT_EQ(code_at(one.data(), f), code_at(&row[i * size], f)) << f.name << " of float " << std::hex << bits(in[i]);
    }
  }
}

TEST(Convert, CodesSurviveTheWayThroughFloat) {
  for (const Format& f : kFormats) {
    const std::vector<char> row = all_codes(f);
    std::vector<float> values(f.num_codes);
    load_row(row.data(), element_size(f.type), f.type, int(f.num_codes), values.data());
    std::vector<char> back(row.size());
    store_row(back.data(), element_size(f.type), f.type, int(f.num_codes), values.data());
    for (uint32_t c = 0; c < f.num_codes; ++c) {
      const float value = values[c];
      if (value == value) {
        ASSERT_EQ(code_at(&back[c * size_t(element_size(f.type))], f), c) << f.name;
      } else {
        ASSERT_TRUE(std::isnan(load_as_float(back.data(), f.dtype, c))) << f.name << " code " << c;
      }
    }
  }
}

TEST(Convert, RowsWithStridesTouchTheirElementsOnly) {
  constexpr int kElements = 37;
  for (int type : {int(kF32), int(kF16), int(kBf16), int(kE4m3), int(kE5m2)}) {
    const long size = element_size(type);
    for (long stride : {size, 2 * size, 2 * size + 1, 64L}) {
      std::vector<float> in(kElements), out(kElements);
      for (int i = 0; i < kElements; ++i) in[size_t(i)] = float(i % 8) - 3.5f;  // exact in every type
      std::vector<char> memory(size_t(kElements * stride), char(0xa5));
      store_row(memory.data(), stride, type, kElements, in.data());
      load_row(memory.data(), stride, type, kElements, out.data());
      EXPECT_EQ(in, out);
      for (size_t i = 0; i < memory.size(); ++i)
        ASSERT_TRUE(long(i) % stride < size || memory[i] == char(0xa5)) << "stride " << stride << " byte " << i;
    }
  }
}

}  // namespace
}  // namespace imbrex::cpu

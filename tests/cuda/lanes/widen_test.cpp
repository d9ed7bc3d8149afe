// The many conversions at once against the definitions, for every code.
#include "cuda/lanes/widen.h"

#include <gtest/gtest.h>

#include <bit>

#include "core/small_floats.h"

namespace imbrex::test {
namespace {

template <class Format>
void expect_every_code(float (*to_float)(typename Format::Code)) {
  constexpr int kCodes = 1 << (8 * sizeof(typename Format::Code)), kAtOnce = 16;
  for (int first = 0; first < kCodes; first += kAtOnce) {
    typename Format::Code codes[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) codes[i] = typename Format::Code(first + i);
    lanes::Floats<kAtOnce> wide;
    lanes::widen<Format, kAtOnce>(codes, wide);
    for (int i = 0; i < kAtOnce; ++i) {
      const float got = wide[i], expected = to_float(codes[i]);
      EXPECT_TRUE(std::bit_cast<uint32_t>(got) == std::bit_cast<uint32_t>(expected) || (got != got && expected != expected))
          << int(codes[i]) << ": " << got << ", not " << expected;
    }
  }
}

TEST(LanesWiden, IsTheDefinitionForEveryCode) {
  expect_every_code<lanes::Bf16>(bf16_to_float);
  expect_every_code<lanes::F16>(f16_to_float);
  expect_every_code<lanes::E4m3>(fp8_e4m3_to_float);
}

TEST(LanesWiden, SumsAllTerms) {
  lanes::Floats<16> terms;
  for (int i = 0; i < 16; ++i) terms[i] = float(1 << i);
  EXPECT_EQ(lanes::sum_of<16>(terms), 65535.f);
  const lanes::Doubles<16> doubles = __builtin_convertvector(terms, lanes::Doubles<16>) * 0x1p-30 + 1;
  EXPECT_EQ((lanes::sum_of<16, double>(doubles)), 16 + 0x1p-14 - 0x1p-30);
}

}  // namespace
}  // namespace imbrex::test

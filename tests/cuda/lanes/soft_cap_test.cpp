// The bend of a soft cap against tanh in double precision, over all floats that differ much, and what is no number.
#include "soft_cap.cuh"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace imbrex::test {
namespace {

template <bool many_products>
double largest_error() {
  double largest = 0;
  for (uint32_t bits = 0; bits < 0x7f800000u; bits += 4099) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float x = std::bit_cast<float>(bits | sign);
      const double error = std::fabs(cuda::tanh_of_units<many_products>(x) - std::tanh(double(x) / double(cuda::kTanhUnit)));
      if (!(error <= largest)) largest = error;  // NaN too
    }
  }
  return largest;
}

template <bool many_products>
void expect_edges() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto bend = [](float x) { return cuda::tanh_of_units<many_products>(x); };
  EXPECT_NEAR(bend(0.f), 0, 1e-9);
  EXPECT_NEAR(bend(-1e-45f), 0, 1e-9);
  for (const float large : {200.f, 1e30f, kInfinity}) {
    EXPECT_NEAR(bend(large), 1, 6e-7) << large;
    EXPECT_NEAR(bend(-large), -1, 6e-7) << large;
  }
  EXPECT_TRUE(std::isnan(bend(std::numeric_limits<float>::quiet_NaN())));
}

TEST(SoftCap, BendsLikeTanh) {
  EXPECT_LT(largest_error<false>(), 1e-6);
  EXPECT_LT(largest_error<true>(), 3e-7);
  expect_edges<false>();
  expect_edges<true>();
}

}  // namespace
}  // namespace imbrex::test

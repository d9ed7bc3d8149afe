// merge_partial_results against double precision, with empty parts, aliasing, every dtype and refusals.
#include "imbrex/merge.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "core/float_types.h"
#include "expect_error.h"

namespace imbrex {
namespace {

using test::error_code;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Partial {
  std::vector<unsigned char> out;
  std::vector<float> lse;
  PartialResult view;

  Partial(DType dtype, int64_t tokens, int64_t heads, int64_t dim)
      : out(size_t(tokens * heads * dim * size_of(dtype))), lse(size_t(tokens * heads)) {
    view.out = TensorView::contiguous(out.data(), dtype, {tokens, heads, dim});
    view.lse = TensorView::contiguous(lse.data(), DType::f32, {tokens, heads});
  }
  Partial(const Partial&) = delete;
  void fill(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < view.out.num_elements(); ++i) store_from_float(out.data(), view.out.dtype, i, normal(random));
    for (float& x : lse) x = 3 * normal(random);
  }
  float at(int64_t i) const { return load_as_float(out.data(), view.out.dtype, i); }
};

struct Expected {
  double out, lse;
};

// The merged element by the definition, in double precision.
Expected expected_at(const std::vector<const Partial*>& parts, int64_t row, int64_t dim, int64_t d) {
  double sum = 0, weighted = 0;
  for (const Partial* part : parts) {
    const double weight = std::exp(double(part->lse[size_t(row)]));
    sum += weight;
    if (weight > 0) weighted += weight * part->at(row * dim + d);
  }
  return {sum > 0 ? weighted / sum : 0, std::log(sum)};
}

TEST(Merge, MatchesTheDefinitionInEveryDtype) {
  constexpr int64_t kTokens = 5, kHeads = 3, kDim = 136;
  for (DType in : {DType::f32, DType::bf16, DType::f16})
    for (DType to : {DType::f32, DType::bf16, DType::f16}) {
      Partial a(in, kTokens, kHeads, kDim), b(in, kTokens, kHeads, kDim), c(DType::f32, kTokens, kHeads, kDim),
          out(to, kTokens, kHeads, kDim);
      a.fill(1), b.fill(2), c.fill(3);
      a.lse[0] = b.lse[4] = c.lse[4] = -kInfinity;
      const std::vector<PartialResult> parts = {a.view, b.view, c.view};
      merge_partial_results(parts, out.view.out, out.view.lse);
      const double tolerance = to == DType::f32 ? 2e-6 : to == DType::f16 ? 1e-3 : 8e-3;
      for (int64_t row = 0; row < kTokens * kHeads; ++row)
        for (int64_t d = 0; d < kDim; ++d) {
          const Expected expected = expected_at({&a, &b, &c}, row, kDim, d);
          ASSERT_NEAR(out.at(row * kDim + d), expected.out, tolerance * (1 + std::fabs(expected.out))) << to_string(in) << " " << row;
          ASSERT_NEAR(out.lse[size_t(row)], expected.lse, 2e-6 * (1 + std::fabs(expected.lse)));
        }
    }
}

TEST(Merge, EmptyPartsAreNeverRead) {
  Partial a(DType::f32, 2, 1, 8), b(DType::f32, 2, 1, 8), out(DType::f32, 2, 1, 8);
  a.fill(1), b.fill(2), out.fill(3);
  for (int64_t i = 0; i < 16; ++i) store_from_float(b.out.data(), DType::f32, i, NAN);
  a.lse = {0.5f, -kInfinity};
  b.lse = {-kInfinity, -kInfinity};
  const std::vector<PartialResult> parts = {a.view, b.view};
  merge_partial_results(parts, out.view.out, out.view.lse);
  EXPECT_EQ(out.lse[0], 0.5f);
  EXPECT_EQ(out.lse[1], -kInfinity);
  for (int64_t d = 0; d < 8; ++d) {
    EXPECT_EQ(out.at(d), a.at(d));  // one part alone comes out unchanged
    EXPECT_EQ(out.at(8 + d), 0.f);
    EXPECT_FALSE(std::signbit(out.at(8 + d)));
  }
}

// As FlashMLA and FlashAttention 2 write it for a row that sees no key.
TEST(Merge, PartsWithALogSumExpOfInfinityAreEmpty) {
  Partial a(DType::f32, 3, 1, 8), b(DType::f32, 3, 1, 8), out(DType::f32, 3, 1, 8);
  a.fill(1), b.fill(2), out.fill(3);
  for (int64_t i = 0; i < 24; ++i) store_from_float(b.out.data(), DType::f32, i, NAN);
  for (int64_t i = 8; i < 24; ++i) store_from_float(a.out.data(), DType::f32, i, NAN);
  a.lse = {0.5f, kInfinity, -kInfinity};
  b.lse = {kInfinity, kInfinity, kInfinity};
  const std::vector<PartialResult> parts = {a.view, b.view};
  merge_partial_results(parts, out.view.out, out.view.lse);
  EXPECT_EQ(out.lse, (std::vector<float>{0.5f, -kInfinity, -kInfinity}));
  for (int64_t d = 0; d < 24; ++d) EXPECT_EQ(out.at(d), d < 8 ? a.at(d) : 0.f);
}

TEST(Merge, NanIsNotHidden) {
  Partial a(DType::f32, 2, 1, 8), b(DType::f32, 2, 1, 8), out(DType::f32, 2, 1, 8);
  a.fill(1), b.fill(2);
  b.lse[0] = NAN;
  store_from_float(a.out.data(), DType::f32, 8, NAN);
  const std::vector<PartialResult> parts = {a.view, b.view};
  merge_partial_results(parts, out.view.out, out.view.lse);
  EXPECT_TRUE(std::isnan(out.lse[0]));
  EXPECT_TRUE(std::isnan(out.at(3)));
  EXPECT_TRUE(std::isnan(out.at(8)));
  EXPECT_FALSE(std::isnan(out.at(9)));
}

TEST(Merge, ExtremeLogSumExpsDoNotOverflow) {
  Partial a(DType::f32, 1, 2, 8), b(DType::f32, 1, 2, 8), out(DType::f32, 1, 2, 8);
  a.fill(1), b.fill(2);
  a.lse = {1e30f, -3e38f};
  b.lse = {-1e30f, -3e38f};
  const std::vector<PartialResult> parts = {a.view, b.view};
  merge_partial_results(parts, out.view.out, out.view.lse);
  EXPECT_EQ(out.lse[0], 1e30f);
  EXPECT_EQ(out.at(0), a.at(0));
  EXPECT_FLOAT_EQ(out.at(8), (a.at(8) + b.at(8)) / 2);
}

TEST(Merge, TheOutputMayBeOneOfTheParts) {
  for (int target : {0, 1, 2}) {
    Partial a(DType::bf16, 4, 2, 200), b(DType::bf16, 4, 2, 200), c(DType::bf16, 4, 2, 200), out(DType::bf16, 4, 2, 200);
    a.fill(1), b.fill(2), c.fill(3);
    const std::vector<PartialResult> parts = {a.view, b.view, c.view};
    merge_partial_results(parts, out.view.out, out.view.lse);
    const Partial& in_place = target == 0 ? a : target == 1 ? b : c;
    merge_partial_results(parts, in_place.view.out, in_place.view.lse);
    EXPECT_EQ(in_place.out, out.out) << target;
    EXPECT_EQ(in_place.lse, out.lse) << target;
  }
}

TEST(Merge, BitsDoNotDependOnThreadsOrStrides) {
  constexpr int64_t kTokens = 37, kHeads = 3, kDim = 64, kParts = 70;  // more parts than fit on the stack
  std::vector<std::unique_ptr<Partial>> parts;
  std::vector<PartialResult> views;
  for (int i = 0; i < kParts; ++i) {
    parts.push_back(std::make_unique<Partial>(DType::f16, kTokens, kHeads, kDim));
    parts.back()->fill(uint32_t(i));
    views.push_back(parts.back()->view);
  }
  Partial serial(DType::f32, kTokens, kHeads, kDim), parallel(DType::f32, kTokens, kHeads, kDim);
  merge_partial_results(views, serial.view.out, serial.view.lse);
  ThreadPool pool(4);
  merge_partial_results(views, parallel.view.out, parallel.view.lse, pool.parallel_for());
  EXPECT_EQ(serial.out, parallel.out);
  EXPECT_EQ(serial.lse, parallel.lse);

  // The same result, written to [dim, head, token] memory.
  Partial turned(DType::f32, kDim, kHeads, kTokens), turned_lse(DType::f32, kHeads, kTokens, 1);
  TensorView out = turned.view.out, lse = turned_lse.view.lse;
  std::swap(out.sizes[0], out.sizes[2]), std::swap(out.strides[0], out.strides[2]);
  std::swap(lse.sizes[0], lse.sizes[1]), std::swap(lse.strides[0], lse.strides[1]);
  merge_partial_results(views, out, lse);
  for (int64_t t = 0; t < kTokens; ++t)
    for (int64_t h = 0; h < kHeads; ++h) {
      ASSERT_EQ(turned_lse.lse[size_t(h * kTokens + t)], serial.lse[size_t(t * kHeads + h)]);
      for (int64_t d = 0; d < kDim; ++d) ASSERT_EQ(turned.at((d * kHeads + h) * kTokens + t), serial.at((t * kHeads + h) * kDim + d));
    }
}

TEST(Merge, NoTokensIsFine) {
  Partial a(DType::f32, 0, 2, 8), out(DType::f32, 0, 2, 8);
  const std::vector<PartialResult> parts = {a.view};
  EXPECT_NO_THROW(merge_partial_results(parts, out.view.out, out.view.lse));
}

TEST(Merge, Refusals) {
  using V = PartialResult&;
  struct Bad {
    const char* code;
    void (*spoil)(V);
  };
  const Bad all[] = {
      {"merge.out.dtype", [](V v) { v.out.dtype = DType::fp8_e4m3; }},
      {"merge.out.dtype", [](V v) { v.out.dtype = DType::i32; }},
      {"merge.out.rank", [](V v) { v.out.rank = 2; }},
      {"merge.out.shape", [](V v) { v.out.sizes[0] = 1; }},
      {"merge.out.shape", [](V v) { v.out.sizes[2] = 4; }},
      {"merge.out.missing", [](V v) { v.out.data = nullptr; }},
      {"merge.lse.dtype", [](V v) { v.lse.dtype = DType::f16; }},
      {"merge.lse.rank", [](V v) { v.lse.rank = 1; }},
      {"merge.lse.shape", [](V v) { v.lse.sizes[1] = 1; }},
      {"merge.lse.missing", [](V v) { v.lse.data = nullptr; }},
      {"merge.device",
       [](V v) {
         v.out.device = {DeviceType::cuda, 0};
       }},
      {"merge.device",
       [](V v) {
         v.lse.device = {DeviceType::cuda, 0};
       }},
      {"merge.strides", [](V v) { v.out.strides[0] = 0; }},
      {"merge.strides", [](V v) { v.lse.strides[0] = -2; }},
      {"tensor.alignment", [](V v) { v.out.data = static_cast<char*>(v.out.data) + 1; }},
      {"tensor.alignment", [](V v) { v.lse.data = static_cast<char*>(v.lse.data) + 2; }},
  };
  for (const Bad& bad : all) {
    Partial a(DType::f32, 3, 2, 8), b(DType::f32, 3, 2, 8), out(DType::f32, 3, 2, 8);
    out.fill(1);
    const auto before = out.out;
    bad.spoil(b.view);
    const std::vector<PartialResult> parts = {a.view, b.view};
    EXPECT_EQ(error_code([&] { merge_partial_results(parts, out.view.out, out.view.lse); }), bad.code);
    EXPECT_EQ(before, out.out) << bad.code;
  }
  Partial out(DType::f32, 3, 2, 8);
  EXPECT_EQ(error_code([&] { merge_partial_results({}, out.view.out, out.view.lse); }), "merge.parts.none");
}

}  // namespace
}  // namespace imbrex

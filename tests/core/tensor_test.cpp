// Views: strides, slices, names, refusals.
#include "imbrex/tensor.h"

#include <gtest/gtest.h>

#include "expect_error.h"

namespace imbrex {
namespace {

using test::error_code;

TEST(Tensor, ContiguousStridesAreRowMajor) {
  float data[24];
  const TensorView t = TensorView::contiguous(data, DType::f32, {2, 3, 4});
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.stride(0), 12);
  EXPECT_EQ(t.stride(1), 4);
  EXPECT_EQ(t.stride(2), 1);
  EXPECT_EQ(t.num_elements(), 24);
  EXPECT_EQ(TensorView().num_elements(), 0);
  EXPECT_EQ(TensorView::contiguous(data, DType::f32, {0, 4}).num_elements(), 0);
}

TEST(Tensor, SliceAndSelectMoveThePointerByElements) {
  uint16_t data[24];
  const TensorView t = TensorView::contiguous(data, DType::bf16, {2, 3, 4});
  const TensorView s = t.slice(1, 1, 3);
  EXPECT_EQ(s.data, data + 4);
  EXPECT_EQ(s.size(1), 2);
  EXPECT_EQ(s.stride(0), 12);
  const TensorView x = t.select(1, 2);
  EXPECT_EQ(x.data, data + 8);
  EXPECT_EQ(x.rank, 2);
  EXPECT_EQ(x.size(1), 4);
  EXPECT_EQ(x.stride(0), 12);
  EXPECT_EQ(x.stride(1), 1);
  EXPECT_EQ(t.slice(0, 2, 2).num_elements(), 0);
}

TEST(Tensor, DescribedTensorsWithoutMemoryCanBeSliced) {
  const TensorView t = TensorView::contiguous(nullptr, DType::f16, {4, 8}, {DeviceType::cuda, 1});
  EXPECT_TRUE(t.slice(0, 1, 2).empty());
  EXPECT_TRUE(t.select(0, 3).empty());
}

TEST(Tensor, Prints) {
  char byte;
  EXPECT_EQ(TensorView::contiguous(&byte, DType::bf16, {512, 32, 128}, {DeviceType::cuda, 0}).str(), "bf16[512, 32, 128] on cuda:0");
  EXPECT_EQ(TensorView::contiguous(&byte, DType::u8, {}).str(), "u8[] on cpu");
  EXPECT_EQ(TensorView().str(), "no tensor");
}

TEST(Tensor, EveryTypeHasANameThatParses) {
  for (DType t : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2, DType::u8, DType::i32, DType::i64})
    EXPECT_EQ(parse_dtype(to_string(t)), t);
  EXPECT_EQ(parse_dtype("bfloat16"), DType::bf16);
  EXPECT_EQ(parse_dtype("float8_e4m3fn"), DType::fp8_e4m3);
  EXPECT_EQ(parse_dtype("F8_E5M2"), DType::fp8_e5m2);
  for (const char* bad : {"", "bf17", "fp4", "f32 "}) EXPECT_EQ(error_code([&] { parse_dtype(bad); }), "dtype.unknown") << bad;
}

TEST(Tensor, Refusals) {
  constexpr int64_t kHuge = int64_t(1) << 62;
  const auto make = [](std::initializer_list<int64_t> sizes) { TensorView::contiguous(nullptr, DType::f32, sizes); };
  EXPECT_EQ(error_code([&] { make({1, 1, 1, 1, 1, 1}); }), "tensor.rank");
  EXPECT_EQ(error_code([&] { make({2, -1}); }), "tensor.size.negative");
  EXPECT_EQ(error_code([&] { make({INT64_MIN}); }), "tensor.size.negative");
  EXPECT_EQ(error_code([&] { make({kHuge, 2}); }), "tensor.size.overflow");
  EXPECT_EQ(error_code([&] { make({kHuge}); }), "tensor.size.overflow");        // in bytes
  EXPECT_EQ(error_code([&] { make({kHuge, 0, 4}); }), "tensor.size.overflow");  // in strides
  const TensorView t = TensorView::contiguous(nullptr, DType::f32, {4, 8});
  EXPECT_EQ(error_code([&] { t.slice(2, 0, 1); }), "tensor.dim");
  EXPECT_EQ(error_code([&] { t.slice(-1, 0, 1); }), "tensor.dim");
  EXPECT_EQ(error_code([&] { t.select(5, 0); }), "tensor.dim");
  EXPECT_EQ(error_code([&] { t.slice(0, -1, 1); }), "tensor.slice");
  EXPECT_EQ(error_code([&] { t.slice(0, 3, 2); }), "tensor.slice");
  EXPECT_EQ(error_code([&] { t.slice(1, 0, 9); }), "tensor.slice");
  EXPECT_EQ(error_code([&] { t.select(0, 4); }), "tensor.select");
  EXPECT_EQ(error_code([&] { t.select(0, -1); }), "tensor.select");
  TensorView overflowing = t;
  overflowing.sizes = {kHuge, 4};
  EXPECT_EQ(error_code([&] { overflowing.num_elements(); }), "tensor.size.overflow");
}

}  // namespace
}  // namespace imbrex

// What is asked of a tensor's memory before a kernel multiplies its strides.
#include "core/tensor_layout.h"

#include <gtest/gtest.h>

#include <limits>

#include "expect_error.h"

namespace imbrex {
namespace {

using Sizes = std::initializer_list<int64_t>;

alignas(16) char memory[64];

TensorView view(Sizes sizes, Sizes strides, DType dtype = DType::f32, void* data = memory) {
  TensorView t{.data = data, .dtype = dtype, .rank = int(sizes.size())};
  std::copy(sizes.begin(), sizes.end(), t.sizes.begin());
  std::copy(strides.begin(), strides.end(), t.strides.begin());
  return t;
}
std::string read_code(const TensorView& t) {
  return test::error_code([&] { check_layout(t, "t"); });
}
std::string write_code(const TensorView& t) {
  return test::error_code([&] { check_written_layout(t, "t"); });
}
constexpr const char* kNoError = "nothing thrown";
constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();

TEST(TensorLayout, EndsAt63Bits) {
  constexpr int64_t kElements = int64_t(1) << 61;  // of f32, in 2^63 bytes
  EXPECT_EQ(read_code(view({2}, {kElements - 2})), kNoError);
  EXPECT_EQ(read_code(view({2}, {kElements - 1})), "tensor.strides");
  EXPECT_EQ(read_code(view({2, 2}, {kElements / 2, kElements / 2})), "tensor.strides");
  EXPECT_EQ(read_code(view({2, 2}, {kElements / 2, -kElements / 2})), "tensor.strides");
  for (const int64_t stride : {kMost, kLeast, kMost / 2, -kMost}) {
    EXPECT_EQ(read_code(view({2}, {stride})), "tensor.strides") << stride;
    EXPECT_EQ(read_code(view({3, 4}, {4, stride})), "tensor.strides") << stride;
    EXPECT_EQ(read_code(view({3, 1}, {4, stride})), kNoError) << stride;  // never multiplied
    EXPECT_EQ(read_code(view({0, 2}, {4, stride})), kNoError) << stride;
    EXPECT_EQ(byte_stride(view({3, 1}, {4, stride}), 1), 0);
  }
  EXPECT_EQ(read_code(view({kMost, kMost}, {1, 1})), "tensor.strides");
  EXPECT_EQ(byte_stride(view({3, 1}, {4, 9}), 0), 16);
}

TEST(TensorLayout, IsAligned) {
  for (const DType type : {DType::u8, DType::f16, DType::f32, DType::i64})
    for (int64_t at = 0; at < 8; ++at)
      EXPECT_EQ(read_code(view({2}, {1}, type, memory + at)), at % size_of(type) == 0 ? kNoError : "tensor.alignment") << at;
  EXPECT_EQ(read_code(view({0}, {1}, DType::i64, memory + 1)), kNoError);
  EXPECT_EQ(read_code(TensorView{}), kNoError);
}

TEST(TensorLayout, OfWhatIsWrittenDoesNotOverlap) {
  EXPECT_EQ(write_code(view({3, 4, 8}, {32, 8, 1})), kNoError);
  EXPECT_EQ(write_code(view({3, 4, 8}, {8, 24, 1})), kNoError);     // heads outermost
  EXPECT_EQ(write_code(view({3, 4, 8}, {-100, 24, 1})), kNoError);  // rows in reverse, with gaps
  EXPECT_EQ(write_code(view({3, 1, 8}, {8, 0, 1})), kNoError);      // one element has any stride
  EXPECT_EQ(write_code(view({3, 4, 8}, {0, 8, 1})), "tensor.overlap");
  EXPECT_EQ(write_code(view({3, 4, 8}, {31, 8, 1})), "tensor.overlap");
  EXPECT_EQ(write_code(view({3, 4, 8}, {32, 7, 1})), "tensor.overlap");
  EXPECT_EQ(write_code(view({2, 2}, {1, -1})), "tensor.overlap");
  EXPECT_EQ(read_code(view({3, 4, 8}, {0, 0, 1})), kNoError);  // fine to read
}

// Parts of one array have its strides. Where strides differ, what lies between counts.
TEST(TensorLayout, MeetWhereTheyHaveMemoryInCommon) {
  const auto at = [](int64_t first, Sizes sizes, Sizes strides) {
    static float all[160];
    return view(sizes, strides, DType::f32, all + first);
  };
  const TensorView left = at(0, {5, 8}, {24, 1}), middle = at(8, {5, 8}, {24, 1}), right = at(16, {5, 8}, {24, 1});
  EXPECT_TRUE(may_meet(left, left));
  EXPECT_FALSE(may_meet(left, middle) || may_meet(middle, left) || may_meet(left, right) || may_meet(right, middle));
  EXPECT_TRUE(may_meet(left, at(7, {5, 8}, {24, 1})));
  EXPECT_TRUE(may_meet(at(7 + 48, {2, 8}, {24, 1}), left));  // a later row's last element
  EXPECT_FALSE(may_meet(left, at(104, {5, 8}, {24, 1})));    // behind all
  EXPECT_FALSE(may_meet(left, at(8 + 24, {1, 8}, {8, 1})));  // one row, whose stride may be any number
  EXPECT_TRUE(may_meet(left, at(1 + 24, {1, 8}, {8, 1})));
  EXPECT_TRUE(may_meet(left, at(8, {2, 8}, {25, 1})));                      // may be: the strides differ
  EXPECT_FALSE(may_meet(left, at(8, {0, 8}, {24, 1})));                     // nothing there
  EXPECT_TRUE(may_meet(at(96, {5, 8}, {-24, 1}), at(7, {5, 8}, {24, 1})));  // rows in reverse
  TensorView elsewhere = left;
  elsewhere.device = {DeviceType::cuda, 0};
  EXPECT_FALSE(may_meet(left, elsewhere));
}

}  // namespace
}  // namespace imbrex

// The text of merge_results.cu, run lane by lane on the host, beside merge_partial_results(): types, strides, empty parts, a result that
// lies where a part does.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/float_types.h"
#include "cuda/lanes/library.h"
#include "cuda/params.h"
#include "imbrex/merge.h"

namespace imbrex::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of a dim of any type, with something between them that nobody may write.
struct Result {
  std::vector<char> bytes;
  std::vector<float> logs;
  PartialResult view;

  Result(DType type, int64_t tokens, int64_t heads, int64_t dim, int64_t gap, std::mt19937& random)
      : bytes(size_t(tokens * heads * (dim + gap) * size_of(type)), 77), logs(size_t(tokens * heads)) {
    view.out = TensorView::contiguous(bytes.data(), type, {tokens, heads, dim + gap});
    view.out.sizes[2] = dim;
    view.lse = TensorView::contiguous(logs.data(), DType::f32, {tokens, heads});
    std::normal_distribution<float> normal;
    for (int64_t row = 0; row < tokens * heads; ++row)
      for (int64_t d = 0; d < dim; ++d) store_from_float(bytes.data(), type, row * (dim + gap) + d, normal(random));
    for (float& x : logs) x = 3 * normal(random);
  }
  Result(const Result& from) : bytes(from.bytes), logs(from.logs), view(from.view) {
    view.out.data = bytes.data(), view.lse.data = logs.data();
  }
};

cuda::MergePart part_of(const PartialResult& r) {
  const int64_t size = size_of(r.out.dtype);
  return {r.out.as<char>(),       r.lse.as<float>(), r.out.stride(0) * size, r.out.stride(1) * size,
          r.out.stride(2) * size, r.lse.stride(0),   r.lse.stride(1),        int(r.out.dtype)};
}

void expect_same(const Result& got, const Result& wanted, DType type) {
  const double tolerance = type == DType::f32 ? 4e-6 : type == DType::f16 ? 2e-3 : 1.6e-2;  // of rounding once more the other way
  const int64_t dim = got.view.out.size(2), row_length = got.view.out.stride(1);
  for (size_t row = 0; row < got.logs.size(); ++row) {
    if (std::isfinite(wanted.logs[row])) {
      ASSERT_NEAR(got.logs[row], wanted.logs[row], 4e-6 * (1 + std::fabs(wanted.logs[row])));
    } else {
      ASSERT_EQ(std::isnan(got.logs[row]), std::isnan(wanted.logs[row])) << row;
    }
    for (int64_t d = 0; d < row_length; ++d) {
      const int64_t at = int64_t(row) * row_length + d;
      const float x = load_as_float(got.bytes.data(), type, at), y = load_as_float(wanted.bytes.data(), type, at);
      if (std::isnan(y))
        ASSERT_TRUE(std::isnan(x)) << row << " " << d;
      else if (d >= dim)
        ASSERT_EQ(x, y) << row << " " << d;
      else
        ASSERT_NEAR(x, y, tolerance * (1 + std::fabs(y))) << row << " " << d;
    }
  }
}

TEST(LanesMergeResults, IsWhatTheHostMakesOfThem) {
  const Library eights = open_library("merge_results_8_decode"), elements = open_library("merge_results_1_decode");
  std::mt19937 random(5);
  const DType types[] = {DType::f32, DType::bf16, DType::f16};
  for (unsigned turn = 0; turn < 60 && !testing::Test::HasFatalFailure(); ++turn) {
    SCOPED_TRACE(turn);
    const bool wide = turn % 2 == 0;
    const int64_t tokens = 1 + turn % 7, heads = 1 + turn % 5, dim = wide ? 8 * (1 + turn % 20) : 1 + turn % 50, gap = wide ? 8 : 3;
    const int count = turn == 0 ? cuda::kMostMergeParts : 1 + int(random() % 5);
    const DType to = types[random() % 3];
    std::vector<Result> parts;
    for (int i = 0; i < count; ++i) parts.emplace_back(i == 1 ? to : types[random() % 3], tokens, heads, dim, gap, random);
    for (Result& part : parts)
      for (size_t row = 0; row < part.logs.size(); ++row) {
        if (random() % 4 != 0) continue;
        part.logs[row] = random() % 2 == 0 ? kInfinity : -kInfinity;
        for (int64_t d = 0; d < dim; ++d)  // which nobody may read
          store_from_float(part.bytes.data(), part.view.out.dtype, int64_t(row) * (dim + gap) + d, NAN);
      }
    if (turn % 9 == 0) parts[0].logs[0] = NAN;
    const bool in_place = count > 1 && turn % 3 == 0;
    Result result(to, tokens, heads, dim, gap, random), wanted = in_place ? parts[1] : result;
    std::vector<Result> copies = parts;
    std::vector<PartialResult> views;
    for (const Result& part : parts) views.push_back(part.view);
    merge_partial_results(views, wanted.view.out, wanted.view.lse);

    Result& got = in_place ? copies[1] : result;
    cuda::MergeResultsParams params{};
    for (int i = 0; i < count; ++i) params.parts[i] = part_of(copies[size_t(i)].view);
    params.result = part_of(got.view);
    params.num_parts = count, params.num_tokens = int(tokens), params.num_heads = int(heads), params.dim = int(dim);
    const int blocks = int((tokens * heads + cuda::kMergeResultRows - 1) / cuda::kMergeResultRows);
    (wide ? eights : elements).run(&params, nullptr, {.blocks = blocks, .chance = turn + 1});
    expect_same(got, wanted, to);
  }
}

}  // namespace
}  // namespace imbrex::test

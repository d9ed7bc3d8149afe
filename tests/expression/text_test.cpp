// Generated texts: what they look like, and that the host's compiler makes of them what imbrex computes. This file has a copy of
// operations.h of its own (`operations` is defined as another name for it), so that the texts run as they are compiled here.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "expression/operations.h"
#include "expression/texts/expressions.h"
#include "imbrex/error.h"

namespace {

int bits_of(float x) { return std::bit_cast<int>(x); }
int bits_of(int x) { return x; }
int bits_of(bool x) { return x ? 1 : 0; }

#include "generated_texts.h"

}  // namespace

namespace imbrex::test {
namespace {

TEST(CudaText, IsALineForEachOperation) {
  const std::vector<ExpressionTensor> tensors = RandomExpressions::tensors();
  EXPECT_EQ(cuda_text(parse_expression("where(score * 2 < 1 & seen[0, q, kv], score * slope[head], -inf)", tensors), "mod"),
            "inline float mod([[maybe_unused]] const imbrex::ExpressionInputs& in) {\n"
            "  const float v0 = in.score;\n"
            "  const float v1 = imbrex::operations::as_float(0x40000000u);\n"
            "  const float v2 = imbrex::operations::multiply_exact(v0, v1);\n"
            "  const float v3 = imbrex::operations::as_float(0x3f800000u);\n"
            "  const bool v4 = imbrex::operations::less(v2, v3);\n"
            "  const int v5 = 0;\n"
            "  const int v6 = in.q;\n"
            "  const int v7 = in.kv;\n"
            "  const bool v8 = imbrex::operations::element_bool(in.tensors[0], v5, v6, v7);\n"
            "  const bool v9 = imbrex::operations::logical_and(v4, v8);\n"
            "  const int v10 = in.head;\n"
            "  const float v11 = imbrex::operations::element<float>(in.tensors[1], v10);\n"
            "  const float v12 = imbrex::operations::multiply(v0, v11);\n"
            "  const float v13 = imbrex::operations::as_float(0xff800000u);\n"
            "  const float v14 = imbrex::operations::where(v9, v12, v13);\n"
            "  return v14;\n"
            "}\n");
}

TEST(CudaText, NamesAreIdentifiers) {
  const Expression e = parse_expression("q < kv");
  for (const char* name : {"", "a b", "f(){}", "1f", "q", "float", "a;b"}) EXPECT_THROW(cuda_text(e, name), Error) << name;
  EXPECT_THROW(cuda_text(Expression(), "f"), Error);
}

TEST(CudaText, CompiledTextsGiveTheSameBits) {
  const std::vector<Expression> expressions = expressions_of_texts();
  ASSERT_EQ(expressions.size(), std::size(kGenerated));
  ExpressionProblem problem(41);
  for (size_t n = 0; n < expressions.size(); ++n) {
    const BoundExpression bound(expressions[n], problem.tensors);
    std::vector<ExpressionTensorData> tensors;
    for (const ExpressionTensor& tensor : expressions[n].tensors()) {
      ExpressionTensorData data{nullptr, {1, 1, 1}, {0, 0, 0}};
      for (const NamedTensor& given : problem.tensors) {
        if (given.name != tensor.name) continue;
        data.data = given.tensor.data;
        for (int d = 0; d < given.tensor.rank; ++d)
          data.sizes[d] = int(given.tensor.size(d)), data.strides[d] = long(given.tensor.stride(d));
      }
      ASSERT_NE(data.data, nullptr);
      tensors.push_back(data);
    }
    for (int i = 0; i < 200; ++i) {
      const ExpressionVariables at = problem.variables();
      const int bits = kGenerated[n]({at.score, at.batch, at.head, at.q, at.kv, at.q_len, at.kv_len, tensors.data()});
      const ExpressionValue value = bound.evaluate(at);
      const bool both_nan = value.type == ExpressionType::real && std::isnan(value.real()) && std::isnan(std::bit_cast<float>(bits));
      ASSERT_TRUE(bits == value.bits || both_nan) << expressions[n].str() << ": " << bits << " and " << value.bits;
    }
  }
}

}  // namespace
}  // namespace imbrex::test

// Generated texts: what they look like, and that the host's compiler makes of them what imbrex computes. This file has a copy of
// operations.h of its own (`operations` is defined as another name for it), so that the texts run as they are compiled here.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "expression/score_parts.h"
#include "expression/short_operations.h"
#include "expression/texts/expressions.h"
#include "imbrex/error.h"

namespace {

constexpr float kNear = 2e-3f;  // of values up to 1e4, with sums of a few of them

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
            "  const float v0 = imbrex::operations::multiply_exact(in.score, in.scale);\n"
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

// The score is times a scale, and keys are counted from the first of a row.
TEST(CudaText, ApproximateSumsStayFactorsOfARow) {
  const auto text = [](const char* expression) { return cuda_text(parse_expression(expression), "mod", ExpressionFloats::approximate); };
  const std::string alibi = text("float slope[]; score + slope[head] * (kv - q)");
  EXPECT_NE(alibi.find("fused(in.score, in.scale, imbrex::operations::fused(in.key, v2, r1))"), std::string::npos) << alibi;
  EXPECT_NE(alibi.find("float((in.first_kv - (in.q)))"), std::string::npos) << alibi;
  const std::string cap = text("20 * tanh(score / 20)");
  EXPECT_NE(cap.find("tanh_of_units(in.score * r1)"), std::string::npos) << cap;
  // What decides is exact, and what may be any int is no sum.
  EXPECT_NE(text("where(score * 2 < 1, score, 0)").find("multiply_exact(v0"), std::string::npos);
  EXPECT_EQ(text("int t[]; score + (kv - t[q])").find("first_kv"), std::string::npos);
  EXPECT_EQ(text("score + (kv + 2000000000)").find("first_kv"), std::string::npos);
  EXPECT_EQ(text("score + kv * kv").find("first_kv"), std::string::npos);
}

// What a kernel computes once for a key or a row: the heaviest values that depend on nothing else.
TEST(CudaText, PartsOfScoresAreThoseOfKeysAndOfRows) {
  const auto parts = [](const char* text) { return score_parts(parse_expression(text)); };
  EXPECT_TRUE(parts("float slope[]; score + 2 * float(kv) - float(q)").empty());
  const ScoreParts bias = parts("float bias[,]; score + 0.5 * bias[head, kv]");
  EXPECT_EQ(bias.columns.size(), 1u);
  EXPECT_EQ(bias.head_columns, 1);
  EXPECT_TRUE(bias.rows.empty());
  const ScoreParts documents =
      parts("int doc[,]; float s[]; float b[,]; where(doc[batch, q] == doc[batch, kv], score, -inf) + b[head, kv] * s[kv // 8]");
  EXPECT_EQ(documents.columns.size(), 2u);
  EXPECT_EQ(documents.head_columns, 1);
  EXPECT_EQ(documents.rows.size(), 1u);
  // What both a key and a query take part in is neither.
  const char* const relative = "float r[]; score + r[q - kv + 500]";
  EXPECT_TRUE(parts(relative).empty());
  EXPECT_TRUE(loads_for_each_key(parse_expression(relative), {}));
  const char* const of_keys = "float bias[,]; score + bias[batch, kv]";
  EXPECT_TRUE(loads_for_each_key(parse_expression(of_keys), {}));
  EXPECT_FALSE(loads_for_each_key(parse_expression(of_keys), parts(of_keys)));
  // At most as many as a kernel has room for; a row's value that only a key's value takes is no part.
  const ScoreParts many =
      parts("float a[,]; score + a[0, kv] + score * a[1, kv] + tanh(score + a[2, kv]) + abs(score - a[3, kv]) + exp(score * a[4, kv])");
  EXPECT_EQ(int(many.columns.size()), kMostScoreColumns);
  EXPECT_TRUE(parts("float a[]; score + a[batch] * a[kv]").rows.empty());
}

TEST(CudaText, PartsAreGivenAsBits) {
  const Expression e = parse_expression("int doc[,]; bool on[]; where(doc[batch, q] == doc[batch, kv] & on[kv], score, -inf)");
  const std::string text = score_parts_text(e, score_parts(e), "mod");
  for (const char* part : {"inline void mod_columns(", "inline void mod_rows(", "inline float mod_of_parts(", "columns[0] = int(",
                           "columns[1] = int(", "rows[0] = int(", "= (columns[1] != 0);", "= rows[0];"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  EXPECT_EQ(text.substr(text.find("mod_of_parts")).find("element"), std::string::npos) << text;
  EXPECT_EQ(text.find("_here"), std::string::npos) << text;
  // Loads that stay where they are: those of a key's values.
  const std::string stays = score_parts_text(e, score_parts(e), "mod", true);
  const size_t rows = stays.find("inline void mod_rows(");
  for (const char* part : {"::element_here<int>(", "::element_here_bool("}) EXPECT_LT(stays.find(part), rows) << part << " in\n" << stays;
  EXPECT_EQ(stays.find("_here", rows), std::string::npos) << stays;
}

TEST(CudaText, NamesAreIdentifiers) {
  const Expression e = parse_expression("q < kv");
  for (const char* name : {"", "a b", "f(){}", "1f", "q", "float", "a;b"}) EXPECT_THROW(cuda_text(e, name), Error) << name;
  EXPECT_THROW(cuda_text(Expression(), "f"), Error);
}

TEST(CudaText, CompiledTextsGiveTheSameBits) {
  const std::vector<Expression> expressions = expressions_of_texts();
  const size_t num_usual = usual_expressions().size();
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
      const ExpressionInputs in{at.score, at.batch, at.head, at.q, at.kv, at.q_len, at.kv_len, tensors.data()};
      const int bits = kGenerated[n](in);
      const ExpressionValue value = bound.evaluate(at);
      const bool both_nan = value.type == ExpressionType::real && std::isnan(value.real()) && std::isnan(std::bit_cast<float>(bits));
      ASSERT_TRUE(bits == value.bits || both_nan) << expressions[n].str() << ": " << bits << " and " << value.bits;
      if (n >= num_usual) continue;
      ExpressionInputs row = in;  // as a kernel has it
      row.score *= 4.f, row.scale = 0.25f, row.key = float(i % 96), row.first_kv = at.kv - i % 96;
      const int short_bits = kApproximate[n](row);
      if (value.type != ExpressionType::real) {
        ASSERT_EQ(short_bits, value.bits) << expressions[n].str();
        continue;
      }
      const float exact = value.real(), near = std::bit_cast<float>(short_bits);
      if (!std::isfinite(exact) || std::abs(exact) > 1e4f) continue;  // sums of large terms
      ASSERT_NEAR(near, exact, kNear) << expressions[n].str() << ", q " << at.q << ", kv " << at.kv << ", score " << at.score;
    }
  }
}

}  // namespace
}  // namespace imbrex::test

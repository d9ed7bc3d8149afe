// Expressions computed: single values against what the page says, functions against double precision, rows against single values.
#include "imbrex/bound_expression.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "expression/operations.h"
#include "expression/problem.h"
#include "imbrex/error.h"

namespace imbrex::test {
namespace {

std::string value_of(std::string_view text, const ExpressionVariables& at = {}) {
  const ExpressionValue value = BoundExpression(parse_expression(text)).evaluate(at);
  if (value.type == ExpressionType::real) return std::isnan(value.real()) ? "nan" : fmt::format("{}", value.real());
  return value.type == ExpressionType::integer ? fmt::format("{}", value.integer()) : value.boolean() ? "true" : "false";
}

// Constants are folded by the same code: variables keep it from that.
TEST(BoundExpression, OperationsAtTheirEdges) {
  const ExpressionVariables at{.score = -0.5f, .batch = INT_MIN, .head = -1, .q = 7, .kv = -3, .q_len = 0, .kv_len = INT_MAX};
  const std::pair<const char*, const char*> rows[] = {
      {"kv_len + 1", "-2147483648"},
      {"batch - 1", "2147483647"},
      {"kv_len * 2", "-2"},
      {"-batch", "-2147483648"},
      {"abs(batch)", "-2147483648"},
      {"abs(kv)", "3"},
      {"q // kv", "-3"},
      {"q % kv", "-2"},
      {"kv // q", "-1"},
      {"kv % q", "4"},
      {"q // q_len", "0"},
      {"q % q_len", "0"},
      {"batch // head", "-2147483648"},
      {"batch % head", "0"},
      {"kv_len // 1", "2147483647"},
      {"kv_len // batch", "-1"},
      {"q / q_len", "inf"},
      {"q / 2", "3.5"},
      {"int(score * 3)", "-1"},
      {"int(score * 1e20)", "-2147483648"},
      {"int(score / score * 1e20)", "2147483647"},
      {"int(q_len / q_len)", "0"},
      {"float(kv_len) / 2.0 == 1073741824.0", "true"},
      {"float(q < kv) + float(kv < q)", "1"},
      {"floor(score)", "-1"},
      {"floor(score * 1e10)", "-5000000000"},
      {"min(q_len / q_len, score)", "nan"},
      {"min(score, q_len / q_len)", "-0.5"},
      {"max(q_len / q_len, score)", "nan"},
      {"max(score, q_len / q_len)", "-0.5"},
      {"q_len / q_len == q_len / q_len", "false"},
      {"q_len / q_len != q_len / q_len", "true"},
      {"q_len / q_len < 1 | q_len / q_len >= 1", "false"},
      {"where(q < kv, 1, 2)", "2"},
      {"kv < q ^ q < 100", "false"},
      {"log(score)", "nan"},
      {"log(float(q_len))", "-inf"},
      {"exp(float(kv_len))", "inf"},
      {"exp(float(batch))", "0"},
      {"tanh(float(batch))", "-1"},
      {"sigmoid(float(kv_len))", "1"},
      {"12 & 10", "8"},
      {"-1 & kv_len ^ kv_len | 6", "6"},
      {"1 << 31", "-2147483648"},
      {"q_len | 1 << 4 + 1", "32"},
      {"1 << 32", "0"},
      {"1 << -1", "0"},
      {"-9 >> 1", "-5"},
      {"-9 >> 40", "-1"},
      {"9 >> -1", "0"},
      {"sin(4194304.)", "nan"},
      {"cos(-inf)", "nan"},
      {"sin(nan)", "nan"},
      {"erf(inf)", "1"},
      {"erf(-inf)", "-1"},
      {"erf(nan)", "nan"},
  };
  for (const auto& [text, expected] : rows) EXPECT_EQ(value_of(text, at), expected) << text;
}

int64_t ordered(float x) {
  const int64_t bits = std::bit_cast<int32_t>(x);
  return bits < 0 ? -(bits & 0x7fffffff) : bits;
}

// The greatest distance in ulps between a function and its definition, over floats of all sizes.
template <class F, class G>
int64_t most_ulps(F&& f, G&& exact, float low, float high) {
  int64_t most = 0;
  for (int64_t bits = ordered(low); bits <= ordered(high); bits += 9973) {
    const float x = bits < 0 ? -std::bit_cast<float>(int32_t(-bits)) : std::bit_cast<float>(int32_t(bits));
    most = std::max<int64_t>(most, std::abs(ordered(f(x)) - ordered(float(exact(double(x))))));
  }
  return most;
}

TEST(BoundExpression, FunctionsAreWithinTwoUlps) {
  EXPECT_LE(most_ulps([](float x) { return operations::exp(x); }, [](double x) { return std::exp(x); }, -87.f, 88.7f), 1);
  EXPECT_LE(most_ulps([](float x) { return operations::exp(x); }, [](double x) { return std::exp(x); }, -120.f, -87.f), 1);
  EXPECT_LE(most_ulps([](float x) { return operations::log(x); }, [](double x) { return std::log(x); }, 0.f, 3e38f), 2);
  EXPECT_LE(most_ulps([](float x) { return operations::tanh(x); }, [](double x) { return std::tanh(x); }, -20.f, 20.f), 2);
  EXPECT_LE(most_ulps([](float x) { return operations::sigmoid(x); }, [](double x) { return 1 / (1 + std::exp(-x)); }, -86.f, 40.f), 2);
  EXPECT_LE(most_ulps([](float x) { return operations::erf(x); }, [](double x) { return std::erf(x); }, -20.f, 20.f), 3);
  EXPECT_LE(most_ulps([](float x) { return operations::sin(x); }, [](double x) { return std::sin(x); }, -1.57f, 1.57f), 2);
  EXPECT_LE(most_ulps([](float x) { return operations::cos(x); }, [](double x) { return std::cos(x); }, -1.57f, 1.57f), 2);
  // Of large angles a zero is not exact to ulps of its own.
  float farthest = 0;
  for (float x = -4194303.f; x < 4194304.f; x += 77.713f) {
    farthest = std::max(farthest, std::abs(operations::sin(x) - float(std::sin(double(x)))));
    farthest = std::max(farthest, std::abs(operations::cos(x) - float(std::cos(double(x)))));
  }
  EXPECT_LE(farthest, 1.2e-7f);
  EXPECT_EQ(most_ulps([](float x) { return operations::floor(x); }, [](double x) { return std::floor(x); }, -3e38f, 3e38f), 0);
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (float (*f)(float) : {+[](float x) { return operations::exp(x); }, +[](float x) { return operations::log(x); },
                            +[](float x) { return operations::tanh(x); }, +[](float x) { return operations::floor(x); }})
    EXPECT_TRUE(std::isnan(f(nan)));
  EXPECT_EQ(operations::exp(infinity), infinity);
  EXPECT_EQ(operations::exp(-infinity), 0.f);
  EXPECT_EQ(operations::log(infinity), infinity);
  EXPECT_EQ(operations::floor(-infinity), -infinity);
  EXPECT_TRUE(std::signbit(operations::floor(-0.f)) && std::signbit(operations::tanh(-0.f)));
}

TEST(BoundExpression, QuotientsOfAllKindsOfInts) {
  std::mt19937 random(1);
  const auto any = [&] { return int(random() >> (random() % 32)) * (random() % 2 == 0 ? 1 : -1); };
  for (int i = 0; i < 200000; ++i) {
    const int64_t a = i % 5 == 0 ? INT_MIN + int(random() % 3) : any(), b = i % 7 == 0 ? INT_MAX - int(random() % 3) : any();
    if (b == 0) continue;
    const int64_t exact = a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
    ASSERT_EQ(operations::floor_divide(int(a), int(b)), int32_t(exact)) << a << " " << b;
    ASSERT_EQ(operations::modulo(int(a), int(b)), int32_t(a - b * exact)) << a << " " << b;
  }
}

TEST(BoundExpression, RowsHaveTheBitsOfSingleValues) {
  ExpressionProblem problem(7);
  RandomExpressions random(11);
  for (int i = 0; i < 1500; ++i) {
    const ExpressionType type = i % 2 == 0 ? ExpressionType::real : ExpressionType::boolean;
    const Expression e = problem.expression(random, type, 1 + i % 6);
    ExpressionRanges ranges;
    if (i % 3 == 0) ranges = {.batch = {0, 3}, .head = {0, 5}, .q = {0, 23}, .kv = {0, 399}, .q_len = {1, 24}, .kv_len = {24, 24}};
    const BoundExpression bound(e, problem.tensors, ranges);
    ExpressionVariables at = problem.variables();
    const int begin = problem.below(40) - 8, end = begin + problem.below(300);
    std::vector<float> scores(size_t(end - begin) + 1);
    for (float& x : scores) x = problem.variables().score;
    const std::vector<float> before = scores;
    std::vector<uint8_t> shown(scores.size(), 7);
    if (type == ExpressionType::real) {
      bound.score_row(at, begin, end, scores.data());
    } else {
      bound.mask_row(at, begin, end, shown.data(), scores.data());
    }
    for (int k = begin; k < end; ++k) {
      at.kv = k, at.score = before[size_t(k - begin)];
      const ExpressionValue value = bound.evaluate(at);
      const float row = scores[size_t(k - begin)];
      if (type == ExpressionType::real) {
        ASSERT_TRUE(std::bit_cast<int32_t>(row) == value.bits || (std::isnan(row) && std::isnan(value.real()))) << e.str() << " at " << k;
      } else {
        ASSERT_EQ(int(shown[size_t(k - begin)]), value.bits) << e.str() << " at " << k;
      }
    }
    ASSERT_EQ(scores.back(), before.back()) << "behind the row";
    ASSERT_EQ(shown.back(), 7) << "behind the row";
  }
}

TEST(BoundExpression, GroupsOfScoresAreScaledAndLieApart) {
  constexpr int kKeys = 150, kPitch = 40;
  const BoundExpression bound(parse_expression("score * tanh(score) + float(kv - q)"));
  std::vector<float> row(kKeys), groups((kKeys + 15) / 16 * kPitch, -7.f);
  for (int i = 0; i < kKeys; ++i) row[size_t(i)] = 0.25f * float(i % 11 - 5), groups[size_t(i / 16 * kPitch + i % 16)] = row[size_t(i)];
  for (float& x : row) x *= 3.f;
  bound.score_row({.q = 9}, 5, 5 + kKeys, row.data());
  bound.score_groups({.q = 9}, 5, 5 + kKeys, groups.data(), kPitch, 3.f);
  for (int i = 0; i < int(groups.size()); ++i) {
    const int key = i / kPitch * 16 + i % kPitch;
    EXPECT_EQ(groups[size_t(i)], i % kPitch < 16 && key < kKeys ? row[size_t(key)] : -7.f) << i;
  }
}

TEST(BoundExpression, RowsWithoutScoresTakeTheOneOfTheirPlace) {
  const BoundExpression bound(parse_expression("score < float(kv)"));
  uint8_t shown[4];
  bound.mask_row({.score = 1.5f}, 0, 4, shown);
  EXPECT_EQ(std::vector<uint8_t>(shown, shown + 4), (std::vector<uint8_t>{0, 0, 1, 1}));
}

TEST(BoundExpression, ElementsOutsideOfTensorsAreZero) {
  std::vector<int> memory(40, 99);  // sanitizers watch what is around it
  for (int i = 0; i < 6; ++i) memory[size_t(17 + i)] = i + 1;
  const NamedTensor t{"t", TensorView::contiguous(memory.data() + 17, DType::i32, {2, 3})};
  const std::vector<ExpressionTensor> declared = {{"t", ExpressionType::integer, 2}};
  const BoundExpression bound(parse_expression("float(t[q, kv])", declared), {&t, 1}, {.q = {0, 1}, .kv = {0, 2}});
  EXPECT_FALSE(bound.is_checked(2)) << "in rows within the ranges";
  for (int q = -2; q < 4; ++q) {
    float row[9];
    bound.score_row({.q = q}, -3, 6, row);
    for (int kv = -3; kv < 6; ++kv) {
      const float expected = q >= 0 && q < 2 && kv >= 0 && kv < 3 ? float(q * 3 + kv + 1) : 0.f;
      EXPECT_EQ(row[kv + 3], expected) << q << " " << kv;
      EXPECT_EQ(bound.evaluate({.q = q, .kv = kv}).real(), expected);
    }
    float inside[3];
    bound.score_row({.q = q}, 0, 3, inside);
    EXPECT_EQ(inside[2], row[5]);
  }
  const auto is_checked = [&](const char* text, ExpressionRanges ranges) {
    const BoundExpression b(parse_expression(text, declared), {&t, 1}, ranges);
    for (int n = 0; n < int(b.expression().nodes().size()); ++n)
      if (b.is_checked(n)) return true;
    return false;
  };
  EXPECT_TRUE(is_checked("t[q, kv]", {}));
  EXPECT_TRUE(is_checked("t[q, kv]", {.q = {0, 2}, .kv = {0, 2}}));
  EXPECT_TRUE(is_checked("t[q, kv]", {.q = {0, 1}, .kv = {-1, 2}}));
  EXPECT_FALSE(is_checked("t[q % 2, min(max(kv, 0), 2)]", {}));
  memory.assign(40, 1);
  for (const char* text : {"float(t[q, t[0, kv]])", "t[q, t[0, kv]] < 5"})
    EXPECT_TRUE(is_checked(text, {.q = {0, 1}, .kv = {0, 2}})) << "what is within now may be changed later";
}

TEST(BoundExpression, WrongTensorsAreRefused) {
  std::vector<int> memory(8);
  const Expression e = parse_expression("t[q] < 1", std::vector<ExpressionTensor>{{"t", ExpressionType::integer, 1}});
  const auto code = [&](const char* name, TensorView view) {
    const NamedTensor t{name, view};
    try {
      BoundExpression(e, {&t, 1});
      return std::string("none");
    } catch (const Error& error) {
      return error.code();
    }
  };
  TensorView fits = TensorView::contiguous(memory.data(), DType::i32, {8}), gpu = fits;
  gpu.device.type = DeviceType::cuda;
  EXPECT_EQ(code("t", fits), "none");
  EXPECT_EQ(code("u", fits), "expression.tensor");
  EXPECT_EQ(code("t", gpu), "expression.tensor");
  EXPECT_EQ(code("t", TensorView::contiguous(memory.data(), DType::f32, {8})), "expression.tensor");
  EXPECT_EQ(code("t", TensorView::contiguous(memory.data(), DType::i32, {2, 4})), "expression.tensor");
  EXPECT_EQ(code("t", TensorView::contiguous(nullptr, DType::i32, {8})), "expression.tensor");
  EXPECT_EQ(code("t", TensorView::contiguous(nullptr, DType::i32, {0})), "none");
  EXPECT_EQ(code("t", TensorView::contiguous(memory.data(), DType::i32, {int64_t(1) << 31})), "expression.tensor");
  EXPECT_THROW(BoundExpression{Expression()}, Error);
  float score = 0;
  uint8_t shown = 0;
  EXPECT_THROW(BoundExpression(parse_expression("q")).score_row({}, 0, 1, &score), Error);
  EXPECT_THROW(BoundExpression(parse_expression("score")).mask_row({}, 0, 1, &shown), Error);
  EXPECT_THROW(BoundExpression(parse_expression("score")).shown({}), Error);
}

}  // namespace
}  // namespace imbrex::test

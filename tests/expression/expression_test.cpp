// Expressions as values: text, C++ operators, types, folding, and how wrong texts are refused.
#include "imbrex/expression.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "expression/random_expression.h"
#include "imbrex/error.h"

namespace imbrex::test {
namespace {

const std::vector<ExpressionTensor> kTensors = {{"doc", ExpressionType::integer, 2}, {"slope", ExpressionType::real, 1}};

Expression parsed(std::string_view text) { return parse_expression(text, kTensors); }
std::string round_trip(std::string_view text) { return parsed(text).str(); }

// "code: message", or the text of the expression if it is none.
std::string refusal(std::string_view text) {
  try {
    return "no error: " + parsed(text).str();
  } catch (const Error& error) {
    return error.code() + ": " + error.what();
  }
}

TEST(Expression, OperatorsMakeWhatTextMakes) {
  using namespace terms;
  const TensorTerm doc = tensor("doc", ExpressionType::integer, 2), slope = tensor("slope", ExpressionType::real, 1);
  const std::pair<Expression, const char*> rows[] = {
      {(kv <= q) & (q - kv < 4), "kv <= q & q - kv < 4"},
      {score + slope(head) * (kv - q), "score + slope[head] * (kv - q)"},
      {30.0 * tanh(score / 30), "30. * tanh(score / 30)"},
      {(doc(batch, q) == doc(batch, kv)) & (kv <= q), "doc[batch, q] == doc[batch,kv] & kv<=q"},
      {(floor_div(q, 4) == floor_div(kv, 4)) | !(kv % 3 != 0), "q//4 == kv // 4 | !(kv % 3 != 0)"},
      {where(q >= kv, score, -1e9), "where(q >= kv, score, -1e9)"},
      {max(min(abs(-q), kv_len), q_len), "max(min(abs(-q), kv_len), q_len)"},
      {exp(log(sqrt(sigmoid(floor(score))))), "exp(log(sqrt(sigmoid(floor(score)))))"},
      {(to_int(score) > to_int(kv < q)) ^ (q == 1), "int(score) > int(kv < q) ^ q == 1"},
      {kv - q < 0, "d = kv - q; d < 0"},
      {((q & 7) ^ (kv >> 2)) == ((q << 1) | 3), "(q & 7 ^ kv >> 2) == (q << 1 | 3)"},
      {sin(score) * cos(score) + erf(score), "sin(score) * cos(score) + erf(score)"},
  };
  for (const auto& [built, text] : rows) {
    EXPECT_EQ(built, parsed(text)) << built.str() << " and " << text;
    EXPECT_EQ(built.hash(), parsed(text).hash());
  }
}

TEST(Expression, PrintsTheLanguage) {
  EXPECT_EQ(round_trip(" kv<=q&q-kv<4 "), "kv <= q & q - kv < 4");
  EXPECT_EQ(round_trip("score+slope[head]*(kv-q)"), "score + slope[head] * float(kv - q)");
  EXPECT_EQ(round_trip("(q - kv) * (q - kv) < 9 & q - kv >= 0"), "t0 = q - kv; t0 * t0 < 9 & 0 <= t0");
  EXPECT_EQ(round_trip("a = q - kv; b = a // 2; a - (b - 1)"), "t0 = q - kv; t0 - (t0 // 2 - 1)");
  EXPECT_EQ(round_trip("q - 1 - 2"), "q - 1 - 2");
  EXPECT_EQ(round_trip("q << 1 + kv >> 2 & 3 | q"), "q << 1 + kv >> 2 & 3 | q");
  EXPECT_EQ(round_trip("(q << 1) + (kv >> (2 & 3))"), "(q << 1) + (kv >> 2)");
  EXPECT_EQ(round_trip("-q // -3"), "-q // -3");
  EXPECT_EQ(round_trip("-(q // 3)"), "-(q // 3)");
  EXPECT_EQ(round_trip("!(q < kv) | !!(q == kv)"), "!(q < kv) | q == kv");
  EXPECT_EQ(round_trip("score * 1e-9 + -inf"), "score * 1e-09 + -inf");
  EXPECT_EQ(round_trip("(q < 3) == (kv < 3)"), "!(q < 3 ^ kv < 3)");
  EXPECT_EQ(round_trip("score - -2147483648"), "score - -2147483600.0");
  EXPECT_EQ(round_trip("q - -2147483648"), "q - -2147483648");
}

TEST(Expression, FoldsConstantsAndKeepsEachValueOnce) {
  EXPECT_EQ(round_trip("2 + 3 * 4 - -7 // 2"), "18");
  EXPECT_EQ(round_trip("-7 % 3"), "2");
  EXPECT_EQ(round_trip("7 // 0 + 7 % 0"), "0");
  EXPECT_EQ(round_trip("7 / 2"), "3.5");
  EXPECT_EQ(round_trip("2147483647 + 1"), "-2147483648");
  EXPECT_EQ(round_trip("-2147483648 // -1"), "-2147483648");
  EXPECT_EQ(round_trip("int(1e20) + int(nan)"), "2147483647");
  EXPECT_EQ(round_trip("0.0 / 0.0"), "nan");
  EXPECT_EQ(round_trip("floor(-1.5)"), "-2.0");
  EXPECT_EQ(round_trip("-(0.0)"), "-0.0");
  EXPECT_EQ(round_trip("1 < 2 & q < kv"), "q < kv");
  EXPECT_EQ(round_trip("where(1 > 2, score, 3)"), "3.0");
  EXPECT_EQ(round_trip("q < kv | true"), "true");
  EXPECT_EQ(parsed("(q - kv) * (q - kv) + abs(q - kv)").nodes().size(), 6u);  // q, kv, -, *, abs, +
  EXPECT_EQ(parsed("where(1 > 2, doc[q, kv], q)").tensors().size(), 0u);
}

TEST(Expression, TypesAndTensors) {
  EXPECT_EQ(parsed("q < kv").type(), ExpressionType::boolean);
  EXPECT_EQ(parsed("q // kv").type(), ExpressionType::integer);
  EXPECT_EQ(parsed("q / kv").type(), ExpressionType::real);
  EXPECT_EQ(parsed("slope[head] + doc[q, kv]").tensors()[1].name, "doc");
  EXPECT_TRUE(parsed("score + q").uses(ExpressionVariable::score));
  EXPECT_FALSE(parsed("score + q").uses(ExpressionVariable::kv));
  EXPECT_TRUE(Expression().empty());
  EXPECT_EQ(Expression(), Expression());
  EXPECT_FALSE(Expression() == parsed("q"));
}

TEST(Expression, RefusalsNamePlaceExpectedAndActual) {
  const std::pair<const char*, const char*> rows[] = {
      {"", "expression.syntax: at character 1: expected a value, got the end of the text"},
      {"q <", "expression.syntax: at character 4: expected a value, got the end of the text"},
      {"q kv", "expression.syntax: at character 3: expected the end of the text or an operator, got \"kv\""},
      {"(q < kv", "expression.syntax: at character 8: expected \")\", got the end of the text"},
      {"q && kv", "expression.syntax: at character 4: expected a value, got \"&\""},
      {"q = kv", "expression.name: at character 1: a new name"},
      {"a = q", "expression.syntax: at character 6: expected \";\", got the end of the text"},
      {"a = q; a = kv; a", "expression.name: at character 8: a new name"},
      {"q $ kv", "expression.syntax: at character 3: no character of the language: \"$\""},
      {"3q", "expression.syntax: at character 2: expected an operator behind a number, got \"q\""},
      {"q + x",
       "expression.name: at character 5: expected a function or one of score, batch, head, q, kv, q_len, kv_len, doc, slope; got \"x\""},
      {"q & (kv < 1)", "expression.type: at character 3: & takes two bools or two ints, got bool"},
      {"(kv < 1) | q", "expression.type: at character 10: | takes two bools or two ints, got int"},
      {"q ^ score", "expression.type: at character 3: ^ takes two bools or two ints, got float"},
      {"q << score", "expression.type: at character 3: << takes int, got float"},
      {"score // 2", "expression.type: at character 7: // takes int, got float"},
      {"(q < kv) + 1", "expression.type: at character 10: + takes int or float, got bool"},
      {"q < (q < 2)", "expression.type: at character 3: < takes int or float, got bool"},
      {"q == (q < 2)", "expression.type: at character 3: == takes two bools or two numbers, got bool"},
      {"!q", "expression.type: at character 1: ! takes bool, got int"},
      {"exp(q < 1)", "expression.type: at character 1: exp() takes float, got bool"},
      {"where(q, 1, 2)", "expression.type: at character 1: where() takes a bool first, got int"},
      {"where(q < 1, q < 2, 2)", "expression.type: at character 1: where() takes int or float, got bool"},
      {"doc[score, 1]", "expression.type: at character 1: an index takes int, got float"},
      {"0 <= q < kv", "expression.chain: at character 8: "},
      {"q == kv == 1", "expression.chain: at character 9: "},
      {"doc[q]", "expression.arguments: at character 1: tensor doc has 2 indices, got 1"},
      {"doc + 1", "expression.arguments: at character 1: tensor doc has 2 indices in brackets, got none"},
      {"min(1)", "expression.arguments: at character 1: min() takes 2 arguments, got 1"},
      {"min(1, 2, 3, 4)", "expression.arguments: "},
      {"min", "expression.syntax: at character 1: expected \"(\" behind min"},
      {"2147483648", "expression.number: at character 1: an int has 32 bits, got 2147483648"},
      {"1e99", "expression.number: at character 1: "},
      {"99999999999999999999", "expression.number: "},
  };
  for (const auto& [text, expected] : rows) EXPECT_EQ(refusal(text).substr(0, std::string(expected).size()), expected) << text;
}

TEST(Expression, LimitsOfHostileTexts) {
  const auto repeated = [](std::string_view part, int times) {
    std::string text;
    for (int i = 0; i < times; ++i) text += part;
    return text;
  };
  EXPECT_EQ(parsed(repeated("(", 64) + "q" + repeated(")", 64)), parsed("q"));
  EXPECT_EQ(refusal(repeated("(", 65) + "q" + repeated(")", 65)).substr(0, 16), "expression.depth");
  for (const char* part : {"(", "-", "!", "min(1,", "doc[", "abs("})
    EXPECT_EQ(refusal(repeated(part, 10000)).substr(0, 16), "expression.depth") << part;
  EXPECT_EQ(refusal(repeated("1+", 50000)).substr(0, 15), "expression.size") << "text";
  EXPECT_EQ(round_trip(repeated("1+", 500) + "1"), "501");
  std::string numbers = "q";
  for (int i = 0; i < 200; ++i) numbers += fmt::format(" + {}", i);
  EXPECT_EQ(refusal(numbers).substr(0, 15), "expression.size") << "operations";
  std::string folded = "0";
  for (int i = 0; i < 3000; ++i) folded += fmt::format(" + {}", i);
  EXPECT_EQ(refusal(folded).substr(0, 15), "expression.size") << "constants on the way";
  EXPECT_EQ(refusal(std::string(70, 'a') + " = 1; q").substr(0, 15), "expression.name");
  // A value of 2^200 operations if it were written out.
  std::string doubled = "a0 = q; ";
  for (int i = 0; i < 200; ++i) doubled += fmt::format("a{} = a{} + a{}; ", i + 1, i, i);
  EXPECT_EQ(parsed(doubled + "a200").nodes().size(), 201u);
  EXPECT_LT(round_trip(doubled + "a200").size(), 4000u);
}

TEST(Expression, DeepValuesPrintAsTextThatParses) {
  using namespace terms;
  Term right = q, sign = q, call = score, left = kv;
  for (int i = 0; i < 120; ++i) right = kv - right, sign = -(sign + 1), call = exp(-call), left = left - q;
  for (const Expression& e : {Expression(right), Expression(sign), Expression(call), Expression(left)})
    EXPECT_EQ(parse_expression(e.str()), e) << e.str();
  EXPECT_THROW(
      {
        for (int i = 0; i < 200; ++i) right = kv - right;
      },
      Error);
}

TEST(Expression, NamesOfTensors) {
  using namespace terms;
  for (const char* name : {"", "q", "exp", "true", "1a", "a b", "int", "a-b"}) {
    EXPECT_THROW(tensor(name, ExpressionType::integer, 1)(q), Error) << name;
    EXPECT_THROW(parse_expression("q", std::vector<ExpressionTensor>{{name, ExpressionType::integer, 1}}), Error) << name;
  }
  EXPECT_THROW(tensor("a", ExpressionType::integer, 4)(q, q, q), Error);
  EXPECT_THROW(tensor("a", ExpressionType::integer, 2)(q), Error);
  EXPECT_THROW(tensor("a", ExpressionType::integer, 1)(q) + tensor("a", ExpressionType::real, 1)(q), Error);
  const Expression shadowed = tensor("t0", ExpressionType::integer, 1)(q) * (q + 1) - (q + 1);  // str() makes names like this
  EXPECT_EQ(parse_expression(shadowed.str(), shadowed.tensors()), shadowed) << shadowed.str();
}

TEST(Expression, TextsOfRandomExpressionsParseToThem) {
  const std::vector<ExpressionTensor> tensors = RandomExpressions::tensors();
  RandomExpressions random(1);
  std::set<std::string> texts;
  std::set<uint64_t> hashes;
  int made = 0;
  for (int i = 0; i < 3000; ++i) {
    Expression e;
    try {
      e = random.any(1 + i % 6);
    } catch (const Error& error) {
      ASSERT_EQ(error.code(), "expression.size");
      continue;
    }
    ++made;
    const std::string text = e.str();
    const Expression again = parse_expression(text, tensors);
    ASSERT_EQ(again, e) << text << "\nand " << again.str();
    ASSERT_EQ(again.hash(), e.hash());
    ASSERT_EQ(std::vector(again.tensors().begin(), again.tensors().end()), std::vector(e.tensors().begin(), e.tensors().end()));
    texts.insert(text), hashes.insert(e.hash());
    for (size_t n = 0; n < e.nodes().size(); ++n)
      for (const int16_t arg : e.nodes()[n].args) ASSERT_LT(arg, int(n)) << text;
  }
  EXPECT_GT(made, 2500);
  EXPECT_EQ(texts.size(), hashes.size());
}

// Keys of kernels are made of hashes: the same in every release.
TEST(Expression, HashesAreStable) {
  EXPECT_EQ(parsed("kv <= q & q - kv < 4").hash(), 12478796066530584734u);
  EXPECT_EQ(parsed("score + slope[head] * (kv - q)").hash(), 10522780082018781495u);
}

}  // namespace
}  // namespace imbrex::test

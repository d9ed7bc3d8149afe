// Fuzzes the parser of expressions: any text is either refused with a code, or prints as text that parses to the same expression, which has
// the same values in rows as alone, and of which intervals say nothing that its values do not do.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "imbrex/bound_expression.h"
#include "imbrex/error.h"

namespace {

using namespace imbrex;

void check_values(const Expression& expression) {
  static std::vector<int> doc = {0, 0, 1, 1, 1, 7};
  static std::vector<float> slope = {0.5f, -2.f};
  static std::vector<uint8_t> seen = {1, 0, 0, 1};
  const NamedTensor tensors[] = {{"doc", TensorView::contiguous(doc.data(), DType::i32, {2, 3})},
                                 {"slope", TensorView::contiguous(slope.data(), DType::f32, {2})},
                                 {"seen", TensorView::contiguous(seen.data(), DType::u8, {1, 2, 2})}};
  const BoundExpression bound(expression, tensors, {.q = {0, 5}, .kv = {0, 6}});
  ExpressionVariables at{.score = 1.5f, .batch = 1, .head = 1, .q = 3, .q_len = 4, .kv_len = 7};
  constexpr int kBegin = -1, kEnd = 8, kKeys = kEnd - kBegin;
  uint8_t shown[kKeys];
  float scores[kKeys];
  for (float& score : scores) score = at.score;
  if (expression.type() == ExpressionType::boolean) bound.mask_row(at, kBegin, kEnd, shown);
  if (expression.type() == ExpressionType::real) bound.score_row(at, kBegin, kEnd, scores);
  bool any = false, all = true;
  for (at.kv = kBegin; at.kv < kEnd; ++at.kv) {
    const ExpressionValue value = bound.evaluate(at);
    if (value.type == ExpressionType::boolean && shown[at.kv - kBegin] != value.bits) abort();
    const float score = scores[at.kv - kBegin];
    if (value.type == ExpressionType::real && std::memcmp(&score, &value.bits, 4) != 0 && (score == score || value.real() == value.real()))
      abort();
    any = any || value.boolean(), all = all && value.boolean();
  }
  if (expression.type() != ExpressionType::boolean) return;
  const Visibility said =
      bound.shown({.batch = {1, 1}, .head = {1, 1}, .q = {3, 3}, .kv = {kBegin, kEnd - 1}, .q_len = {4, 4}, .kv_len = {7, 7}});
  if ((said == Visibility::always && !all) || (said == Visibility::never && any)) abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<ExpressionTensor> tensors = {
      {"doc", ExpressionType::integer, 2}, {"slope", ExpressionType::real, 1}, {"seen", ExpressionType::boolean, 3}};
  Expression expression;
  try {
    expression = parse_expression(std::string_view(reinterpret_cast<const char*>(data), size), tensors);
  } catch (const Error& error) {
    if (!error.code().starts_with("expression.")) abort();
    return 0;
  }
  // Errors from here on are defects.
  const Expression again = parse_expression(expression.str(), tensors);
  if (!(again == expression) || again.hash() != expression.hash() || cuda_text(expression, "f").empty()) abort();
  check_values(expression);
  return 0;
}

// Expressions as text that parses to the same expression.
#include <fmt/format.h>

#include <cmath>

#include "expression/builder.h"
#include "expression/value.h"

namespace imbrex {
namespace {

constexpr int kWeakest = 0, kPrefix = 8, kValue = 9;
// Values so deep in parentheses get a name, so that the text can be parsed.
constexpr int kNamedNesting = Expression::kMaxNesting / 4;

int strength_of(ExpressionOp op) {
  using enum ExpressionOp;
  switch (op) {
    case logical_or:
    case bit_or: return 1;
    case logical_xor:
    case bit_xor: return 2;
    case logical_and:
    case bit_and: return 3;
    case equal:
    case not_equal:
    case less:
    case less_equal: return 4;
    case shift_left:
    case shift_right: return 5;
    case add:
    case subtract: return 6;
    case multiply:
    case divide:
    case floor_divide:
    case modulo: return 7;
    default: return kWeakest;
  }
}

// The text of a value, how strongly it binds, and how deep its parentheses are.
struct TextPiece {
  std::string text;
  int strength = kValue, nesting = 0;
};

TextPiece in_parentheses(const TextPiece& piece, bool needed) {
  return needed ? TextPiece{"(" + piece.text + ")", kValue, piece.nesting + 1} : piece;
}

TextPiece constant_piece(const ExpressionNode& node) {
  const ExpressionBits value{node.value};
  if (node.type == ExpressionType::boolean) return {value.boolean() ? "true" : "false"};
  if (node.type == ExpressionType::integer) return {fmt::format("{}", value.integer()), value.integer() < 0 ? kPrefix : kValue};
  const float x = value.real();
  if (std::isnan(x)) return {"nan"};
  std::string text = std::isinf(x) ? "inf" : fmt::format("{}", std::fabs(x));
  if (!std::isinf(x) && text.find_first_of(".e") == std::string::npos) text += ".0";
  return std::signbit(x) ? TextPiece{"-" + text, kPrefix, std::isinf(x) ? 1 : 0} : TextPiece{text};
}

}  // namespace

std::string Expression::str() const {
  const std::span<const ExpressionNode> list = nodes();
  if (list.empty()) return "";
  std::vector<int> uses(list.size());
  for (const ExpressionNode& node : list)
    for (const int16_t arg : node.args)
      if (arg >= 0) ++uses[size_t(arg)];

  std::vector<TextPiece> pieces;
  std::string text;
  int names = 0;
  const auto new_name = [&] {
    while (true) {
      std::string name = fmt::format("t{}", names++);
      bool free = true;
      for (const ExpressionTensor& tensor : tensors()) free = free && tensor.name != name;
      if (free) return name;
    }
  };
  for (size_t i = 0; i < list.size(); ++i) {
    const ExpressionNode& node = list[i];
    const auto arg = [&](int n) -> const TextPiece& { return pieces[size_t(node.args[size_t(n)])]; };
    TextPiece piece;
    if (node.op == ExpressionOp::constant) {
      piece = constant_piece(node);
    } else if (node.op == ExpressionOp::variable) {
      piece = {to_string(ExpressionVariable(node.value))};
    } else if (const int strength = strength_of(node.op); strength != kWeakest) {
      // Operators of one strength stand together from the left; comparisons do not.
      const TextPiece left = in_parentheses(arg(0), arg(0).strength < strength + (strength == strength_of(ExpressionOp::less) ? 1 : 0));
      const TextPiece right = in_parentheses(arg(1), arg(1).strength <= strength);
      piece = {fmt::format("{} {} {}", left.text, operation_name(node.op), right.text), strength, std::max(left.nesting, right.nesting)};
    } else if (node.op == ExpressionOp::negate || node.op == ExpressionOp::logical_not) {
      const TextPiece operand = in_parentheses(arg(0), arg(0).strength < kPrefix);
      piece = {operation_name(node.op) + operand.text, kPrefix, operand.nesting + 1};
    } else {
      const bool index = node.op == ExpressionOp::tensor;
      piece.text = index ? tensors()[size_t(node.value)].name + "[" : operation_name(node.op);
      if (!index) piece.text.pop_back();  // the closing parenthesis
      for (int n = 0; n < 3 && node.args[size_t(n)] >= 0; ++n) {
        piece.text += (n > 0 ? ", " : "") + arg(n).text;
        piece.nesting = std::max(piece.nesting, arg(n).nesting + 1);
      }
      piece.text += index ? "]" : ")";
    }
    const bool leaf = node.op == ExpressionOp::constant || node.op == ExpressionOp::variable;
    if (i + 1 < list.size() && !leaf && (uses[i] > 1 || piece.nesting >= kNamedNesting)) {
      const std::string name = new_name();
      text += name + " = " + piece.text + "; ";
      piece = {name};
    }
    pieces.push_back(std::move(piece));
  }
  return text + pieces.back().text;
}

std::string Expression::text() const {
  std::string declared;
  for (const ExpressionTensor& tensor : tensors())
    declared += fmt::format("{} {}[{}]; ", to_string(tensor.type), tensor.name, std::string(size_t(tensor.rank - 1), ','));
  return declared + str();
}

}  // namespace imbrex

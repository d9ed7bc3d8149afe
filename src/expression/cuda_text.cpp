// Expressions as text for CUDA and C++: a line for each operation, which calls a function of operations.h. row_text.cpp has the other form.
#include <fmt/format.h>

#include "core/check.h"
#include "expression/builder.h"
#include "expression/text_parts.h"
#include "expression/value.h"

namespace imbrex {
namespace {

const char* function_of(ExpressionOp op) {
  using enum ExpressionOp;
  switch (op) {
    case constant:
    case variable:
    case tensor: break;
    case to_real: return "to_real";
    case to_integer: return "to_integer";
    case negate: return "negate";
    case abs: return "abs";
    case floor: return "floor";
    case exp: return "exp";
    case log: return "log";
    case sqrt: return "sqrt";
    case tanh: return "tanh";
    case sigmoid: return "sigmoid";
    case logical_not: return "logical_not";
    case add: return "add";
    case subtract: return "subtract";
    case multiply: return "multiply";
    case divide: return "divide";
    case floor_divide: return "floor_divide";
    case modulo: return "modulo";
    case min: return "min";
    case max: return "max";
    case equal: return "equal";
    case not_equal: return "not_equal";
    case less: return "less";
    case less_equal: return "less_equal";
    case logical_and: return "logical_and";
    case logical_or: return "logical_or";
    case logical_xor: return "logical_xor";
    case where: return "where";
    case bit_and: return "bit_and";
    case bit_or: return "bit_or";
    case bit_xor: return "bit_xor";
    case shift_left: return "shift_left";
    case shift_right: return "shift_right";
    case sin: return "sin";
    case cos: return "cos";
    case erf: return "erf";
  }
  return "";
}

}  // namespace

std::string constant_text(const ExpressionNode& node) {
  const ExpressionBits value{node.value};
  if (node.type == ExpressionType::boolean) return value.boolean() ? "true" : "false";
  if (node.type == ExpressionType::real) return fmt::format("{}as_float(0x{:08x}u)", kCalled, uint32_t(value.bits));
  return value.integer() == INT32_MIN ? fmt::format("{}kIntMin", kCalled) : fmt::format("{}", value.integer());
}

std::vector<bool> deciding(std::span<const ExpressionNode> nodes) {
  std::vector<bool> decides(nodes.size());
  for (size_t n = nodes.size(); n-- > 0;) {
    const bool passes = nodes[n].type != ExpressionType::real || decides[n];
    for (const int16_t arg : nodes[n].args)
      if (arg >= 0 && passes && nodes[size_t(arg)].type == ExpressionType::real) decides[size_t(arg)] = true;
  }
  return decides;
}

std::string value_text(std::span<const ExpressionNode> nodes, size_t n, bool exact) {
  const ExpressionNode& node = nodes[n];
  std::string args;
  for (const int16_t arg : node.args)
    if (arg >= 0) args += fmt::format("{}v{}", args.empty() ? "" : ", ", arg);
  switch (node.op) {
    case ExpressionOp::constant: return constant_text(node);
    case ExpressionOp::variable:
      if (ExpressionVariable(node.value) == ExpressionVariable::score) return fmt::format("{}multiply_exact(in.score, in.scale)", kCalled);
      return fmt::format("in.{}", to_string(ExpressionVariable(node.value)));
    case ExpressionOp::tensor: {
      const std::string function = node.type == ExpressionType::boolean ? "element_bool" : fmt::format("element<{}>", to_string(node.type));
      return fmt::format("{}{}(in.tensors[{}], {})", kCalled, function, node.value, args);
    }
    default: break;
  }
  const bool contracts = node.type == ExpressionType::real &&
                         (node.op == ExpressionOp::add || node.op == ExpressionOp::subtract || node.op == ExpressionOp::multiply);
  return fmt::format("{}{}{}({})", kCalled, function_of(node.op), contracts && exact ? "_exact" : "", args);
}

std::string cuda_text(const Expression& expression, std::string_view name, ExpressionFloats floats) {
  check(!expression.empty(), "expression.empty", "an expression is needed, got an empty one");
  check(is_identifier(name) && !is_expression_word(name), "expression.name",
        "the name of a function is up to 64 letters, digits and _, and no word of the language; got \"{}\"", name);
  const std::span<const ExpressionNode> nodes = expression.nodes();
  std::string text =
      fmt::format("inline {} {}([[maybe_unused]] const imbrex::ExpressionInputs& in) {{\n", to_string(expression.type()), name);
  if (floats == ExpressionFloats::approximate && expression.type() == ExpressionType::real) return text + row_text(expression) + "}\n";
  const std::vector<bool> exact = deciding(nodes);
  for (size_t n = 0; n < nodes.size(); ++n)
    text += fmt::format("  const {} v{} = {};\n", to_string(nodes[n].type), n, value_text(nodes, n, exact[n]));
  return text + fmt::format("  return v{};\n}}\n", nodes.size() - 1);
}

}  // namespace imbrex

// See builder.h.
#include "expression/builder.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "expression/value.h"

namespace imbrex {
namespace {

constexpr ExpressionFunction kFunctions[] = {
    {"float", ExpressionOp::to_real, 1}, {"int", ExpressionOp::to_integer, 1}, {"abs", ExpressionOp::abs, 1},
    {"floor", ExpressionOp::floor, 1},   {"exp", ExpressionOp::exp, 1},        {"log", ExpressionOp::log, 1},
    {"sqrt", ExpressionOp::sqrt, 1},     {"tanh", ExpressionOp::tanh, 1},      {"sigmoid", ExpressionOp::sigmoid, 1},
    {"sin", ExpressionOp::sin, 1},       {"cos", ExpressionOp::cos, 1},        {"erf", ExpressionOp::erf, 1},
    {"min", ExpressionOp::min, 2},       {"max", ExpressionOp::max, 2},        {"where", ExpressionOp::where, 3},
};
// Lists under construction may have values that nothing uses in the end: constants that were folded.
constexpr size_t kMaxBuilt = 4 * Expression::kMaxNodes;

const char* symbol_of(ExpressionOp op) {
  using enum ExpressionOp;
  switch (op) {
    case logical_not: return "!";
    case negate:
    case subtract: return "-";
    case add: return "+";
    case multiply: return "*";
    case divide: return "/";
    case floor_divide: return "//";
    case modulo: return "%";
    case equal: return "==";
    case not_equal: return "!=";
    case less: return "<";
    case less_equal: return "<=";
    case logical_and:
    case bit_and: return "&";
    case logical_or:
    case bit_or: return "|";
    case logical_xor:
    case bit_xor: return "^";
    case shift_left: return "<<";
    case shift_right: return ">>";
    default: return nullptr;
  }
}

// What an operation takes: one type, or ints and floats alike (then all of them become floats where one is).
enum class Takes { booleans, booleans_or_integers, integers, reals, numbers, numbers_or_booleans };
Takes taken_by(ExpressionOp op) {
  using enum ExpressionOp;
  switch (op) {
    case logical_not: return Takes::booleans;
    case logical_and:
    case logical_or:
    case logical_xor: return Takes::booleans_or_integers;
    case floor_divide:
    case modulo:
    case bit_and:
    case bit_or:
    case bit_xor:
    case shift_left:
    case shift_right: return Takes::integers;
    case divide:
    case floor:
    case exp:
    case log:
    case sqrt:
    case tanh:
    case sigmoid:
    case sin:
    case cos:
    case erf: return Takes::reals;
    case equal:
    case not_equal:
    case to_real:
    case to_integer: return Takes::numbers_or_booleans;
    default: return Takes::numbers;
  }
}

// Of ints, what is a logical operation of bools.
ExpressionOp of_bits(ExpressionOp op) {
  using enum ExpressionOp;
  return op == logical_and ? bit_and : op == logical_or ? bit_or : op == logical_xor ? bit_xor : op;
}

bool is_comparison(ExpressionOp op) {
  return op == ExpressionOp::equal || op == ExpressionOp::not_equal || op == ExpressionOp::less || op == ExpressionOp::less_equal;
}

}  // namespace

std::span<const ExpressionFunction> expression_functions() { return kFunctions; }

bool is_expression_word(std::string_view name) {
  for (int i = 0; i < kExpressionVariables; ++i)
    if (name == to_string(ExpressionVariable(i))) return true;
  for (const ExpressionFunction& function : kFunctions)
    if (name == function.name) return true;
  return name == "true" || name == "false" || name == "inf" || name == "nan" || name == "bool";
}

bool is_identifier(std::string_view name) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  return !name.empty() && name.size() <= 64 && letter(name[0]) &&
         std::all_of(name.begin(), name.end(), [&](char c) { return letter(c) || (c >= '0' && c <= '9'); });
}

std::string operation_name(ExpressionOp op) {
  if (const char* symbol = symbol_of(op)) return symbol;
  for (const ExpressionFunction& function : kFunctions)
    if (function.op == op) return std::string(function.name) + "()";
  return op == ExpressionOp::tensor ? "an index" : "a value";
}

void ExpressionBuilder::refuse(Id id, ExpressionOp op, std::string_view expected) const {
  fail("expression.type", "{}{} takes {}, got {}", place_, operation_name(op), expected, to_string(type(id)));
}

ExpressionBuilder::Id ExpressionBuilder::add(ExpressionNode node) {
  const auto found = std::find(nodes_.begin(), nodes_.end(), node);
  if (found != nodes_.end()) return Id(found - nodes_.begin());
  check(nodes_.size() < kMaxBuilt, "expression.size", "{}an expression has at most {} operations, this one has more", place_,
        Expression::kMaxNodes);
  nodes_.push_back(node);
  return Id(nodes_.size()) - 1;
}

ExpressionBuilder::Id ExpressionBuilder::constant(bool value) { return add({.type = ExpressionType::boolean, .value = value ? 1 : 0}); }
ExpressionBuilder::Id ExpressionBuilder::constant(int value) { return add({.type = ExpressionType::integer, .value = value}); }
ExpressionBuilder::Id ExpressionBuilder::constant(float value) {
  return add(
      {.type = ExpressionType::real, .value = std::isnan(value) ? 0x7fc00000 : ExpressionBits::of(value).bits});  // NaNs are one constant
}

ExpressionBuilder::Id ExpressionBuilder::variable(ExpressionVariable which) {
  return add({.op = ExpressionOp::variable,
              .type = which == ExpressionVariable::score ? ExpressionType::real : ExpressionType::integer,
              .value = int(which)});
}

int ExpressionBuilder::tensor_number(const ExpressionTensor& tensor) {
  check(is_identifier(tensor.name) && !is_expression_word(tensor.name), "expression.name",
        "{}the name of a tensor is up to 64 letters, digits and _, and no word of the language; got \"{}\"", place_, tensor.name);
  check(tensor.rank >= 1 && tensor.rank <= 3, "expression.arguments", "{}tensor {} has 1 to 3 dimensions, got {}", place_, tensor.name,
        tensor.rank);
  check(tensor.type <= ExpressionType::real, "expression.type", "{}tensor {} is of bool, int or float, got type {}", place_, tensor.name,
        int(tensor.type));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].name != tensor.name) continue;
    check(tensors_[i] == tensor, "expression.name", "{}two tensors of different type or rank are named {}", place_, tensor.name);
    return int(i);
  }
  tensors_.push_back(tensor);
  return int(tensors_.size()) - 1;
}

ExpressionBuilder::Id ExpressionBuilder::element(const ExpressionTensor& tensor, std::span<const Id> indices) {
  const int number = tensor_number(tensor);
  check(int(indices.size()) == tensor.rank, "expression.arguments", "{}tensor {} has {} indices, got {}", place_, tensor.name, tensor.rank,
        indices.size());
  ExpressionNode node{.op = ExpressionOp::tensor, .type = tensor.type, .value = number};
  for (size_t i = 0; i < indices.size(); ++i) {
    if (type(indices[i]) != ExpressionType::integer) refuse(indices[i], ExpressionOp::tensor, "int");
    node.args[i] = int16_t(indices[i]);
  }
  return add(node);
}

ExpressionBuilder::Id ExpressionBuilder::converted(Id id, ExpressionType to, ExpressionOp) {
  return type(id) == to ? id : operation(ExpressionOp::to_real, std::array{id});
}

// Where the value is that of an argument: the number of the argument, otherwise -1.
ExpressionBuilder::Id ExpressionBuilder::simplified(ExpressionOp op, std::span<const Id> args) const {
  const auto is = [&](Id id, bool value) { return node(id).op == ExpressionOp::constant && node(id).value == (value ? 1 : 0); };
  if (op == ExpressionOp::where && node(args[0]).op == ExpressionOp::constant) return is(args[0], true) ? args[1] : args[2];
  if (op == ExpressionOp::where && args[1] == args[2]) return args[1];
  if (op == ExpressionOp::logical_not && node(args[0]).op == ExpressionOp::logical_not) return node(args[0]).args[0];
  if (op != ExpressionOp::logical_and && op != ExpressionOp::logical_or) return -1;
  const bool neutral = op == ExpressionOp::logical_and;
  for (int i = 0; i < 2; ++i) {
    if (is(args[size_t(i)], neutral)) return args[size_t(1 - i)];
    if (is(args[size_t(i)], !neutral)) return args[size_t(i)];
  }
  return args[0] == args[1] ? args[0] : -1;
}

ExpressionBuilder::Id ExpressionBuilder::operation(ExpressionOp op, std::span<const Id> given) {
  std::array<Id, 3> ids{-1, -1, -1};
  std::copy(given.begin(), given.end(), ids.begin());
  const std::span<Id> args(ids.data(), given.size());
  const std::span<Id> operands = op == ExpressionOp::where ? args.subspan(1) : args;
  if (op == ExpressionOp::where && type(ids[0]) != ExpressionType::boolean) refuse(ids[0], op, "a bool first");
  const Takes takes = taken_by(op);
  const bool all_boolean = std::all_of(operands.begin(), operands.end(), [&](Id id) { return type(id) == ExpressionType::boolean; });
  const bool any_real = std::any_of(operands.begin(), operands.end(), [&](Id id) { return type(id) == ExpressionType::real; });
  if (takes == Takes::booleans_or_integers && !all_boolean) {
    for (const Id id : operands)
      if (type(id) == ExpressionType::real) refuse(id, op, "two bools or two ints");
    if (type(operands[0]) != type(operands[1])) refuse(operands[1], op, "two bools or two ints");
    return operation(of_bits(op), given);
  }
  for (const Id id : operands) {
    if (takes == Takes::booleans && type(id) != ExpressionType::boolean) refuse(id, op, "bool");
    if (takes == Takes::integers && type(id) != ExpressionType::integer) refuse(id, op, "int");
    if (takes == Takes::reals && type(id) == ExpressionType::boolean) refuse(id, op, "float");
    if (takes == Takes::numbers && type(id) == ExpressionType::boolean && !(op == ExpressionOp::where && all_boolean))
      refuse(id, op, "int or float");
    if (takes == Takes::numbers_or_booleans && type(id) == ExpressionType::boolean && !all_boolean)
      refuse(id, op, "two bools or two numbers");
  }
  if ((op == ExpressionOp::to_real && any_real) || (op == ExpressionOp::to_integer && type(ids[0]) == ExpressionType::integer))
    return ids[0];
  if (all_boolean && (op == ExpressionOp::equal || op == ExpressionOp::not_equal)) {
    const Id differ = operation(ExpressionOp::logical_xor, args);
    return op == ExpressionOp::equal ? operation(ExpressionOp::logical_not, std::array{differ}) : differ;
  }
  if (op != ExpressionOp::to_real && op != ExpressionOp::to_integer && (takes == Takes::reals || any_real))
    for (Id& id : operands) id = converted(id, ExpressionType::real, op);
  if (const Id same = simplified(op, args); same >= 0) return same;

  ExpressionNode made{.op = op, .type = type(operands[0])};
  if (is_comparison(op)) made.type = ExpressionType::boolean;
  if (op == ExpressionOp::to_real) made.type = ExpressionType::real;
  if (op == ExpressionOp::to_integer) made.type = ExpressionType::integer;
  std::array<ExpressionBits, 3> values;
  bool constants = true;
  for (size_t i = 0; i < args.size(); ++i) {
    made.args[i] = int16_t(args[i]);
    constants = constants && node(args[i]).op == ExpressionOp::constant;
    values[i].bits = node(args[i]).value;
  }
  if (!constants) return add(made);
  const ExpressionBits value = apply_operation(op, type(args[0]), values);
  return made.type == ExpressionType::real ? constant(value.real()) : add({.type = made.type, .value = value.bits});
}

ExpressionBuilder::Id ExpressionBuilder::import(const Expression& other) {
  check(!other.empty(), "expression.empty", "{}an expression is needed, got an empty one", place_);
  std::vector<Id> ids;
  for (ExpressionNode node : other.nodes()) {
    for (int16_t& arg : node.args)
      if (arg >= 0) arg = int16_t(ids[size_t(arg)]);
    if (node.op == ExpressionOp::tensor) node.value = tensor_number(other.tensors()[size_t(node.value)]);
    ids.push_back(add(node));
  }
  return ids.back();
}

Expression ExpressionBuilder::expression(Id root) const {
  auto program = std::make_shared<Expression::Program>();
  std::vector<int> number(nodes_.size(), -1), tensor_numbers(tensors_.size(), -1);
  // Depth first, with a stack of its own: a list may be one long chain.
  std::vector<Id> todo{root};
  while (!todo.empty()) {
    const Id id = todo.back();
    if (number[size_t(id)] >= 0) {
      todo.pop_back();
      continue;
    }
    ExpressionNode made = node(id);
    const auto missing = std::find_if(made.args.begin(), made.args.end(), [&](int16_t arg) { return arg >= 0 && number[size_t(arg)] < 0; });
    if (missing != made.args.end()) {
      todo.push_back(*missing);
      continue;
    }
    for (int16_t& arg : made.args)
      if (arg >= 0) arg = int16_t(number[size_t(arg)]);
    if (made.op == ExpressionOp::tensor) {
      int& place = tensor_numbers[size_t(made.value)];
      if (place < 0) {
        place = int(program->tensors.size());
        program->tensors.push_back(tensors_[size_t(made.value)]);
      }
      made.value = place;
    }
    number[size_t(id)] = int(program->nodes.size());
    program->nodes.push_back(made);
    todo.pop_back();
  }
  check(program->nodes.size() <= size_t(Expression::kMaxNodes), "expression.size", "{}an expression has at most {} operations, got {}",
        place_, Expression::kMaxNodes, program->nodes.size());
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, a byte at a time
  const auto mix = [&](uint32_t value) {
    for (int i = 0; i < 4; ++i) hash = (hash ^ ((value >> (8 * i)) & 255)) * 0x100000001b3u;
  };
  for (const ExpressionNode& n : program->nodes) {
    mix(uint32_t(n.op) << 8 | uint32_t(n.type));
    for (const int16_t arg : n.args) mix(uint32_t(int32_t(arg)));
    mix(uint32_t(n.value));
  }
  for (const ExpressionTensor& t : program->tensors) {
    mix(uint32_t(t.type) << 8 | uint32_t(t.rank));
    for (const char c : t.name) mix(uint32_t(uint8_t(c)));
    mix(256);
  }
  program->hash = hash;
  Expression result;
  result.program_ = std::move(program);
  return result;
}

}  // namespace imbrex

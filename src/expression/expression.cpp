// Expressions as values, and their C++ operators.
#include "imbrex/expression.h"

#include <algorithm>

#include "core/check.h"
#include "expression/builder.h"

namespace imbrex {

const char* to_string(ExpressionType type) {
  return type == ExpressionType::boolean ? "bool" : type == ExpressionType::integer ? "int" : "float";
}

const char* to_string(ExpressionVariable variable) {
  constexpr const char* kNames[kExpressionVariables] = {"score", "batch", "head", "q", "kv", "q_len", "kv_len"};
  return kNames[int(variable)];
}

ExpressionType Expression::type() const {
  check(!empty(), "expression.empty", "an expression is needed, got an empty one");
  return program_->nodes.back().type;
}

std::span<const ExpressionNode> Expression::nodes() const {
  return empty() ? std::span<const ExpressionNode>() : std::span<const ExpressionNode>(program_->nodes);
}

std::span<const ExpressionTensor> Expression::tensors() const {
  return empty() ? std::span<const ExpressionTensor>() : std::span<const ExpressionTensor>(program_->tensors);
}

bool Expression::uses(ExpressionVariable variable) const {
  return std::any_of(nodes().begin(), nodes().end(),
                     [&](const ExpressionNode& n) { return n.op == ExpressionOp::variable && n.value == int(variable); });
}

uint64_t Expression::hash() const { return empty() ? 0 : program_->hash; }

bool operator==(const Expression& a, const Expression& b) {
  if (a.program_ == b.program_ || a.empty() || b.empty()) return a.program_ == b.program_;
  return a.hash() == b.hash() && a.program_->nodes == b.program_->nodes && a.program_->tensors == b.program_->tensors;
}

namespace terms {
namespace {

template <class Make>
Expression built(Make&& make) {
  ExpressionBuilder builder;
  return builder.expression(make(builder));
}

Term applied(ExpressionOp op, std::initializer_list<const Expression*> args) {
  return built([&](ExpressionBuilder& builder) {
    std::vector<int> ids;
    for (const Expression* arg : args) ids.push_back(builder.import(*arg));
    return builder.operation(op, ids);
  });
}

Term unary(ExpressionOp op, const Expression& a) { return applied(op, {&a}); }
Term binary(ExpressionOp op, const Expression& a, const Expression& b) { return applied(op, {&a, &b}); }

}  // namespace

Term::Term(Variable v) : expression_(built([&](ExpressionBuilder& b) { return b.variable(v.which); })) {}
Term::Term(bool value) : expression_(built([&](ExpressionBuilder& b) { return b.constant(value); })) {}
Term::Term(int value) : expression_(built([&](ExpressionBuilder& b) { return b.constant(value); })) {}
Term::Term(float value) : expression_(built([&](ExpressionBuilder& b) { return b.constant(value); })) {}
Term::Term(double value) : Term(float(value)) {}

Term TensorTerm::element(std::span<const Term> indices) const {
  return built([&](ExpressionBuilder& builder) {
    std::vector<int> ids;
    for (const Term& index : indices) ids.push_back(builder.import(index));
    return builder.element(tensor_, ids);
  });
}

Term operator+(const Term& a, const Term& b) { return binary(ExpressionOp::add, a, b); }
Term operator-(const Term& a, const Term& b) { return binary(ExpressionOp::subtract, a, b); }
Term operator*(const Term& a, const Term& b) { return binary(ExpressionOp::multiply, a, b); }
Term operator/(const Term& a, const Term& b) { return binary(ExpressionOp::divide, a, b); }
Term operator%(const Term& a, const Term& b) { return binary(ExpressionOp::modulo, a, b); }
Term operator==(const Term& a, const Term& b) { return binary(ExpressionOp::equal, a, b); }
Term operator!=(const Term& a, const Term& b) { return binary(ExpressionOp::not_equal, a, b); }
Term operator<(const Term& a, const Term& b) { return binary(ExpressionOp::less, a, b); }
Term operator<=(const Term& a, const Term& b) { return binary(ExpressionOp::less_equal, a, b); }
Term operator>(const Term& a, const Term& b) { return binary(ExpressionOp::less, b, a); }
Term operator>=(const Term& a, const Term& b) { return binary(ExpressionOp::less_equal, b, a); }
Term operator&(const Term& a, const Term& b) { return binary(ExpressionOp::logical_and, a, b); }
Term operator|(const Term& a, const Term& b) { return binary(ExpressionOp::logical_or, a, b); }
Term operator^(const Term& a, const Term& b) { return binary(ExpressionOp::logical_xor, a, b); }
Term operator<<(const Term& a, const Term& b) { return binary(ExpressionOp::shift_left, a, b); }
Term operator>>(const Term& a, const Term& b) { return binary(ExpressionOp::shift_right, a, b); }
Term operator!(const Term& a) { return unary(ExpressionOp::logical_not, a); }
Term operator-(const Term& a) { return unary(ExpressionOp::negate, a); }
Term floor_div(const Term& a, const Term& b) { return binary(ExpressionOp::floor_divide, a, b); }
Term where(const Term& condition, const Term& a, const Term& b) {
  return applied(ExpressionOp::where,
                 {&static_cast<const Expression&>(condition), &static_cast<const Expression&>(a), &static_cast<const Expression&>(b)});
}
Term min(const Term& a, const Term& b) { return binary(ExpressionOp::min, a, b); }
Term max(const Term& a, const Term& b) { return binary(ExpressionOp::max, a, b); }
Term abs(const Term& a) { return unary(ExpressionOp::abs, a); }
Term floor(const Term& a) { return unary(ExpressionOp::floor, a); }
Term exp(const Term& a) { return unary(ExpressionOp::exp, a); }
Term log(const Term& a) { return unary(ExpressionOp::log, a); }
Term sqrt(const Term& a) { return unary(ExpressionOp::sqrt, a); }
Term tanh(const Term& a) { return unary(ExpressionOp::tanh, a); }
Term sigmoid(const Term& a) { return unary(ExpressionOp::sigmoid, a); }
Term sin(const Term& a) { return unary(ExpressionOp::sin, a); }
Term cos(const Term& a) { return unary(ExpressionOp::cos, a); }
Term erf(const Term& a) { return unary(ExpressionOp::erf, a); }
Term to_float(const Term& a) { return unary(ExpressionOp::to_real, a); }
Term to_int(const Term& a) { return unary(ExpressionOp::to_integer, a); }

}  // namespace terms
}  // namespace imbrex

#pragma once
// A value of an expression as 32 bits, and what an operation does to such values: for constants and for single elements.
#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "expression/operations.h"
#include "imbrex/expression.h"

namespace imbrex {

// An int, the bits of a float, or 0 or 1 for a bool.
struct ExpressionBits {
  int32_t bits = 0;
  int32_t integer() const { return bits; }
  float real() const { return std::bit_cast<float>(bits); }
  bool boolean() const { return bits != 0; }
  static ExpressionBits of(int32_t value) { return {value}; }
  static ExpressionBits of(bool value) { return {value ? 1 : 0}; }
  static ExpressionBits of(float value) { return {std::bit_cast<int32_t>(value)}; }
};

// A function of many instructions: rows compute it in a loop of its own.
template <class F>
struct LongOperation : F {};
template <class F>
LongOperation(F) -> LongOperation<F>;
template <class F>
constexpr bool is_long_operation = false;
template <class F>
constexpr bool is_long_operation<LongOperation<F>> = true;

// Calls `use` with the function of operations.h that an operation on arguments of type `type` (of where(): on its alternatives) is, as an
// object, and nothing for constants, variables and tensors. With as many parameters as the operation has arguments.
template <class Use>
void with_operation(ExpressionOp op, ExpressionType type, Use&& use) {
  using enum ExpressionOp;
  namespace o = operations;
  const bool real = type == ExpressionType::real;
  switch (op) {
    case constant:
    case variable:
    case tensor: return;
    case to_real:
      return type == ExpressionType::boolean ? use([](bool a) { return o::to_real(a); }) : use([](int a) { return o::to_real(a); });
    case to_integer:
      return real ? use(LongOperation{[](float a) { return o::to_integer(a); }}) : use([](bool a) { return o::to_integer(a); });
    case negate: return real ? use([](float a) { return o::negate(a); }) : use([](int a) { return o::negate(a); });
    case abs: return real ? use([](float a) { return o::abs(a); }) : use([](int a) { return o::abs(a); });
    case floor: return use(LongOperation{[](float a) { return o::floor(a); }});
    case exp: return use(LongOperation{[](float a) { return o::exp(a); }});
    case log: return use(LongOperation{[](float a) { return o::log(a); }});
    case sqrt: return use([](float a) { return o::sqrt(a); });
    case tanh: return use(LongOperation{[](float a) { return o::tanh(a); }});
    case sigmoid: return use(LongOperation{[](float a) { return o::sigmoid(a); }});
    case logical_not: return use([](bool a) { return o::logical_not(a); });
    case add: return real ? use([](float a, float b) { return o::add(a, b); }) : use([](int a, int b) { return o::add(a, b); });
    case subtract:
      return real ? use([](float a, float b) { return o::subtract(a, b); }) : use([](int a, int b) { return o::subtract(a, b); });
    case multiply:
      return real ? use([](float a, float b) { return o::multiply(a, b); }) : use([](int a, int b) { return o::multiply(a, b); });
    case divide: return use([](float a, float b) { return o::divide(a, b); });
    case floor_divide: return use(LongOperation{[](int a, int b) { return o::floor_divide(a, b); }});
    case modulo: return use(LongOperation{[](int a, int b) { return o::modulo(a, b); }});
    case min: return real ? use([](float a, float b) { return o::min(a, b); }) : use([](int a, int b) { return o::min(a, b); });
    case max: return real ? use([](float a, float b) { return o::max(a, b); }) : use([](int a, int b) { return o::max(a, b); });
    case equal: return real ? use([](float a, float b) { return o::equal(a, b); }) : use([](int a, int b) { return o::equal(a, b); });
    case not_equal:
      return real ? use([](float a, float b) { return o::not_equal(a, b); }) : use([](int a, int b) { return o::not_equal(a, b); });
    case less: return real ? use([](float a, float b) { return o::less(a, b); }) : use([](int a, int b) { return o::less(a, b); });
    case less_equal:
      return real ? use([](float a, float b) { return o::less_equal(a, b); }) : use([](int a, int b) { return o::less_equal(a, b); });
    case logical_and: return use([](bool a, bool b) { return o::logical_and(a, b); });
    case logical_or: return use([](bool a, bool b) { return o::logical_or(a, b); });
    case logical_xor: return use([](bool a, bool b) { return o::logical_xor(a, b); });
    case bit_and: return use([](int a, int b) { return o::bit_and(a, b); });
    case bit_or: return use([](int a, int b) { return o::bit_or(a, b); });
    case bit_xor: return use([](int a, int b) { return o::bit_xor(a, b); });
    case shift_left: return use([](int a, int b) { return o::shift_left(a, b); });
    case shift_right: return use([](int a, int b) { return o::shift_right(a, b); });
    case sin: return use(LongOperation{[](float a) { return o::sin(a); }});
    case cos: return use(LongOperation{[](float a) { return o::cos(a); }});
    case erf: return use(LongOperation{[](float a) { return o::erf(a); }});
    // Of bits, whatever they mean.
    case where: return use([](bool condition, int a, int b) { return o::where(condition, a, b); });
  }
}

// The type that with_operation() goes by: that of the first argument.
inline ExpressionType operand_type(std::span<const ExpressionNode> nodes, const ExpressionNode& node) {
  return node.args[0] < 0 ? node.type : nodes[size_t(node.args[0])].type;
}

template <class T>
T value_as(ExpressionBits value) {
  if constexpr (std::is_same_v<T, bool>) return value.boolean();
  if constexpr (std::is_same_v<T, int>) return value.integer();
  if constexpr (std::is_same_v<T, float>) return value.real();
}

// The parameters of a function object of with_operation().
template <class F>
struct OperationOf;
template <class F, class R, class... T>
struct OperationOf<R (F::*)(T...) const> {
  static constexpr int kArguments = sizeof...(T);
  template <size_t... kPlaces>
  static ExpressionBits call(const F& f, const std::array<ExpressionBits, 3>& args, std::index_sequence<kPlaces...>) {
    return ExpressionBits::of(f(value_as<T>(args[kPlaces])...));
  }
  static ExpressionBits call(const F& f, const std::array<ExpressionBits, 3>& args) {
    return call(f, args, std::make_index_sequence<size_t(kArguments)>());
  }
};

// One operation on single values.
inline ExpressionBits apply_operation(ExpressionOp op, ExpressionType type, const std::array<ExpressionBits, 3>& args) {
  ExpressionBits result;
  with_operation(op, type, [&](const auto& f) { result = OperationOf<decltype(&std::decay_t<decltype(f)>::operator())>::call(f, args); });
  return result;
}

}  // namespace imbrex

#pragma once
// The values that a part of an expression may have: an interval for interval arithmetic. Every value is in it; not all of it need be a
// value.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "expression/value.h"

namespace imbrex {

// Of ints and bools (false 0, true 1) from `low` to `high`; of floats the same in doubles, which hold each f32, with NaN apart.
struct ValueRange {
  ExpressionType type = ExpressionType::integer;
  double low = 0, high = 0;  // low > high: no number, only NaN
  bool nan = false;

  bool empty() const { return low > high; }
  bool is(double value) const { return low == value && high == value && !nan; }
  bool contains(double value) const { return low <= value && value <= high; }

  static ValueRange of(ExpressionType type, double low, double high) { return {type, low, high, false}; }
  static ValueRange everything(ExpressionType type) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (type == ExpressionType::boolean) return of(type, 0, 1);
    if (type == ExpressionType::integer) return of(type, operations::kIntMin, operations::kIntMax);
    return {type, -kInfinity, kInfinity, true};
  }
  static ValueRange nothing(ExpressionType type) { return of(type, 1, 0); }  // to be joined with others
  static ValueRange of_value(ExpressionType type, ExpressionBits value) {
    if (type != ExpressionType::real) return of(type, value.integer(), value.integer());
    const double x = value.real();
    return x != x ? ValueRange{type, 1, 0, true} : of(type, x, x);
  }
  void join(const ValueRange& other) {
    nan = nan || other.nan;
    if (other.empty()) return;
    const bool first = empty();
    low = first ? other.low : std::min(low, other.low);
    high = first ? other.high : std::max(high, other.high);
  }
};

// What an operation makes of such values; `args` as many as it has, `same` whether its first two are one node. For all operations but
// constants, variables and tensors.
ValueRange range_of_operation(ExpressionOp op, ExpressionType type, const std::array<ValueRange, 3>& args, bool same);

}  // namespace imbrex

// Interval arithmetic on the operations of expressions. Rounding to f32 never reverses an order, so that the ends of a float interval are
// computed as the values in it are; functions that are rounded less carefully get some ulps more.
#include "expression/value_range.h"

#include <bit>
#include <cmath>

namespace imbrex {
namespace {

constexpr double kIntMin = operations::kIntMin, kIntMax = operations::kIntMax;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A function of its own: of two such conversions side by side g++ 12 makes a vector, and drops the rounding.
[[gnu::noinline]] double rounded(double x) { return double(float(x)); }

// Ints wrap: an interval that does not fit is any int.
ValueRange wrapped(double low, double high) {
  return low < kIntMin || high > kIntMax ? ValueRange::everything(ExpressionType::integer)
                                         : ValueRange::of(ExpressionType::integer, low, high);
}

// Joins what one function gives at the corners of two intervals. A NaN of floats stands for values of any size up to 0 in between: 0 times
// infinity.
template <class F>
ValueRange corners(ExpressionType type, const ValueRange& a, const ValueRange& b, F&& f) {
  ValueRange range = ValueRange::nothing(type);
  for (const double x : {a.low, a.high}) {
    for (const double y : {b.low, b.high}) {
      const double value = f(x, y);
      range.join(value != value ? ValueRange{type, 0, 0, true} : ValueRange::of(type, value, value));
    }
  }
  return range;
}

double floor_of_quotient(double a, double b) { return std::floor(a / b); }  // exact for 32 bits: see operations::floor_divide()

ValueRange integer_quotient(const ValueRange& a, const ValueRange& b) {
  ValueRange range = ValueRange::nothing(ExpressionType::integer);
  if (b.contains(0)) range.join(ValueRange::of(ExpressionType::integer, 0, 0));
  if (b.low < 0)
    range.join(
        corners(ExpressionType::integer, a, ValueRange::of(ExpressionType::integer, b.low, std::min(b.high, -1.0)), floor_of_quotient));
  if (b.high > 0)
    range.join(
        corners(ExpressionType::integer, a, ValueRange::of(ExpressionType::integer, std::max(b.low, 1.0), b.high), floor_of_quotient));
  return wrapped(range.low, range.high);
}

ValueRange integer_remainder(const ValueRange& a, const ValueRange& b) {
  ValueRange range = ValueRange::nothing(ExpressionType::integer);
  if (b.contains(0)) range.join(ValueRange::of(ExpressionType::integer, 0, 0));
  if (b.low == b.high && b.low != 0) {
    const double quotient = floor_of_quotient(a.low, b.low);
    if (quotient == floor_of_quotient(a.high, b.low))
      return ValueRange::of(ExpressionType::integer, a.low - quotient * b.low, a.high - quotient * b.low);
  }
  if (b.high > 0 && a.low >= 0)
    range.join(ValueRange::of(ExpressionType::integer, a.high < std::max(b.low, 1.0) ? a.low : 0, std::min(a.high, b.high - 1)));
  if (b.high > 0 && a.low < 0) range.join(ValueRange::of(ExpressionType::integer, 0, b.high - 1));
  if (b.low < 0) range.join(ValueRange::of(ExpressionType::integer, b.low + 1, 0));
  return range;
}

// The square of an interval, which is not the product of any two of its values.
ValueRange square(ExpressionType type, const ValueRange& a) {
  const ValueRange ends =
      corners(type, a, a, [&](double x, double y) { return type == ExpressionType::real ? double(float(x) * float(y)) : x * y; });
  const double low = a.contains(0) ? 0
                                   : std::min(type == ExpressionType::real ? double(float(a.low) * float(a.low)) : a.low * a.low,
                                              type == ExpressionType::real ? double(float(a.high) * float(a.high)) : a.high * a.high);
  return {type, low, ends.high, a.nan};
}

ValueRange add_or_multiply(ExpressionOp op, ExpressionType type, const ValueRange& a, const ValueRange& b, bool same) {
  if (type == ExpressionType::integer) {
    if (op == ExpressionOp::add) return wrapped(a.low + b.low, a.high + b.high);
    if (op == ExpressionOp::subtract) return same ? ValueRange::of(ExpressionType::integer, 0, 0) : wrapped(a.low - b.high, a.high - b.low);
    const ValueRange range =
        same ? square(ExpressionType::integer, a) : corners(ExpressionType::integer, a, b, [](double x, double y) { return x * y; });
    return wrapped(range.low, range.high);  // products beyond 2^53 are rounded, and far from fitting
  }
  if (a.empty() || b.empty()) return {ExpressionType::real, 1, 0, true};
  ValueRange range = ValueRange::nothing(ExpressionType::real);
  if (op == ExpressionOp::multiply && same) {
    range = square(ExpressionType::real, a);
  } else if (op == ExpressionOp::multiply) {
    range = corners(ExpressionType::real, a, b, [](double x, double y) { return double(float(x) * float(y)); });
  } else if (op == ExpressionOp::add) {
    range = corners(ExpressionType::real, a, b, [](double x, double y) { return double(float(x) + float(y)); });
  } else {
    range = corners(ExpressionType::real, a, b, [](double x, double y) { return double(float(x) - float(y)); });
  }
  // That of infinities of both signs is at a corner, that of 0 and infinity need not be.
  const bool infinite = std::isinf(a.low) || std::isinf(a.high) || std::isinf(b.low) || std::isinf(b.high);
  range.nan = range.nan || a.nan || b.nan || (op == ExpressionOp::multiply && infinite);
  return range;
}

ValueRange quotient(const ValueRange& a, const ValueRange& b) {
  if (a.empty() || b.empty()) return {ExpressionType::real, 1, 0, true};
  if (b.contains(0)) return ValueRange::everything(ExpressionType::real);
  ValueRange range = corners(ExpressionType::real, a, b, [](double x, double y) { return double(float(x) / float(y)); });
  range.nan = range.nan || a.nan || b.nan;  // infinity by infinity is at a corner
  return range;
}

// b < a ? b : a: with a NaN in `b` it is a, with one in `a` that NaN. `sign` -1: of the negatives, so max.
ValueRange smaller(const ValueRange& a, const ValueRange& b, double sign) {
  if (a.empty()) return a;
  if (b.empty()) return a;
  ValueRange range{a.type, 0, 0, a.nan};
  if (sign > 0) {
    range.low = std::min(a.low, b.low);
    range.high = b.nan ? a.high : std::min(a.high, b.high);
  } else {
    range.low = b.nan ? a.low : std::max(a.low, b.low);
    range.high = std::max(a.high, b.high);
  }
  return range;
}

// A function of floats that does not fall, with some ulps on each side, and NaN for arguments below `domain`.
template <class F>
ValueRange rising(const ValueRange& a, double domain, double least, double most, F&& f) {
  ValueRange range{ExpressionType::real, 1, 0, a.nan || (!a.empty() && a.low < domain)};
  if (a.empty() || a.high < domain) return range;
  const auto around = [](float x, float to) {
    for (int ulps = 0; ulps < 8; ++ulps) x = std::nextafter(x, to);
    return double(x);
  };
  range.low = std::max(least, around(f(float(std::max(a.low, domain))), -std::numeric_limits<float>::infinity()));
  range.high = std::min(most, around(f(float(a.high)), std::numeric_limits<float>::infinity()));
  return range;
}

// A sine, whose first maximum is at a part of a turn: its values at the ends, with some room, and the extremes in between.
template <class F>
ValueRange wave(const ValueRange& a, double first_maximum, F&& f) {
  constexpr double kFirstOutside = 4194304, kTurn = 6.283185307179586, kRoom = 1e-6;  // as operations::sine() has the first
  if (a.empty()) return a;
  if (a.low <= -kFirstOutside || a.high >= kFirstOutside) return {ExpressionType::real, -1, 1, true};
  const auto holds = [&](double part) {  // a place so far behind whole turns
    return std::floor((a.high + kRoom) / kTurn - part) >= std::ceil((a.low - kRoom) / kTurn - part);
  };
  const double first = f(float(a.low)), last = f(float(a.high));
  return {ExpressionType::real, holds(first_maximum + 0.5) ? -1 : std::max(-1.0, std::min(first, last) - kRoom),
          holds(first_maximum) ? 1 : std::min(1.0, std::max(first, last) + kRoom), a.nan};
}

ValueRange truth(bool may_be_false, bool may_be_true) {
  return ValueRange::of(ExpressionType::boolean, may_be_false ? 0 : 1, may_be_true ? 1 : 0);
}

ValueRange comparison(ExpressionOp op, const ValueRange& a, const ValueRange& b, bool same) {
  bool holds = false, fails = false;  // may
  if (!a.empty() && !b.empty()) {
    if (same) {
      holds = op == ExpressionOp::equal || op == ExpressionOp::less_equal;
      fails = !holds;
    } else if (op == ExpressionOp::less) {
      holds = a.low < b.high, fails = a.high >= b.low;
    } else if (op == ExpressionOp::less_equal) {
      holds = a.low <= b.high, fails = a.high > b.low;
    } else {
      const bool meet = a.low <= b.high && b.low <= a.high, one = a.low == a.high && b.low == b.high && a.low == b.low;
      holds = op == ExpressionOp::equal ? meet : !one;
      fails = op == ExpressionOp::equal ? !one : meet;
    }
  }
  if (a.nan || b.nan) (op == ExpressionOp::not_equal ? holds : fails) = true;
  return truth(fails, holds);
}

ValueRange logical(ExpressionOp op, const ValueRange& a, const ValueRange& b, bool same) {
  if (op == ExpressionOp::logical_and) return ValueRange::of(ExpressionType::boolean, std::min(a.low, b.low), std::min(a.high, b.high));
  if (op == ExpressionOp::logical_or) return ValueRange::of(ExpressionType::boolean, std::max(a.low, b.low), std::max(a.high, b.high));
  if (same) return ValueRange::of(ExpressionType::boolean, 0, 0);
  if (a.low == a.high && b.low == b.high) return ValueRange::of(ExpressionType::boolean, a.low != b.low ? 1 : 0, a.low != b.low ? 1 : 0);
  return ValueRange::everything(ExpressionType::boolean);
}

// The bits from the highest one on that the values of an interval of ints differ in.
uint32_t differing(const ValueRange& a) {
  const int width = std::bit_width(uint32_t(int(a.low)) ^ uint32_t(int(a.high)));
  return width == 32 ? ~0u : (1u << width) - 1;
}

// What the bits say that are the same in all values, and that bits of numbers of 0 or more that are added or taken away make these greater
// or less.
ValueRange bits(ExpressionOp op, const ValueRange& a, const ValueRange& b) {
  constexpr auto kInteger = ExpressionType::integer;
  const uint32_t any = differing(a) | differing(b);
  double low = kIntMin, high = kIntMax;
  if (any >> 31 == 0) {
    const ExpressionBits value = apply_operation(op, kInteger, {ExpressionBits::of(int(a.low)), ExpressionBits::of(int(b.low)), {}});
    low = int(uint32_t(value.integer()) & ~any), high = int(uint32_t(value.integer()) | any);
  }
  if (op == ExpressionOp::bit_and && (a.low >= 0 || b.low >= 0)) {
    low = std::max(low, 0.0);
    high = std::min({high, a.low < 0 ? kIntMax : a.high, b.low < 0 ? kIntMax : b.high});
  }
  if (op == ExpressionOp::bit_or && a.low >= 0 && b.low >= 0) low = std::max({low, a.low, b.low});
  return ValueRange::of(kInteger, low, high);
}

// By a distance that is known: a multiplication or floor division by a power of two.
ValueRange shift(ExpressionOp op, const ValueRange& a, const ValueRange& b) {
  if (b.low != b.high) return ValueRange::everything(ExpressionType::integer);
  const bool fits = b.low >= 0 && b.low <= 31;
  if (op == ExpressionOp::shift_right) {
    const double by = std::ldexp(1.0, fits ? int(b.low) : 31);
    return ValueRange::of(ExpressionType::integer, std::floor(a.low / by), std::floor(a.high / by));
  }
  const double by = fits ? std::ldexp(1.0, int(b.low)) : 0;
  return wrapped(a.low * by, a.high * by);
}

ValueRange magnitude(const ValueRange& a) {
  if (a.empty()) return a;
  if (a.type == ExpressionType::integer && a.low == kIntMin) return ValueRange::everything(ExpressionType::integer);
  const double low = a.contains(0) ? 0 : std::min(std::fabs(a.low), std::fabs(a.high));
  return {a.type, low, std::max(std::fabs(a.low), std::fabs(a.high)), a.nan};
}

ValueRange to_integer_range(const ValueRange& a) {
  ValueRange range = ValueRange::nothing(ExpressionType::integer);
  if (a.nan) range.join(ValueRange::of(ExpressionType::integer, 0, 0));
  if (!a.empty())
    range.join(ValueRange::of(ExpressionType::integer, std::clamp(std::trunc(a.low), kIntMin, kIntMax),
                              std::clamp(std::trunc(a.high), kIntMin, kIntMax)));
  return range;
}

}  // namespace

ValueRange range_of_operation(ExpressionOp op, ExpressionType type, const std::array<ValueRange, 3>& args, bool same) {
  const auto& [a, b, c] = args;
  using enum ExpressionOp;
  switch (op) {
    case constant:
    case variable:
    case tensor: break;
    case to_real: return ValueRange::of(ExpressionType::real, rounded(a.low), rounded(a.high));
    case to_integer: return a.type == ExpressionType::real ? to_integer_range(a) : ValueRange::of(ExpressionType::integer, a.low, a.high);
    case negate:
      if (type == ExpressionType::integer) return wrapped(-a.high, -a.low);
      return {ExpressionType::real, a.empty() ? 1 : -a.high, a.empty() ? 0 : -a.low, a.nan};
    case abs: return magnitude(a);
    case floor: return {ExpressionType::real, a.empty() ? 1 : std::floor(a.low), a.empty() ? 0 : std::floor(a.high), a.nan};
    case exp: return rising(a, -kInfinity, 0, kInfinity, [](float x) { return operations::exp(x); });
    case log: return rising(a, 0, -kInfinity, kInfinity, [](float x) { return operations::log(x); });
    case sqrt: return rising(a, 0, 0, kInfinity, [](float x) { return operations::sqrt(x); });
    case tanh: return rising(a, -kInfinity, -1, 1, [](float x) { return operations::tanh(x); });
    case sigmoid: return rising(a, -kInfinity, 0, 1, [](float x) { return operations::sigmoid(x); });
    case logical_not: return ValueRange::of(ExpressionType::boolean, 1 - a.high, 1 - a.low);
    case add:
    case subtract:
    case multiply: return add_or_multiply(op, type, a, b, same);
    case divide: return quotient(a, b);
    case floor_divide: return integer_quotient(a, b);
    case modulo: return integer_remainder(a, b);
    case min: return smaller(a, b, 1);
    case max: return smaller(a, b, -1);
    case equal:
    case not_equal:
    case less:
    case less_equal: return comparison(op, a, b, same);
    case logical_and:
    case logical_or:
    case logical_xor: return logical(op, a, b, same);
    case bit_and:
    case bit_or:
    case bit_xor: return bits(op, a, b);
    case shift_left:
    case shift_right: return shift(op, a, b);
    case sin: return wave(a, 0.25, [](float x) { return operations::sin(x); });
    case cos: return wave(a, 0, [](float x) { return operations::cos(x); });
    case erf: return rising(a, -kInfinity, -1, 1, [](float x) { return operations::erf(x); });
    case where: {
      if (a.is(1)) return b;
      if (a.is(0)) return c;
      ValueRange range = b;
      range.join(c);
      return range;
    }
  }
  return ValueRange::everything(type);
}

}  // namespace imbrex

// Texts of ExpressionFloats::approximate: what an expression is in a row of keys.
//
// A float that is a sum of a multiple of one number (the score, or the result of an operation), of a multiple of the key's number and of
// what does not depend on the key stays such a sum until an operation needs its value. Its three factors do not depend on the key: the
// compiler computes them once for all keys that it has unrolled, and of the sum two multiply-adds are left.
#include <fmt/format.h>

#include <bit>
#include <optional>

#include "expression/score_parts.h"
#include "expression/text_parts.h"

namespace imbrex {
namespace {

// A number of a row: a text, or a constant.
struct Factor {
  std::string text;
  float value = 0.f;  // where there is no text
  bool positive = false;
  bool is(float x) const { return text.empty() && value == x; }
  std::string str() const { return text.empty() ? fmt::format("{}as_float(0x{:08x}u)", kCalled, std::bit_cast<uint32_t>(value)) : text; }
};

// `number` * base + step * key + rest. `base`: a text; empty: none.
struct Sum {
  std::string base;
  Factor number, step, rest;
};

// A member of the function's ExpressionInputs.
std::string input(std::string_view name) { return fmt::format("in.{}", name); }

class RowText {
 public:
  explicit RowText(const Expression& expression)
      : nodes_(expression.nodes()),
        exact_(deciding(nodes_)),
        varies_(nodes_.size()),
        given_(nodes_.size()),
        sums_(nodes_.size()),
        written_(nodes_.size()) {
    for (size_t n = 0; n < nodes_.size(); ++n) {
      const ExpressionNode& node = nodes_[n];
      varies_[n] = node.op == ExpressionOp::variable && (ExpressionVariable(node.value) == ExpressionVariable::kv ||
                                                         ExpressionVariable(node.value) == ExpressionVariable::score);
      for (const int16_t arg : node.args)
        if (arg >= 0 && varies_[size_t(arg)]) varies_[n] = true;
    }
  }
  // The values of nodes are the bits in an array of ints.
  void give(std::span<const int> nodes, const char* array) {
    for (size_t i = 0; i < nodes.size(); ++i) given_[size_t(nodes[i])] = bits_text(nodes_[size_t(nodes[i])].type, array, i);
  }

  std::string str() {
    const size_t last = nodes_.size() - 1;
    const int root[] = {int(last)};
    take_all(root);
    value(last);
    return text_ + fmt::format("  return v{};\n", last);
  }
  // What writes the bits of the nodes' values to an array of ints.
  std::string values(std::span<const int> nodes, const char* array) {
    take_all(nodes);
    for (size_t i = 0; i < nodes.size(); ++i) {
      const std::string name = value(size_t(nodes[i]));
      const bool real = nodes_[size_t(nodes[i])].type == ExpressionType::real;
      text_ +=
          fmt::format("  {}[{}] = {};\n", array, i, real ? fmt::format("int({}as_bits({}))", kCalled, name) : fmt::format("int({})", name));
    }
    return text_;
  }
  // What an AffineScore has; nothing where the value is no such sum.
  std::string affine() {
    for (size_t n = 0; n < nodes_.size(); ++n) take(n);
    const Sum& last = sums_.back();
    if (written_.back() || last.base != input("score") || !last.number.positive) return {};
    return text_ + fmt::format("  return {{{}, {}, {}}};\n", last.number.str(), last.step.str(), last.rest.str());
  }

 private:
  static std::string bits_text(ExpressionType type, const char* array, size_t i) {
    const std::string bits = fmt::format("{}[{}]", array, i);
    if (type == ExpressionType::real) return fmt::format("{}as_float(unsigned({}))", kCalled, bits);
    return type == ExpressionType::boolean ? fmt::format("({} != 0)", bits) : bits;
  }
  // All that the roots need.
  void take_all(std::span<const int> roots) {
    std::vector<bool> needed(nodes_.size());
    for (const int root : roots) needed[size_t(root)] = true;
    for (size_t n = nodes_.size(); n-- > 0;)
      for (const int16_t arg : nodes_[n].args)
        if (needed[n] && given_[n].empty() && arg >= 0) needed[size_t(arg)] = true;
    for (size_t n = 0; n < nodes_.size(); ++n)
      if (needed[n]) take(n);
  }
  void take(size_t n) {
    const ExpressionNode& node = nodes_[n];
    if (!given_[n].empty()) return write(n, given_[n]);
    if (node.type != ExpressionType::real || exact_[n]) return write(n, value_text_of(n));
    sums_[n] = sum_of(n);
  }

  void put(std::string_view type, const std::string& name, const std::string& value) {
    text_ += fmt::format("  [[maybe_unused]] const {} {} = {};\n", type, name, value);
  }
  void write(size_t n, const std::string& value) {
    put(to_string(nodes_[n].type), fmt::format("v{}", n), value);
    written_[n] = true;
    if (nodes_[n].type == ExpressionType::real) sums_[n] = alone(n);
  }
  // With the values of its arguments.
  std::string value_text_of(size_t n) {
    for (const int16_t arg : nodes_[n].args)
      if (arg >= 0) value(size_t(arg));
    return value_text(nodes_, n, exact_[n]);
  }
  Sum alone(size_t n) const {
    const ExpressionNode& node = nodes_[n];
    if (node.op == ExpressionOp::constant) return {"", {}, {}, {"", std::bit_cast<float>(node.value)}};
    if (!varies_[n]) return {"", {}, {}, {fmt::format("v{}", n)}};
    return {fmt::format("v{}", n), {"", 1.f}, {}, {}};
  }

  // The name of a float's or another's value, which is written now if it has not been.
  std::string value(size_t n) {
    if (!written_[n]) {
      const std::string text = text_of(sums_[n]);
      put("float", fmt::format("v{}", n), text);
      written_[n] = true;
    }
    return fmt::format("v{}", n);
  }
  static std::string text_of(const Sum& s) {
    std::string text;
    if (!s.rest.is(0.f)) text = s.rest.str();
    const auto plus = [&](const Factor& factor, const std::string& times) {
      if (factor.is(0.f)) return;
      if (text.empty()) {
        text = factor.is(1.f) ? times : fmt::format("{} * {}", times, factor.str());
      } else {
        text =
            factor.is(1.f) ? fmt::format("({} + {})", times, text) : fmt::format("{}fused({}, {}, {})", kCalled, times, factor.str(), text);
      }
    };
    plus(s.step, input("key"));
    if (!s.base.empty()) plus(s.number, s.base);
    return text.empty() ? "0.f" : text;
  }

  // Row numbers of row numbers: constants stay constants.
  Factor named(std::string text) {
    put("float", fmt::format("r{}", rows_), text);
    return {fmt::format("r{}", rows_++)};
  }
  Factor times(const Factor& a, const Factor& b) {
    if (a.is(0.f) || b.is(0.f)) return {};
    if (a.is(1.f)) return b;
    if (b.is(1.f)) return a;
    if (a.text.empty() && b.text.empty()) return {"", a.value * b.value};
    const auto is_positive = [](const Factor& f) { return f.positive || (f.text.empty() && f.value > 0.f); };
    Factor product = named(fmt::format("{} * {}", a.str(), b.str()));
    product.positive = is_positive(a) && is_positive(b);
    return product;
  }
  Factor plus(const Factor& a, const Factor& b) {
    if (a.is(0.f)) return b;
    if (b.is(0.f)) return a;
    if (a.text.empty() && b.text.empty()) return {"", a.value + b.value};
    return named(fmt::format("{} + {}", a.str(), b.str()));
  }
  Sum scaled(const Sum& s, const Factor& by) { return {s.base, times(s.number, by), times(s.step, by), times(s.rest, by)}; }

  static bool is_of_row(const Sum& s) { return s.base.empty() && s.step.is(0.f); }

  Sum added(const Sum& a, const Sum& b) {
    if (!a.base.empty() && !b.base.empty() && a.base != b.base) {
      // The second becomes a number of its own, with what both have besides.
      const Sum rest{b.base, b.number, plus(a.step, b.step), plus(a.rest, b.rest)};
      put("float", fmt::format("s{}", sums_written_), text_of({a.base, a.number, {}, {fmt::format("({})", text_of(rest))}}));
      return {fmt::format("s{}", sums_written_++), {"", 1.f}, {}, {}};
    }
    return {a.base.empty() ? b.base : a.base, plus(a.number, b.number), plus(a.step, b.step), plus(a.rest, b.rest)};
  }

  // Of the node's function of one number that is first multiplied by a unit.
  Sum of_units(size_t n, const char* function, const char* unit) {
    const Sum& argument = sums_[size_t(nodes_[n].args[0])];
    const Factor factor{fmt::format("{}{}", kCalled, unit)};
    const std::string text = text_of(scaled(argument, factor));
    write(n, fmt::format("{}{}({})", kCalled, function, text));
    return sums_[n];
  }

  Sum sum_of(size_t n) {
    using enum ExpressionOp;
    const ExpressionNode& node = nodes_[n];
    const auto arg = [&](int i) -> const Sum& { return sums_[size_t(node.args[size_t(i)])]; };
    constexpr Factor (*number)(float) = [](float x) { return Factor{"", x}; };
    switch (node.op) {
      case variable:
        if (ExpressionVariable(node.value) != ExpressionVariable::score) break;
        return {input("score"), {input("scale"), 0.f, true}, {}, {}};
      case to_real: {
        constexpr int kMostNested = 5;  // so that no sum of the parts leaves the ints
        const auto sum = affine_in_key(size_t(node.args[0]), kMostNested);
        if (!sum || sum->sign == 0) break;
        return {"", {}, number(float(sum->sign)), named(fmt::format("float({})", sum->of_first))};
      }
      case add: return added(arg(0), arg(1));
      case subtract: return added(arg(0), scaled(arg(1), number(-1.f)));
      case negate: return scaled(arg(0), number(-1.f));
      case multiply:
        if (is_of_row(arg(1))) return scaled(arg(0), arg(1).rest);
        if (is_of_row(arg(0))) return scaled(arg(1), arg(0).rest);
        break;
      case divide:
        if (!is_of_row(arg(1))) {
          write(n, fmt::format("{}short_quotient({}, {})", kCalled, value(size_t(node.args[0])), value(size_t(node.args[1]))));
          return sums_[n];
        }
        return scaled(arg(0), arg(1).rest.text.empty() ? number(1.f / arg(1).rest.value)
                                                       : named(fmt::format("{}short_quotient(1.f, {})", kCalled, arg(1).rest.text)));
      case exp: return of_units(n, "exp_of_units", "kExpUnit");
      case sigmoid: return of_units(n, "sigmoid_of_units", "kSigmoidUnit");
      case tanh: return of_units(n, "tanh_of_units", "kTanhUnit");
      case log: write(n, fmt::format("{}short_log({})", kCalled, value(size_t(node.args[0])))); return sums_[n];
      default: break;
    }
    write(n, value_text_of(n));
    return sums_[n];
  }

  // An int that is `sign` (1, -1 or 0) times the key's number, plus what it is for the row's first key.
  struct KeySum {
    std::string of_first;
    int sign = 0;
  };
  // Nothing of an int that may be as large as ints are: the parts of others are positions, lengths and small constants.
  std::optional<KeySum> affine_in_key(size_t n, int nested) const {
    using enum ExpressionOp;
    constexpr int kMost = 1 << 24;
    if (nested == 0) return {};
    const ExpressionNode& node = nodes_[n];
    const auto arg = [&](int i) { return affine_in_key(size_t(node.args[size_t(i)]), nested - 1); };
    switch (node.op) {
      case variable:
        if (ExpressionVariable(node.value) == ExpressionVariable::kv) return KeySum{input("first_kv"), 1};
        return KeySum{input(to_string(ExpressionVariable(node.value)))};
      case constant:
        if (node.value < -kMost || node.value > kMost) return {};
        return KeySum{fmt::format("{}", node.value)};
      case negate: {
        const auto a = arg(0);
        if (!a) return {};
        return KeySum{fmt::format("-({})", a->of_first), -a->sign};
      }
      case add:
      case subtract: {
        const auto a = arg(0), b = arg(1);
        if (!a || !b || (a->sign != 0 && b->sign != 0)) return {};
        return KeySum{fmt::format("({} {} ({}))", a->of_first, node.op == add ? "+" : "-", b->of_first),
                      a->sign + (node.op == add ? b->sign : -b->sign)};
      }
      default: return {};
    }
  }

  const std::span<const ExpressionNode> nodes_;
  const std::vector<bool> exact_;
  std::vector<bool> varies_;
  std::vector<std::string> given_;  // texts of values that are not computed; empty: of others
  std::vector<Sum> sums_;           // of floats that decide nothing
  std::vector<bool> written_;       // their values, and all others
  std::string text_;
  int rows_ = 0, sums_written_ = 0;
};

}  // namespace

std::string score_parts_text(const Expression& expression, const ScoreParts& parts, std::string_view name, bool loads_stay) {
  constexpr std::string_view kInputs = "[[maybe_unused]] const imbrex::ExpressionInputs& in", kElement = "::element", kHere = "_here";
  std::string columns = RowText(expression).values(parts.columns, "columns");
  for (size_t at = 0; loads_stay && (at = columns.find(kElement, at)) != std::string::npos;)
    columns.insert(at += kElement.size(), kHere), at += kHere.size();
  RowText whole(expression);
  whole.give(parts.columns, "columns"), whole.give(parts.rows, "rows");
  return fmt::format("inline void {}_columns({}, [[maybe_unused]] int* columns) {{\n{}}}\n", name, kInputs, columns) +
         fmt::format("inline void {}_rows({}, [[maybe_unused]] int* rows) {{\n{}}}\n", name, kInputs,
                     RowText(expression).values(parts.rows, "rows")) +
         fmt::format("inline float {}_of_parts({}, [[maybe_unused]] const int* columns, [[maybe_unused]] const int* rows) {{\n{}}}\n", name,
                     kInputs, whole.str());
}

std::string row_text(const Expression& expression) { return RowText(expression).str(); }

std::string affine_text(const Expression& expression, std::string_view name) {
  const std::string body = expression.type() == ExpressionType::real ? RowText(expression).affine() : "";
  if (body.empty()) return {};
  return fmt::format("inline imbrex::operations::AffineScore {}([[maybe_unused]] const imbrex::ExpressionInputs& in) {{\n{}}}\n", name,
                     body);
}

}  // namespace imbrex

// Text to expressions: a scanner, and a parser that climbs precedences. Recursion is bounded by Expression::kMaxNesting.
#include <charconv>
#include <optional>

#include "core/check.h"
#include "expression/builder.h"

namespace imbrex {
namespace {

enum class TokenKind { end, name, number, symbol };
struct Token {
  TokenKind kind = TokenKind::end;
  std::string_view text;
  size_t at = 0;  // characters before it
};

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool begins_name(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

// How strongly an operator of two values binds. Comparisons bind more strongly than & ^ |, as in no C.
struct Infix {
  std::string_view symbol;
  int strength;
  ExpressionOp op;
  bool swapped = false;  // b op a
};
constexpr Infix kInfixes[] = {
    {"|", 1, ExpressionOp::logical_or},    {"^", 2, ExpressionOp::logical_xor},  {"&", 3, ExpressionOp::logical_and},
    {"==", 4, ExpressionOp::equal},        {"!=", 4, ExpressionOp::not_equal},   {"<", 4, ExpressionOp::less},
    {"<=", 4, ExpressionOp::less_equal},   {">", 4, ExpressionOp::less, true},   {">=", 4, ExpressionOp::less_equal, true},
    {"<<", 5, ExpressionOp::shift_left},   {">>", 5, ExpressionOp::shift_right}, {"+", 6, ExpressionOp::add},
    {"-", 6, ExpressionOp::subtract},      {"*", 7, ExpressionOp::multiply},     {"/", 7, ExpressionOp::divide},
    {"//", 7, ExpressionOp::floor_divide}, {"%", 7, ExpressionOp::modulo},
};
constexpr int kComparison = 4;

class Parser {
 public:
  using Id = ExpressionBuilder::Id;

  Parser(std::string_view text, std::span<const ExpressionTensor> tensors) : text_(text), tensors_(tensors.begin(), tensors.end()) {
    check(text.size() <= size_t(Expression::kMaxTextBytes), "expression.size", "the text of an expression has at most {} bytes, got {}",
          Expression::kMaxTextBytes, text.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      check(is_identifier(tensors[i].name) && !is_expression_word(tensors[i].name), "expression.name",
            "the name of a tensor is up to 64 letters, digits and _, and no word of the language; got \"{}\"", tensors[i].name);
      for (size_t j = 0; j < i; ++j)
        check(tensors[j].name != tensors[i].name, "expression.name", "two tensors are named {}", tensors[i].name);
    }
    next();
  }

  Expression parse() {
    while (true) {
      // A name with = behind it is for the rest of the text.
      const Token first = token_;
      if (const auto type = declared_type()) {
        declare(*type);
        continue;
      }
      if (first.kind == TokenKind::name && peek_is_assignment()) {
        next();
        next();
        check(!is_expression_word(first.text) && !find_tensor(first.text) && !find_bound(first.text) && is_identifier(first.text),
              "expression.name", "{}a new name of up to 64 letters, digits and _ is expected before =, got \"{}\"", place(first),
              first.text);
        bound_.emplace_back(first.text, parse_infix(0));
        take(";");
        continue;
      }
      const Id root = parse_infix(0);
      if (token_.kind != TokenKind::end) unexpected("the end of the text or an operator");
      builder_.set_place({});
      return builder_.expression(root);
    }
  }

 private:
  // Bounds recursion: one level of parentheses, of a call, of an index or of a sign.
  class Nested {
   public:
    explicit Nested(Parser& parser) : parser_(parser) {
      ++parser.nesting_;
      check(parser.nesting_ <= Expression::kMaxNesting, "expression.depth", "{}at most {} parentheses, calls and signs in each other",
            parser.place(parser.token_), Expression::kMaxNesting);
    }
    ~Nested() { --parser_.nesting_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;

   private:
    Parser& parser_;
  };

  static std::string place(const Token& token) { return fmt::format("at character {}: ", token.at + 1); }

  [[noreturn]] void unexpected(std::string_view expected) const {
    fail("expression.syntax", "{}expected {}, got {}", place(token_), expected,
         token_.kind == TokenKind::end ? "the end of the text" : fmt::format("\"{}\"", token_.text));
  }

  void next() {
    while (position_ < text_.size() && is_space(text_[position_])) ++position_;
    const size_t begin = position_;
    if (begin == text_.size()) {
      token_ = {TokenKind::end, {}, begin};
      return;
    }
    const char c = text_[begin];
    TokenKind kind = TokenKind::symbol;
    if (begins_name(c)) {
      kind = TokenKind::name;
      while (position_ < text_.size() && (begins_name(text_[position_]) || is_digit(text_[position_]))) ++position_;
    } else if (is_digit(c) || (c == '.' && begin + 1 < text_.size() && is_digit(text_[begin + 1]))) {
      kind = TokenKind::number;
      scan_number();
    } else {
      const std::string_view rest = text_.substr(begin);
      bool two = false;
      for (const std::string_view symbol : {"==", "!=", "<=", ">=", "//", "<<", ">>"}) two = two || rest.starts_with(symbol);
      if (!two && std::string_view("|^&<>+-*/%!()[],;=").find(c) == std::string_view::npos) {
        const bool printable = c > ' ' && c <= '~';
        fail("expression.syntax", "{}no character of the language: {}", place({kind, {}, begin}),
             printable ? fmt::format("\"{}\"", c) : fmt::format("byte {}", int(uint8_t(c))));
      }
      position_ += two ? 2 : 1;
    }
    token_ = {kind, text_.substr(begin, position_ - begin), begin};
  }

  void scan_number() {
    const auto digits = [&] {
      while (position_ < text_.size() && is_digit(text_[position_])) ++position_;
    };
    digits();
    if (position_ < text_.size() && text_[position_] == '.') ++position_, digits();
    if (position_ < text_.size() && (text_[position_] == 'e' || text_[position_] == 'E')) {
      size_t at = position_ + 1;
      if (at < text_.size() && (text_[at] == '+' || text_[at] == '-')) ++at;
      if (at < text_.size() && is_digit(text_[at])) position_ = at, digits();
    }
    if (position_ < text_.size() && begins_name(text_[position_]))
      fail("expression.syntax", "{}expected an operator behind a number, got \"{}\"", place({TokenKind::symbol, {}, position_}),
           text_[position_]);
  }

  bool is(std::string_view symbol) const { return token_.kind == TokenKind::symbol && token_.text == symbol; }
  bool accept(std::string_view symbol) {
    if (!is(symbol)) return false;
    next();
    return true;
  }
  void take(std::string_view symbol) {
    if (!accept(symbol)) unexpected(fmt::format("\"{}\"", symbol));
  }
  bool peek_is_assignment() const {
    size_t at = position_;
    while (at < text_.size() && is_space(text_[at])) ++at;
    return at < text_.size() && text_[at] == '=' && !(at + 1 < text_.size() && text_[at + 1] == '=');
  }

  const ExpressionTensor* find_tensor(std::string_view name) const {
    for (const ExpressionTensor& tensor : tensors_)
      if (tensor.name == name) return &tensor;
    return nullptr;
  }
  std::optional<Id> find_bound(std::string_view name) const {
    for (const auto& [bound, id] : bound_)
      if (bound == name) return id;
    return std::nullopt;
  }

  // At a type with a name behind it, which no expression has.
  std::optional<ExpressionType> declared_type() const {
    if (token_.kind != TokenKind::name) return std::nullopt;
    size_t at = position_;
    while (at < text_.size() && is_space(text_[at])) ++at;
    if (at == text_.size() || !begins_name(text_[at])) return std::nullopt;
    for (const ExpressionType type : {ExpressionType::boolean, ExpressionType::integer, ExpressionType::real})
      if (token_.text == to_string(type)) return type;
    return std::nullopt;
  }

  // "int doc[,];": a tensor with as many indices as there are commas and one more.
  void declare(ExpressionType type) {
    next();
    const Token name = token_;
    next();
    check(!is_expression_word(name.text) && !find_tensor(name.text) && !find_bound(name.text) && is_identifier(name.text),
          "expression.name", "{}a new name of up to 64 letters, digits and _ is expected for a tensor, got \"{}\"", place(name), name.text);
    take("[");
    int rank = 1;
    while (accept(",")) ++rank;
    check(rank <= 3, "expression.arguments", "{}a tensor has 1 to 3 indices, got {}", place(name), rank);
    take("]");
    take(";");
    tensors_.push_back({std::string(name.text), type, rank});
  }

  Id apply(const Token& at, ExpressionOp op, std::span<const Id> args) {
    builder_.set_place(place(at));
    return builder_.operation(op, args);
  }

  Id parse_infix(int least) {
    Id left = parse_prefix();
    bool compared = false;  // `left` is a comparison that is not in parentheses
    while (token_.kind == TokenKind::symbol) {
      const Infix* infix = nullptr;
      for (const Infix& known : kInfixes)
        if (token_.text == known.symbol) infix = &known;
      if (infix == nullptr || infix->strength < least) break;
      const Token at = token_;
      if (infix->strength == kComparison && compared)
        fail("expression.chain", "{}a comparison of a comparison is expected to be two, as in a < b & b < c; got a second \"{}\"",
             place(at), at.text);
      next();
      const Id right = parse_infix(infix->strength + 1);
      compared = infix->strength == kComparison;
      left = apply(at, infix->op, infix->swapped ? std::array{right, left} : std::array{left, right});
    }
    return left;
  }

  Id parse_prefix() {
    const Token at = token_;
    if (accept("-")) {
      if (token_.kind == TokenKind::number) return parse_number(true);
      const Nested nested(*this);
      return apply(at, ExpressionOp::negate, std::array{parse_prefix()});
    }
    if (accept("!")) {
      const Nested nested(*this);
      return apply(at, ExpressionOp::logical_not, std::array{parse_prefix()});
    }
    return parse_value();
  }

  Id parse_number(bool negative) {
    const Token at = token_;
    next();
    builder_.set_place(place(at));
    const char *begin = at.text.data(), *end = begin + at.text.size();
    if (at.text.find_first_of(".eE") == std::string_view::npos) {
      int64_t value = 0;
      const auto [rest, error] = std::from_chars(begin, end, value);
      if (negative) value = -value;
      check(error == std::errc() && value >= INT32_MIN && value <= INT32_MAX, "expression.number", "{}an int has 32 bits, got {}{}",
            place(at), negative ? "-" : "", at.text);
      return builder_.constant(int(value));
    }
    float value = 0;
    const auto [rest, error] = std::from_chars(begin, end, value);
    check(error == std::errc() && rest == end, "expression.number", "{}a float that f32 can hold is expected, got {}", place(at), at.text);
    return builder_.constant(negative ? -value : value);
  }

  Id parse_value() {
    if (token_.kind == TokenKind::number) return parse_number(false);
    if (is("(")) {
      const Nested nested(*this);
      next();
      const Id inside = parse_infix(0);
      take(")");
      return inside;
    }
    if (token_.kind != TokenKind::name) unexpected("a value");
    const Token name = token_;
    next();
    builder_.set_place(place(name));
    if (name.text == "true" || name.text == "false") return builder_.constant(name.text == "true");
    if (name.text == "inf") return builder_.constant(std::numeric_limits<float>::infinity());
    if (name.text == "nan") return builder_.constant(std::numeric_limits<float>::quiet_NaN());
    for (int i = 0; i < kExpressionVariables; ++i)
      if (name.text == to_string(ExpressionVariable(i))) return builder_.variable(ExpressionVariable(i));
    for (const ExpressionFunction& function : expression_functions())
      if (name.text == function.name) return parse_call(name, function);
    if (const auto bound = find_bound(name.text)) return *bound;
    const ExpressionTensor* tensor = find_tensor(name.text);
    if (tensor == nullptr) {
      std::string known;
      for (int i = 0; i < kExpressionVariables; ++i) known += std::string(i > 0 ? ", " : "") + to_string(ExpressionVariable(i));
      for (const ExpressionTensor& t : tensors_) known += ", " + t.name;
      fail("expression.name", "{}expected a function or one of {}; got \"{}\"", place(name), known, name.text);
    }
    check(is("["), "expression.arguments", "{}tensor {} has {} indices in brackets, got none", place(name), name.text, tensor->rank);
    const std::vector<Id> indices = parse_list("]");
    builder_.set_place(place(name));
    return builder_.element(*tensor, indices);
  }

  // At an opening bracket: what is in it.
  std::vector<Id> parse_list(std::string_view closing) {
    const Nested nested(*this);
    next();
    std::vector<Id> ids;
    if (accept(closing)) return ids;
    do {
      ids.push_back(parse_infix(0));
      check(ids.size() <= 3, "expression.arguments", "{}at most 3 indices or arguments, got more", place(token_));
    } while (accept(","));
    take(closing);
    return ids;
  }

  Id parse_call(const Token& name, const ExpressionFunction& function) {
    check(is("("), "expression.syntax", "{}expected \"(\" behind {}", place(name), function.name);
    const std::vector<Id> args = parse_list(")");
    check(int(args.size()) == function.arguments, "expression.arguments", "{}{}() takes {} arguments, got {}", place(name), function.name,
          function.arguments, args.size());
    return apply(name, function.op, args);
  }

  std::string_view text_;
  std::vector<ExpressionTensor> tensors_;
  size_t position_ = 0;  // behind token_
  Token token_;
  int nesting_ = 0;
  ExpressionBuilder builder_;
  std::vector<std::pair<std::string_view, Id>> bound_;
};

}  // namespace

Expression parse_expression(std::string_view text, std::span<const ExpressionTensor> tensors) { return Parser(text, tensors).parse(); }

}  // namespace imbrex

#pragma once
// Small expressions over a score and its place: what happens to a logit, and which keys a query sees, as the user defines it. An Expression
// is a value; it is built with C++ operators (namespace terms below) or parsed from text, and bound to tensors to be computed
// (bound_expression.h). The grammar, and what each operation does at its edges: docs/expressions.md.
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "imbrex/tensor.h"

namespace imbrex {

enum class ExpressionType : uint8_t { boolean, integer, real };  // true or false; 32 bits that wrap; f32
const char* to_string(ExpressionType);                           // "bool", "int", "float"

// What an expression is about. Positions are those of a request's keys: the query token at index i has q = kv_len - q_len + i, or the
// position that the batch gives it; a key has its index.
enum class ExpressionVariable : uint8_t {
  score,   // float: the logit, scaled and soft-capped
  batch,   // number of the request in the batch
  head,    // query head
  q,       // position of the query
  kv,      // position of the key
  q_len,   // query tokens of the request
  kv_len,  // its keys
};
constexpr int kExpressionVariables = 7;
const char* to_string(ExpressionVariable);

// Numbers are stable, since hashes depend on them: a new operation goes to the end.
enum class ExpressionOp : uint8_t {
  constant,
  variable,
  tensor,  // element of a user tensor, 0 outside of it
  to_real,
  to_integer,  // towards zero; what does not fit becomes the nearest int, NaN 0
  negate,
  abs,
  floor,
  exp,
  log,
  sqrt,
  tanh,
  sigmoid,
  logical_not,
  add,
  subtract,
  multiply,
  divide,
  floor_divide,  // towards minus infinity; by 0: 0
  modulo,        // a - b * (a // b), so of the sign of b; by 0: 0
  min,           // b < a ? b : a
  max,           // a < b ? b : a
  equal,
  not_equal,
  less,
  less_equal,
  logical_and,
  logical_or,
  logical_xor,
  where,
  bit_and,  // of the 32 bits of two ints
  bit_or,
  bit_xor,
  shift_left,   // of the bits; 0 where the distance is not 0 to 31
  shift_right,  // the same as // of a power of two; by less than 0 or more than 31 as by 31
  sin,          // NaN from 2^22 on: numbers there are too far apart to be angles
  cos,
  erf,
};

// A tensor that an expression reads elements of, and does not hold.
struct ExpressionTensor {
  std::string name;  // a letter or _, then letters, digits and _; not a word of the language; at most 64 characters
  ExpressionType type = ExpressionType::integer;  // bool: u8, where 0 is false; int: i32; float: f32
  int rank = 1;                                   // 1 to 3
  friend bool operator==(const ExpressionTensor&, const ExpressionTensor&) = default;
};

// One that is given to an expression: i32, f32 or u8, as the ExpressionTensor of this name says.
struct NamedTensor {
  std::string name;
  TensorView tensor;
};

// One operation. Its arguments come before it in the list.
struct ExpressionNode {
  ExpressionOp op = ExpressionOp::constant;
  ExpressionType type = ExpressionType::integer;  // of its value
  std::array<int16_t, 3> args{-1, -1, -1};        // numbers of nodes; -1: none
  int32_t value = 0;                              // of a constant its bits (bool: 0 or 1); of a variable or a tensor its number
  friend bool operator==(const ExpressionNode&, const ExpressionNode&) = default;
};

// An immutable expression: a list of operations in which each value is computed once and constants are folded. Copies share it. Two
// expressions are equal if their lists are, so `q - kv < 4` is not equal to `kv > q - 4`.
class Expression {
 public:
  static constexpr int kMaxNodes = 256;        // operations, with variables and constants
  static constexpr int kMaxTextBytes = 65536;  // of a text that is parsed
  static constexpr int kMaxNesting = 64;       // parentheses, calls and signs in a text, in each other

  Expression() = default;  // empty: no expression at all
  bool empty() const { return !program_; }
  ExpressionType type() const;                        // of the value; Error expression.empty where there is none
  std::span<const ExpressionNode> nodes() const;      // arguments first, from left to right; the last is the value
  std::span<const ExpressionTensor> tensors() const;  // in the order in which they are first read
  bool uses(ExpressionVariable) const;
  uint64_t hash() const;     // of the list and the tensors; the same in every process and release
  std::string str() const;   // text that parse_expression() makes this expression of, given tensors()
  std::string text() const;  // the same with tensors declared in it: "int doc[,]; doc[batch, q] == doc[batch, kv]"
  friend bool operator==(const Expression&, const Expression&);

 private:
  friend class ExpressionBuilder;
  struct Program {
    std::vector<ExpressionNode> nodes;
    std::vector<ExpressionTensor> tensors;
    uint64_t hash = 0;
  };
  std::shared_ptr<const Program> program_;
};

// "kv <= q & q - kv < 4". The text may name tensors that are declared here, or in front of it: "int doc[]; doc[q] == doc[kv]". Errors
// expression.*, with the position in the text.
Expression parse_expression(std::string_view text, std::span<const ExpressionTensor> tensors = {});

// Expressions from C++ operators:
//   using namespace imbrex::terms;
//   const Expression window = (kv <= q) & (q - kv < 4);
//   const Expression alibi = score + tensor("slope", ExpressionType::real, 1)(head) * (kv - q);
// Errors expression.type, expression.arguments, expression.size, expression.name.
namespace terms {

struct Variable {
  ExpressionVariable which;
};
inline constexpr Variable score{ExpressionVariable::score}, batch{ExpressionVariable::batch}, head{ExpressionVariable::head},
    q{ExpressionVariable::q}, kv{ExpressionVariable::kv}, q_len{ExpressionVariable::q_len}, kv_len{ExpressionVariable::kv_len};

// An expression under construction. Its operators make terms, == too; those of Expression compare.
class Term {
 public:
  Term(Variable);
  Term(bool);
  Term(int);
  Term(float);
  Term(double);  // rounded to f32
  Term(const void*) = delete;
  Term(Expression e) : expression_(std::move(e)) {}
  operator const Expression&() const { return expression_; }

 private:
  Expression expression_;
};

class TensorTerm {
 public:
  explicit TensorTerm(ExpressionTensor tensor) : tensor_(std::move(tensor)) {}
  Term operator()(const Term& i) const { return element({&i, 1}); }
  Term operator()(const Term& i, const Term& j) const { return element(std::array{i, j}); }
  Term operator()(const Term& i, const Term& j, const Term& k) const { return element(std::array{i, j, k}); }

 private:
  Term element(std::span<const Term> indices) const;
  ExpressionTensor tensor_;
};
inline TensorTerm tensor(std::string name, ExpressionType type, int rank) { return TensorTerm({std::move(name), type, rank}); }

Term operator+(const Term&, const Term&);
Term operator-(const Term&, const Term&);
Term operator*(const Term&, const Term&);
Term operator/(const Term&, const Term&);  // of floats, as in the text: floor_div() is //
Term operator%(const Term&, const Term&);
Term operator==(const Term&, const Term&);
Term operator!=(const Term&, const Term&);
Term operator<(const Term&, const Term&);
Term operator<=(const Term&, const Term&);
Term operator>(const Term&, const Term&);
Term operator>=(const Term&, const Term&);
Term operator&(const Term&, const Term&);  // of two bools, or of the bits of two ints; so | and ^
Term operator|(const Term&, const Term&);
Term operator^(const Term&, const Term&);
Term operator<<(const Term&, const Term&);
Term operator>>(const Term&, const Term&);
Term operator!(const Term&);
Term operator-(const Term&);
Term floor_div(const Term&, const Term&);
Term where(const Term& condition, const Term& a, const Term& b);
Term min(const Term&, const Term&);
Term max(const Term&, const Term&);
Term abs(const Term&);
Term floor(const Term&);
Term exp(const Term&);
Term log(const Term&);
Term sqrt(const Term&);
Term tanh(const Term&);
Term sigmoid(const Term&);
Term sin(const Term&);
Term cos(const Term&);
Term erf(const Term&);
Term to_float(const Term&);
Term to_int(const Term&);

}  // namespace terms

// The expression as text for CUDA, and for C++: a function `name` of an ExpressionInputs, which needs the headers
// src/expression/operations.h and short_operations.h before it. Each operation is a call of a function of these headers; of the user's
// texts only letters of `name` get into it, which Error expression.name refuses where it is no identifier.
//
// `approximate`: floats are computed so that a row of keys takes few instructions. They are a few ulps off, and exp, log, tanh and sigmoid
// as short_operations.h says. Those that decide something, operands of comparisons and what becomes an int, are `exact` at any rate.
enum class ExpressionFloats : uint8_t { exact, approximate };
std::string cuda_text(const Expression&, std::string_view name, ExpressionFloats = ExpressionFloats::exact);

}  // namespace imbrex

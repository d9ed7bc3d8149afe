#pragma once
// Makes the lists of expressions: types, promotion of ints to floats, constants folded, each value once. The parser and the operators of
// terms use it.
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/expression.h"

namespace imbrex {

// A function of the language: floor(x), where(c, a, b), ...
struct ExpressionFunction {
  std::string_view name;
  ExpressionOp op;
  int arguments;
};
std::span<const ExpressionFunction> expression_functions();
// Whether a tensor or a name in a text may not be called so: variables, functions, true, false, inf, nan.
bool is_expression_word(std::string_view name);
bool is_identifier(std::string_view name);  // a letter or _, then letters, digits and _; at most 64
// Whether operations take ints, bools and so on, as words for messages: "&", "min()".
std::string operation_name(ExpressionOp op);

class ExpressionBuilder {
 public:
  using Id = int;  // number of a node

  // `where` begins messages: "at 12: ".
  void set_place(std::string place) { place_ = std::move(place); }
  const std::string& place() const { return place_; }

  Id constant(bool);
  Id constant(int);
  Id constant(float);
  Id variable(ExpressionVariable);
  Id element(const ExpressionTensor&, std::span<const Id> indices);
  // With promotion. Error expression.type, expression.size.
  Id operation(ExpressionOp, std::span<const Id> args);
  // The comparisons that are no nodes of their own: a > b is b < a.
  Id greater(Id a, Id b) { return operation(ExpressionOp::less, std::array{b, a}); }
  Id greater_equal(Id a, Id b) { return operation(ExpressionOp::less_equal, std::array{b, a}); }

  ExpressionType type(Id id) const { return nodes_[size_t(id)].type; }
  const ExpressionNode& node(Id id) const { return nodes_[size_t(id)]; }
  Id import(const Expression&);          // all of another expression; Error expression.empty
  Expression expression(Id root) const;  // what the root needs, in the one order of equal expressions; Error expression.size

 private:
  Id add(ExpressionNode);
  Id converted(Id, ExpressionType to, ExpressionOp for_what);
  Id simplified(ExpressionOp, std::span<const Id> args) const;
  int tensor_number(const ExpressionTensor&);
  [[noreturn]] void refuse(Id, ExpressionOp, std::string_view expected) const;

  std::string place_;
  std::vector<ExpressionNode> nodes_;
  std::vector<ExpressionTensor> tensors_;
};

}  // namespace imbrex

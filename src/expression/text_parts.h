#pragma once
// What both forms of an expression's text for kernels need: that of cuda_text.cpp, a line for each operation, and that of row_text.cpp.
#include <string>
#include <vector>

#include "imbrex/expression.h"

namespace imbrex {

constexpr std::string_view kCalled = "imbrex::operations::";

// Which floats decide something: a comparison's operands, what becomes an int, and what these are made of. Sums and products of others may
// be contracted by the compiler.
std::vector<bool> deciding(std::span<const ExpressionNode>);
std::string constant_text(const ExpressionNode&);
// The value of node n, as a call with the values v0, v1 .. of its arguments.
std::string value_text(std::span<const ExpressionNode>, size_t n, bool exact);
// The body of a function of an ExpressionInputs `in` that returns a float, in which numbers that are affine in the key and the score are
// kept as what they are made of, so that what all keys of a row share is computed once a row.
std::string row_text(const Expression&);
// A function `name` that returns an operations::AffineScore of an ExpressionInputs without a key; empty where the expression is no such
// sum.
std::string affine_text(const Expression&, std::string_view name);

}  // namespace imbrex

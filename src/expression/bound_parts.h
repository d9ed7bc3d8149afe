#pragma once
// What a BoundExpression is made of: its tensors, and the order in which rows are computed.
#include <vector>

#include "expression/operations.h"
#include "expression/tensor_extremes.h"
#include "expression/value.h"
#include "expression/value_range.h"
#include "imbrex/bound_expression.h"

namespace imbrex {

// One operation on a few keys of a row, whose values are in lanes of 32 bits.
struct RowStep {
  int node;
  int out;                            // number of a buffer of lanes
  std::array<int, 3> in{-1, -1, -1};  // of those of its arguments
  int along = -1;                     // of an element: the index that is kv, where the others are the same for all keys
};

struct BoundExpression::Parts {
  Expression expression;
  ExpressionRanges ranges;
  std::vector<ExpressionTensorData> tensors;
  std::vector<TensorExtremes> extremes;
  std::vector<bool> checked;  // of each node: an element of a tensor whose index may be out of range

  // Of rows: nodes that are the same for all keys, computed once; those of them that others need, spread over a buffer of lanes; and the
  // rest, step by step.
  std::vector<int> fixed_nodes;
  std::vector<RowStep> spread, steps;
  int num_buffers = 0;
  int result_buffer = -1;  // -1: the result is one of fixed_nodes

  void plan_rows();
  bool holds(const ExpressionVariables& at, int kv_begin, int kv_end) const;  // whether a row is within the ranges
  ExpressionBits value_of(int node, const ExpressionVariables&, const ExpressionBits* values) const;
  void run_row(const ExpressionVariables&, int kv_begin, int kv_end, const float* scores, float* to_scores, uint8_t* to_bytes) const;
  // Not by_elements: tensors may have any elements, since these may change.
  std::vector<ValueRange> ranges_of_nodes(const ExpressionRanges&, bool by_elements) const;
};

// A variable by its number.
inline ExpressionBits variable_value(const ExpressionVariables& at, int32_t number) {
  switch (ExpressionVariable(number)) {
    case ExpressionVariable::score: return ExpressionBits::of(at.score);
    case ExpressionVariable::batch: return ExpressionBits::of(int32_t(at.batch));
    case ExpressionVariable::head: return ExpressionBits::of(int32_t(at.head));
    case ExpressionVariable::q: return ExpressionBits::of(int32_t(at.q));
    case ExpressionVariable::kv: return ExpressionBits::of(int32_t(at.kv));
    case ExpressionVariable::q_len: return ExpressionBits::of(int32_t(at.q_len));
    case ExpressionVariable::kv_len: return ExpressionBits::of(int32_t(at.kv_len));
  }
  return {};
}

// Whether an element lies in its tensor; indices that the tensor does not have are 0.
inline bool is_within(const ExpressionTensorData& tensor, int i, int j, int k) {
  return unsigned(i) < unsigned(tensor.sizes[0]) && unsigned(j) < unsigned(tensor.sizes[1]) && unsigned(k) < unsigned(tensor.sizes[2]);
}
inline ExpressionBits element_at(const ExpressionTensorData& tensor, ExpressionType type, int i, int j, int k) {
  const long offset = i * tensor.strides[0] + j * tensor.strides[1] + k * tensor.strides[2];
  if (type == ExpressionType::boolean) return ExpressionBits::of(static_cast<const uint8_t*>(tensor.data)[offset] != 0);
  return {static_cast<const int32_t*>(tensor.data)[offset]};
}

}  // namespace imbrex

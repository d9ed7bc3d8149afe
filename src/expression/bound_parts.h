#pragma once
// What a BoundExpression is made of: its tensors, and the order in which rows are computed.
#include <span>
#include <vector>

#include "expression/operations.h"
#include "expression/tensor_extremes.h"
#include "expression/value.h"
#include "expression/value_range.h"
#include "imbrex/bound_expression.h"

namespace imbrex {

constexpr int kRowChunk = 128;  // keys of a row that are computed together: the lanes of a usual expression stay in L1
constexpr int kRowGroup = 16;   // keys whose scores are neighbours in memory

// Where lanes of 32 bits are in the memory of a row: the first group of keys, and by how many lanes the next group is further on. 0: all
// keys have the same value, in the lanes of one group.
struct RowLanes {
  int begin = 0, step = kRowGroup;
};

// A step of a row. The value of the step before is in registers, and most steps compute with it there.
struct RowStep {
  enum Kind : uint8_t {
    positions,    // the numbers of the keys
    scores,       // the scores that are given
    load,         // in[0]
    one,          // an operation on the value before
    with_second,  // on the value before, and in[1]
    with_first,   // on in[0], and the value before
    on_lanes,     // on in[0], in[1] and in[2]
    in_loop,      // likewise, an operation of many instructions, whose result is in lanes
    element       // of a tensor, likewise, but for those along the keys
  };
  Kind kind;
  int node;
  ExpressionOp op = {};
  ExpressionType type = {};  // by which with_operation() goes
  std::array<RowLanes, 3> in{};
  int along = -1;  // of an element: the index that is kv, where the others are the same for all keys
  int store = -1;  // where its lanes begin, if the value is in lanes; -1: only the next step needs it, in registers
};

struct RowPlan {
  // Nodes that are the same for all keys, computed once a row; and those of them that are written to lanes.
  struct Spread {
    int node, begin, count;
  };
  std::vector<int> fixed_nodes;
  std::vector<Spread> spread;
  std::vector<RowStep> steps;  // the rest; none: the result is the same for all keys
  int edge = -1;               // lanes for elements along the keys that cannot be read where they are; -1: there are no such elements
  int num_lanes = 0;           // of a row's memory
};
RowPlan plan_rows(std::span<const ExpressionNode>);

// The keys of a row: scores in groups that are `pitch` floats apart, times `scale`; null: they are the one of the place. Results go to
// scores in the same groups, or to bytes.
struct RowKeys {
  int begin, end;
  const float* scores;
  float* to_scores;
  uint8_t* to_bytes;
  long pitch = kRowGroup;
  float scale = 1.f;
};

struct BoundExpression::Parts {
  Expression expression;
  std::span<const ExpressionNode> nodes;  // of the expression
  ExpressionType type = {};               // of its value
  ExpressionRanges ranges;
  std::vector<ExpressionTensorData> tensors;
  std::vector<TensorExtremes> extremes;
  std::vector<bool> checked;  // of each node: an element of a tensor whose index may be out of range

  RowPlan rows;

  bool holds(const ExpressionVariables& at, int kv_begin, int kv_end) const;  // whether a row is within the ranges
  ExpressionBits value_of(int node, const ExpressionVariables&, const ExpressionBits* values) const;
  void run_row(const ExpressionVariables&, const RowKeys&) const;
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

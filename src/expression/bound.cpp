// Binding of expressions to tensors, single values, and what interval arithmetic knows of them. Rows are in rows.cpp.
#include <algorithm>

#include "core/check.h"
#include "expression/bound_parts.h"

namespace imbrex {
namespace {

DType dtype_of(ExpressionType type) {
  return type == ExpressionType::boolean ? DType::u8 : type == ExpressionType::integer ? DType::i32 : DType::f32;
}

ExpressionTensorData bound_tensor(const ExpressionTensor& wanted, std::span<const NamedTensor> given) {
  const auto found = std::find_if(given.begin(), given.end(), [&](const NamedTensor& t) { return t.name == wanted.name; });
  check(found != given.end(), "expression.tensor", "tensor {} is wanted, and is not given", wanted.name);
  const TensorView& view = found->tensor;
  check(view.dtype == dtype_of(wanted.type) && view.rank == wanted.rank && view.device == Device{}, "expression.tensor",
        "tensor {}: wanted {} with {} dimensions on the cpu, got {}", wanted.name, to_string(dtype_of(wanted.type)), wanted.rank,
        view.str());
  ExpressionTensorData data{view.data, {1, 1, 1}, {0, 0, 0}};
  bool any = true;
  for (int d = 0; d < view.rank; ++d) {
    check(view.size(d) >= 0 && view.size(d) <= INT32_MAX, "expression.tensor", "tensor {}: sizes of 0 to 2^31 - 1 are wanted, got {}",
          wanted.name, view.str());
    data.sizes[d] = int(view.size(d));
    data.strides[d] = long(view.stride(d));
    any = any && view.size(d) > 0;
  }
  check(view.data != nullptr || !any, "expression.tensor", "tensor {} has no data", wanted.name);
  check(view.is_addressable(), "expression.tensor", "tensor {}: elements that 63 bits can address are wanted, got {}", wanted.name,
        view.str());
  return data;
}

}  // namespace

float ExpressionValue::real() const { return std::bit_cast<float>(bits); }

const char* to_string(Visibility shown) {
  return shown == Visibility::never ? "never" : shown == Visibility::always ? "always" : "sometimes";
}

BoundExpression::BoundExpression(Expression expression, std::span<const NamedTensor> tensors, const ExpressionRanges& ranges) {
  check(!expression.empty(), "expression.empty", "an expression is needed, got an empty one");
  auto parts = std::make_shared<Parts>();
  parts->expression = std::move(expression);
  parts->nodes = parts->expression.nodes(), parts->type = parts->expression.type();
  parts->ranges = ranges;
  const bool is_mask = parts->expression.type() == ExpressionType::boolean;
  for (const ExpressionTensor& tensor : parts->expression.tensors()) {
    parts->tensors.push_back(bound_tensor(tensor, tensors));
    parts->extremes.emplace_back(parts->tensors.back(), tensor.type, is_mask);
  }
  const std::span<const ExpressionNode> nodes = parts->nodes;
  const std::vector<ValueRange> values = parts->ranges_of_nodes(ranges, false);
  parts->checked.assign(nodes.size(), false);
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (nodes[n].op != ExpressionOp::tensor) continue;
    const ExpressionTensorData& data = parts->tensors[size_t(nodes[n].value)];
    for (size_t i = 0; i < 3 && nodes[n].args[i] >= 0; ++i) {
      const ValueRange& index = values[size_t(nodes[n].args[i])];
      if (index.low < 0 || index.high >= data.sizes[i]) parts->checked[n] = true;
    }
  }
  parts->rows = plan_rows(nodes);
  parts_ = std::move(parts);
}

const Expression& BoundExpression::expression() const { return parts_->expression; }

bool BoundExpression::is_checked(int node) const { return parts_->checked[size_t(node)]; }

ExpressionBits BoundExpression::Parts::value_of(int n, const ExpressionVariables& at, const ExpressionBits* values) const {
  const ExpressionNode& node = expression.nodes()[size_t(n)];
  if (node.op == ExpressionOp::constant) return {node.value};
  if (node.op == ExpressionOp::variable) return variable_value(at, node.value);
  std::array<ExpressionBits, 3> args;
  for (size_t i = 0; i < 3; ++i)
    if (node.args[i] >= 0) args[i] = values[node.args[i]];
  if (node.op != ExpressionOp::tensor) return apply_operation(node.op, operand_type(expression.nodes(), node), args);
  const ExpressionTensorData& data = tensors[size_t(node.value)];
  const int i = args[0].integer(), j = args[1].integer(), k = args[2].integer();
  return is_within(data, i, j, k) ? element_at(data, node.type, i, j, k) : ExpressionBits();
}

ExpressionValue BoundExpression::evaluate(const ExpressionVariables& at) const {
  std::array<ExpressionBits, Expression::kMaxNodes> values;
  const int count = int(parts_->expression.nodes().size());
  for (int n = 0; n < count; ++n) values[size_t(n)] = parts_->value_of(n, at, values.data());
  return {parts_->expression.type(), values[size_t(count - 1)].bits};
}

std::vector<ValueRange> BoundExpression::Parts::ranges_of_nodes(const ExpressionRanges& at, bool by_elements) const {
  const IntRange of_variables[] = {{}, at.batch, at.head, at.q, at.kv, at.q_len, at.kv_len};
  const std::span<const ExpressionNode> nodes = expression.nodes();
  std::vector<ValueRange> values;
  values.reserve(nodes.size());
  for (const ExpressionNode& node : nodes) {
    std::array<ValueRange, 3> args;
    for (size_t i = 0; i < 3; ++i)
      if (node.args[i] >= 0) args[i] = values[size_t(node.args[i])];
    if (node.op == ExpressionOp::constant) {
      values.push_back(ValueRange::of_value(node.type, {node.value}));
    } else if (node.op == ExpressionOp::variable) {
      const IntRange& range = of_variables[node.value];
      values.push_back(node.type == ExpressionType::real ? ValueRange::everything(ExpressionType::real)
                                                         : ValueRange::of(node.type, range.first, range.last));
    } else if (node.op == ExpressionOp::tensor && !by_elements) {
      values.push_back(ValueRange::everything(node.type));
    } else if (node.op == ExpressionOp::tensor) {
      int64_t first[3] = {}, last[3] = {};
      for (size_t i = 0; i < 3; ++i) first[i] = int64_t(args[i].low), last[i] = int64_t(args[i].high);
      values.push_back(extremes[size_t(node.value)].over(first, last));
    } else {
      values.push_back(range_of_operation(node.op, node.type, args, node.args[0] == node.args[1]));
    }
  }
  return values;
}

Visibility BoundExpression::shown(const ExpressionRanges& ranges) const {
  check(parts_->expression.type() == ExpressionType::boolean, "expression.type", "a mask is a bool expression, got {}",
        to_string(parts_->expression.type()));
  const ValueRange value = parts_->ranges_of_nodes(ranges, true).back();
  return value.low > 0 ? Visibility::always : value.high < 1 ? Visibility::never : Visibility::sometimes;
}

}  // namespace imbrex

// The steps in which rows of keys are computed: bound_parts.h says what they are.
#include "expression/bound_parts.h"

namespace imbrex {
namespace {

bool is_variable(const ExpressionNode& node, ExpressionVariable variable) {
  return node.op == ExpressionOp::variable && node.value == int(variable);
}

bool is_long(const ExpressionNode& node, ExpressionType type) {
  bool result = false;
  with_operation(node.op, type, [&](const auto& f) { result = is_long_operation<std::decay_t<decltype(f)>>; });
  return result;
}

class RowPlanner {
 public:
  explicit RowPlanner(std::span<const ExpressionNode> nodes)
      : nodes_(nodes),
        varies_(nodes.size()),
        is_in_lanes_(nodes.size()),
        last_use_(nodes.size(), -1),
        lanes_(nodes.size(), -1),
        group_(nodes.size(), -1) {
    for (int n = 0; n < int(nodes.size()); ++n) {
      const ExpressionNode& node = nodes[size_t(n)];
      bool varies = is_variable(node, ExpressionVariable::kv) || is_variable(node, ExpressionVariable::score);
      for (const int16_t arg : node.args) {
        if (arg < 0) continue;
        varies = varies || varies_[size_t(arg)];
        last_use_[size_t(arg)] = n;
      }
      varies_[size_t(n)] = varies;
    }
  }

  RowPlan plan() && {
    find_values_in_lanes();
    int before = -1;
    for (int n = 0; n < int(nodes_.size()); ++n) {
      if (!varies_[size_t(n)]) {
        plan_.fixed_nodes.push_back(n);
        continue;
      }
      add_steps(n, before);
      before = n;
    }
    return std::move(plan_);
  }

 private:
  struct Form {
    RowStep::Kind kind;
    int in_registers = -1;  // number of the argument that is
  };

  // `before`: the node whose value is in registers. Where none of its arguments is, the one in registers has to be loaded first.
  Form form_of(int n, int before) const {
    const ExpressionNode& node = nodes_[size_t(n)];
    if (node.op == ExpressionOp::variable) return {node.value == int(ExpressionVariable::kv) ? RowStep::positions : RowStep::scores};
    if (node.op == ExpressionOp::tensor) return {RowStep::element};
    if (is_long(node, operand_type(nodes_, node))) return {RowStep::in_loop};
    if (node.args[2] >= 0) return {RowStep::on_lanes};
    if (node.args[1] < 0) return {RowStep::one, 0};
    const bool first = node.args[0] == before || (node.args[1] != before && varies_[size_t(node.args[0])]);
    return first ? Form{RowStep::with_second, 0} : Form{RowStep::with_first, 1};
  }

  void find_values_in_lanes() {
    int before = -1;
    for (int n = 0; n < int(nodes_.size()); ++n) {
      if (!varies_[size_t(n)]) continue;
      const ExpressionNode& node = nodes_[size_t(n)];
      const Form form = form_of(n, before);
      const bool is_element = form.kind == RowStep::element, along = is_element && along_keys(node) >= 0;
      if (form.kind == RowStep::in_loop || (is_element && !along)) is_in_lanes_[size_t(n)] = true;
      for (int i = 0; i < 3; ++i) {
        const int arg = node.args[size_t(i)];
        if (arg >= 0 && !along && (arg != before || i != form.in_registers)) is_in_lanes_[size_t(arg)] = true;
      }
      before = n;
    }
  }

  int take(int count) {
    const int begin = plan_.num_lanes;
    plan_.num_lanes += count;
    return begin;
  }

  // Where an argument is; `whole`: in lanes of its own for every key.
  RowLanes lanes_of(int arg, bool whole) {
    if (varies_[size_t(arg)]) return {lanes_[size_t(arg)]};
    int& begin = whole ? lanes_[size_t(arg)] : group_[size_t(arg)];
    if (begin < 0) {
      const int count = whole ? kRowChunk : kRowGroup;
      begin = take(count);
      plan_.spread.push_back({arg, begin, count});
    }
    return {begin, whole ? kRowGroup : 0};
  }

  void add_steps(int n, int before) {
    const ExpressionNode& node = nodes_[size_t(n)];
    const Form form = form_of(n, before);
    RowStep step{.kind = form.kind, .node = n, .op = node.op, .type = operand_type(nodes_, node)};
    if (form.kind == RowStep::element && (step.along = along_keys(node)) >= 0 && plan_.edge < 0) plan_.edge = take(kRowChunk);
    for (int i = 0; i < 3; ++i) {
      const int arg = node.args[size_t(i)];
      if (arg < 0 || step.along >= 0) continue;
      if (i != form.in_registers) {
        step.in[size_t(i)] = lanes_of(arg, form.kind == RowStep::in_loop || form.kind == RowStep::element);
      } else if (arg != before) {
        plan_.steps.push_back({.kind = RowStep::load, .node = arg, .in = {lanes_of(arg, false)}});
      }
    }
    // Lanes are used again once nothing needs their values, though not by the operation that reads them last.
    if (is_in_lanes_[size_t(n)]) {
      if (free_.empty()) free_.push_back(take(kRowChunk));
      step.store = lanes_[size_t(n)] = free_.back();
      free_.pop_back();
    }
    for (const int16_t arg : node.args) {
      if (arg < 0 || !varies_[size_t(arg)] || last_use_[size_t(arg)] != n) continue;
      last_use_[size_t(arg)] = -1;  // once, where it is two of the arguments
      if (lanes_[size_t(arg)] >= 0) free_.push_back(lanes_[size_t(arg)]);
    }
    plan_.steps.push_back(step);
  }

  // The index of an element that is kv, where the others are the same for all keys; -1: there is none.
  int along_keys(const ExpressionNode& node) const {
    int along = -1;
    for (int i = 0; i < 3; ++i) {
      const int arg = node.args[size_t(i)];
      if (arg < 0 || !varies_[size_t(arg)]) continue;
      if (along >= 0 || !is_variable(nodes_[size_t(arg)], ExpressionVariable::kv)) return -1;
      along = i;
    }
    return along;
  }

  std::span<const ExpressionNode> nodes_;
  std::vector<bool> varies_, is_in_lanes_;
  std::vector<int> last_use_, lanes_, group_, free_;
  RowPlan plan_;
};

}  // namespace

RowPlan plan_rows(std::span<const ExpressionNode> nodes) { return RowPlanner(nodes).plan(); }

}  // namespace imbrex

// See score_parts.h.
#include "expression/score_parts.h"

#include <algorithm>

namespace imbrex {
namespace {

// Operations: what an element of a tensor, a quotient or a function counts as, and how many are worth a part.
constexpr int kLong = 4, kLeast = 4;

int weight_of(ExpressionOp op) {
  using enum ExpressionOp;
  switch (op) {
    case constant:
    case variable: return 0;
    case tensor:
    case exp:
    case log:
    case sqrt:
    case tanh:
    case sigmoid:
    case sin:
    case cos:
    case erf:
    case divide:
    case floor_divide:
    case modulo: return kLong;
    default: return 1;
  }
}

// What a value depends on.
struct Needs {
  bool score = false, key = false, query = false, head = false;
  bool is_column() const { return key && !score && !query; }
  bool is_row() const { return !key && !score; }
};

std::vector<Needs> needs_of(std::span<const ExpressionNode> nodes) {
  std::vector<Needs> all(nodes.size());
  for (size_t n = 0; n < nodes.size(); ++n) {
    const ExpressionNode& node = nodes[n];
    Needs& needs = all[n];
    const auto is = [&](ExpressionVariable v) { return node.op == ExpressionOp::variable && node.value == int32_t(v); };
    needs = {is(ExpressionVariable::score), is(ExpressionVariable::kv), is(ExpressionVariable::q), is(ExpressionVariable::head)};
    for (const int16_t arg : node.args) {
      if (arg < 0) continue;
      const Needs& of_arg = all[size_t(arg)];
      needs.score |= of_arg.score, needs.key |= of_arg.key, needs.query |= of_arg.query, needs.head |= of_arg.head;
    }
  }
  return all;
}

bool is_one_of(const std::vector<int>& columns, size_t n) { return std::ranges::find(columns, int(n)) != columns.end(); }

// The values that the root takes where those of columns are given.
std::vector<bool> computed_beside(std::span<const ExpressionNode> nodes, const std::vector<int>& columns) {
  std::vector<bool> computed(nodes.size());
  computed.back() = true;
  for (size_t n = nodes.size(); n-- > 0;)
    for (const int16_t arg : nodes[n].args)
      if (arg >= 0 && computed[n] && !is_one_of(columns, n)) computed[size_t(arg)] = true;
  return computed;
}

}  // namespace

ScoreParts score_parts(const Expression& expression) {
  const std::span<const ExpressionNode> nodes = expression.nodes();
  const std::vector<Needs> needs = needs_of(nodes);
  const auto same_kind = [&](size_t a, size_t b) {
    return needs[a].is_column() == needs[b].is_column() && needs[a].is_row() == needs[b].is_row();
  };
  // Of each value, the operations of its own kind that it takes; what is used twice counts twice.
  std::vector<int> weights(nodes.size());
  for (size_t n = 0; n < nodes.size(); ++n) {
    weights[n] = weight_of(nodes[n].op);
    for (const int16_t arg : nodes[n].args)
      if (arg >= 0 && same_kind(size_t(arg), n)) weights[n] = std::min(weights[n] + weights[size_t(arg)], kLeast);
  }
  // Values of a kind that no other value of the kind hides: the root, and what those of other kinds use that are computed for each score.
  const auto pick = [&](const std::vector<int>& columns, auto is_kind, size_t most) {
    const std::vector<bool> computed = computed_beside(nodes, columns);
    std::vector<bool> used(nodes.size());
    used.back() = true;
    for (size_t n = 0; n < nodes.size(); ++n)
      for (const int16_t arg : nodes[n].args)
        if (arg >= 0 && computed[n] && !is_one_of(columns, n) && !same_kind(size_t(arg), n)) used[size_t(arg)] = true;
    std::vector<int> found;
    for (size_t n = 0; n < nodes.size() && found.size() < most; ++n)
      if (used[n] && is_kind(needs[n]) && weights[n] >= kLeast) found.push_back(int(n));
    return found;
  };
  ScoreParts parts;
  parts.columns = pick(
      {}, [](const Needs& of) { return of.is_column(); }, kMostScoreColumns);
  std::stable_partition(parts.columns.begin(), parts.columns.end(), [&](int n) { return !needs[size_t(n)].head; });
  parts.head_columns = int(std::ranges::count_if(parts.columns, [&](int n) { return needs[size_t(n)].head; }));
  parts.rows = pick(
      parts.columns, [](const Needs& of) { return of.is_row(); }, kMostScoreRows);
  return parts;
}

bool loads_for_each_key(const Expression& expression, const ScoreParts& parts) {
  const std::span<const ExpressionNode> nodes = expression.nodes();
  const std::vector<Needs> needs = needs_of(nodes);
  const std::vector<bool> computed = computed_beside(nodes, parts.columns);
  for (size_t n = 0; n < nodes.size(); ++n)
    if (computed[n] && !is_one_of(parts.columns, n) && nodes[n].op == ExpressionOp::tensor && (needs[n].key || needs[n].score)) return true;
  return false;
}

}  // namespace imbrex

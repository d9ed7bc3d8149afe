// See known_mask.h.
#include "attention/known_mask.h"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <span>

namespace imbrex {
namespace {

// Sums with constants up to here wrap around for no position below 2^30.
constexpr int64_t kMostConstant = 1 << 30;

// q * the query's position + kv * the key's + constant.
struct PositionSum {
  int64_t q = 0, kv = 0, constant = 0;
  PositionSum times(int64_t factor) const { return {q * factor, kv * factor, constant * factor}; }
  PositionSum plus(const PositionSum& other) const { return {q + other.q, kv + other.kv, constant + other.constant}; }
};

class MaskReader {
 public:
  MaskReader(std::span<const ExpressionNode> nodes, Mask& mask) : nodes_(nodes), mask_(mask) {}

  // Adds what node `n` says to the mask; false where the mask has no words for it.
  bool add(int n) {
    const ExpressionNode& node = nodes_[size_t(n)];
    switch (node.op) {
      case ExpressionOp::constant: return node.value != 0;
      case ExpressionOp::logical_and: return add(node.args[0]) && add(node.args[1]);
      case ExpressionOp::less: return add_difference(node, 1);
      case ExpressionOp::less_equal: return add_difference(node, 0);
      default: return false;
    }
  }

 private:
  std::optional<PositionSum> sum(int n) const {
    const ExpressionNode& node = nodes_[size_t(n)];
    if (node.type != ExpressionType::integer) return {};
    std::optional<PositionSum> found;
    switch (node.op) {
      case ExpressionOp::constant: found = PositionSum{.constant = node.value}; break;
      case ExpressionOp::variable:
        if (node.value == int(ExpressionVariable::q)) found = PositionSum{.q = 1};
        if (node.value == int(ExpressionVariable::kv)) found = PositionSum{.kv = 1};
        break;
      case ExpressionOp::negate:
        if (const std::optional<PositionSum> a = sum(node.args[0])) found = a->times(-1);
        break;
      case ExpressionOp::add:
      case ExpressionOp::subtract:
        if (const std::optional<PositionSum> a = sum(node.args[0]), b = a ? sum(node.args[1]) : a; b)
          found = a->plus(b->times(node.op == ExpressionOp::add ? 1 : -1));
        break;
      default: break;
    }
    // Between two positions at most, each once: larger multiples could wrap around.
    if (found && (std::abs(found->q) > 1 || std::abs(found->kv) > 1 || std::abs(found->constant) > kMostConstant)) return {};
    return found;
  }

  // A comparison of two ints: args[0] + less <= args[1].
  bool add_difference(const ExpressionNode& node, int64_t less) {
    const int a = node.args[0], b = node.args[1];
    const std::optional<PositionSum> most = sum(b);
    if (nodes_[size_t(a)].op == ExpressionOp::abs && most && most->q == 0 && most->kv == 0) {
      const std::optional<PositionSum> inside = sum(nodes_[size_t(a)].args[0]);
      const PositionSum limit{.constant = less - most->constant};
      return inside && add_limit(inside->plus(limit)) && add_limit(inside->times(-1).plus(limit));
    }
    const std::optional<PositionSum> least = sum(a);
    return least && most && add_limit(least->plus(most->times(-1)).plus({.constant = less}));
  }

  // s <= 0.
  bool add_limit(const PositionSum& s) {
    const int64_t distance = -s.constant;
    if (s.q + s.kv != 0 || std::abs(s.q) != 1 || distance < 0 || distance > kMostConstant) return false;
    int& window = s.q > 0 ? mask_.window_left : mask_.window_right;  // q - kv <= distance, or kv - q
    if (s.q < 0 && distance == 0) {
      mask_.causal = true;
    } else {
      window = window < 0 ? int(distance) : std::min(window, int(distance));
    }
    return true;
  }

  std::span<const ExpressionNode> nodes_;
  Mask& mask_;
};

}  // namespace

AttentionSpec with_known_mask(const AttentionSpec& spec) {
  if (spec.mask_mod.empty()) return spec;
  AttentionSpec known = spec;
  const std::span<const ExpressionNode> nodes = spec.mask_mod.nodes();
  if (!MaskReader(nodes, known.mask).add(int(nodes.size()) - 1)) return spec;
  known.mask_mod = {};
  if (known.mask.causal) known.mask.window_right = -1;
  return known;
}

}  // namespace imbrex

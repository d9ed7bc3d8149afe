#pragma once
// Tensors for random expressions, and the values of variables.
#include <random>
#include <vector>

#include "expression/random_expression.h"
#include "imbrex/bound_expression.h"

namespace imbrex::test {

// The tensors that RandomExpressions reads: doc i32[4, 24], slope f32[5] with gaps, seen u8[3, 9, 4] with its dimensions reversed.
struct ExpressionProblem {
  explicit ExpressionProblem(unsigned seed) : random(seed) {
    for (int& x : doc) x = below(2) == 0 ? below(5) : below(2) == 0 ? below(1000) - 500 : INT32_MIN + below(2);
    for (float& x : slope) x = float(below(2000) - 1000) / 64.f;
    slope[2] = std::numeric_limits<float>::infinity(), slope[4] = std::numeric_limits<float>::quiet_NaN();
    for (uint8_t& x : seen) x = uint8_t(below(3));
    TensorView strided = TensorView::contiguous(slope.data(), DType::f32, {5});
    strided.strides[0] = 2;
    TensorView reversed = TensorView::contiguous(seen.data(), DType::u8, {3, 9, 4});
    reversed.strides = {1, 3, 27};
    tensors = {
        {"seen", reversed}, {"unused", strided}, {"slope", strided}, {"doc", TensorView::contiguous(doc.data(), DType::i32, {4, 24})}};
  }
  ExpressionProblem(const ExpressionProblem&) = delete;

  int below(int n) { return int(random() % unsigned(n)); }
  ExpressionVariables variables() {
    return {.score = float(below(4001) - 2000) / 16.f,
            .batch = below(4),
            .head = below(6),
            .q = below(24),
            .kv = below(24),
            .q_len = 1 + below(24),
            .kv_len = 24};
  }
  // A random expression of at most kMaxNodes operations.
  Expression expression(RandomExpressions& of, ExpressionType type, int depth) {
    while (true) {
      try {
        return of.of(type, depth);
      } catch (const std::exception&) {
      }
    }
  }

  std::mt19937 random;
  std::vector<int> doc = std::vector<int>(4 * 24);
  std::vector<float> slope = std::vector<float>(9);
  std::vector<uint8_t> seen = std::vector<uint8_t>(3 * 9 * 4);
  std::vector<NamedTensor> tensors;
};

}  // namespace imbrex::test

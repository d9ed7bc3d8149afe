#pragma once
// Expressions whose generated texts are compiled into the tests, by write_texts.cpp, and for GPUs.
#include "expression/problem.h"

namespace imbrex::test {

// Such as users write: a difference in the last bits of a number is one in the last bits of the value.
inline std::vector<Expression> usual_expressions() {
  const std::vector<ExpressionTensor> tensors = RandomExpressions::tensors();
  std::vector<Expression> all;
  for (const char* text :
       {"score + slope[head] * (kv - q)", "30 * tanh(score / 30)", "kv <= q & q - kv < 4", "doc[batch, q] == doc[batch, kv] & kv <= q",
        "q // 8 == kv // 8 | !(kv % 3 != 0)", "where(seen[head, q, kv], score, -inf)", "int(score * 1e9) + -2147483648",
        "exp(-abs(score)) + log(score) + sqrt(score) + sigmoid(score) + floor(score)", "min(max(score, -1), 1)", "score * score + 1 < 5",
        "q_len * kv_len // (kv - 5) % 7", "where(kv == 0, score, score - 0.01 * abs(q - kv))",
        "score * 0.5 - (q_len - kv + 3) * slope[head]", "2 * score + tanh(score) / (1 + abs(score)) - (score - 7)",
        "score + 0.1 * doc[batch, kv] + 0.25 * (kv - q) * slope[1]", "score + sin(0.1 * (q - kv)) - cos(score) * erf(score)",
        "(q & 7) << 1 == (kv >> 1 | kv & 5 ^ 3)"})
    all.push_back(parse_expression(text, tensors));
  return all;
}

// These first, then random ones.
inline std::vector<Expression> expressions_of_texts() {
  std::vector<Expression> all = usual_expressions();
  ExpressionProblem problem(31);
  RandomExpressions random(37);
  for (int i = 0; i < 120; ++i) all.push_back(problem.expression(random, ExpressionType(i % 3), 1 + i % 5));
  return all;
}

}  // namespace imbrex::test

#pragma once
// Random expressions of every operation, for the property tests of expressions.
#include <random>

#include "imbrex/expression.h"

namespace imbrex::test {

class RandomExpressions {
 public:
  explicit RandomExpressions(unsigned seed, bool with_score = true) : random_(seed), with_score_(with_score) {}

  static std::vector<ExpressionTensor> tensors() {
    return {{"doc", ExpressionType::integer, 2}, {"slope", ExpressionType::real, 1}, {"seen", ExpressionType::boolean, 3}};
  }

  int below(int n) { return int(random_() % unsigned(n)); }
  Expression of(ExpressionType type, int depth) { return term(type, depth); }
  Expression any(int depth) { return of(ExpressionType(below(3)), depth); }

 private:
  using Term = terms::Term;

  Term variable() {
    const terms::Variable all[] = {terms::q, terms::kv, terms::q, terms::kv, terms::batch, terms::head, terms::q_len, terms::kv_len};
    return all[below(8)];
  }
  Term number() {
    constexpr int kInts[] = {0, 1, 2, 3, 4, 7, 16, -1, -3, INT32_MAX, INT32_MIN};
    return below(3) == 0 ? kInts[below(11)] : below(9);
  }
  Term real_number() {
    constexpr float kReals[] = {0.f, 1.f, 0.5f, -2.f, 30.f, 1e-3f, -0.f, 1e30f};
    return below(12) == 0 ? Term(std::numeric_limits<float>::infinity()) : Term(kReals[below(8)]);
  }

  Term term(ExpressionType type, int depth) {
    if (type == ExpressionType::boolean) return boolean(depth);
    return type == ExpressionType::integer ? integer(depth) : real(depth);
  }
  Term boolean(int depth) {
    if (depth <= 0) return below(8) == 0 ? Term(below(2) == 0) : variable() < number();
    const int d = depth - 1;
    switch (below(12)) {
      case 0: return boolean(d) & boolean(d);
      case 1: return boolean(d) | boolean(d);
      case 2: return boolean(d) ^ boolean(d);
      case 3: return !boolean(d);
      case 4: return integer(d) == integer(d);
      case 5: return integer(d) != integer(d);
      case 6: return integer(d) <= integer(d);
      case 7: return integer(d) > integer(d);
      case 8: return real(d) < real(d);
      case 9: return real(d) == real(d);
      case 10: return terms::where(boolean(d), boolean(d), boolean(d));
      default: return terms::tensor("seen", ExpressionType::boolean, 3)(integer(d), terms::q, integer(d));
    }
  }
  Term integer(int depth) {
    if (depth <= 0) return below(3) == 0 ? number() : variable();
    const int d = depth - 1;
    switch (below(18)) {
      case 0: return integer(d) + integer(d);
      case 1: return integer(d) - integer(d);
      case 2: return integer(d) * integer(d);
      case 3: return terms::floor_div(integer(d), below(2) == 0 ? number() : integer(d));
      case 4: return integer(d) % (below(2) == 0 ? number() : integer(d));
      case 5: return terms::min(integer(d), integer(d));
      case 6: return terms::max(integer(d), integer(d));
      case 7: return terms::abs(integer(d));
      case 8: return -integer(d);
      case 9: return terms::to_int(real(d));
      case 10: return terms::to_int(boolean(d));
      case 11: return terms::where(boolean(d), integer(d), integer(d));
      case 12: return integer(d) & integer(d);
      case 13: return integer(d) | integer(d);
      case 14: return integer(d) ^ integer(d);
      case 15: return integer(d) << (below(2) == 0 ? Term(below(9)) : integer(d));
      case 16: return integer(d) >> (below(2) == 0 ? Term(below(9)) : integer(d));
      default: return terms::tensor("doc", ExpressionType::integer, 2)(terms::batch, integer(d));
    }
  }
  Term real(int depth) {
    if (depth <= 0) return with_score_ && below(2) == 0 ? Term(terms::score) : below(2) == 0 ? terms::to_float(variable()) : real_number();
    const int d = depth - 1;
    switch (below(21)) {
      case 0: return real(d) + real(d);
      case 1: return real(d) - real(d);
      case 2: return real(d) * real(d);
      case 3: return real(d) / real(d);
      case 4: return terms::min(real(d), real(d));
      case 5: return terms::max(real(d), real(d));
      case 6: return terms::abs(real(d));
      case 7: return terms::floor(real(d));
      case 8: return terms::exp(real(d));
      case 9: return terms::log(real(d));
      case 10: return terms::sqrt(real(d));
      case 11: return terms::tanh(real(d));
      case 12: return terms::sigmoid(real(d));
      case 13: return -real(d);
      case 14: return terms::to_float(integer(d));
      case 15: return terms::to_float(boolean(d));
      case 16: return terms::where(boolean(d), real(d), real(d));
      case 17: return terms::sin(real(d));
      case 18: return terms::cos(real(d));
      case 19: return terms::erf(real(d));
      default: return terms::tensor("slope", ExpressionType::real, 1)(integer(d));
    }
  }

  std::mt19937 random_;
  bool with_score_;
};

}  // namespace imbrex::test

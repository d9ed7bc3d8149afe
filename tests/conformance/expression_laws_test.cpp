// A law of expressions: one that says what a field of the spec says gives what the field gives.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "matrix.h"

namespace imbrex::test {
namespace {

class ExpressionLaws : public testing::TestWithParam<Target> {};

// Judged by what the built-in is expected to give, from another seed than the conformance cases have.
TEST_P(ExpressionLaws, AnExpressionIsItsBuiltInTwin) {
  struct Twins {
    Mask mask;
    ScoreMod score;
    const char *mask_mod, *score_mod;  // "": none
  };
  const Twins twins[] = {
      {{.causal = true}, {}, "kv <= q", ""},
      {{.causal = true, .window_left = 30}, {}, "kv <= q & q - kv <= 30", ""},
      {{.causal = true, .chunk = 48}, {}, "q // 48 == kv // 48 & kv <= q", ""},
      {{.causal = true}, {.soft_cap = 20.f}, "kv <= q", "20 * tanh(score / 20)"},
      {{.causal = true}, {.alibi = true}, "kv <= q", "float slope[]; score + slope[head] * (kv - q)"},
      {{.causal = false, .window_left = 20, .window_right = 9}, {.sinks = true}, "q - kv <= 20 & kv - q <= 9", ""},
  };
  int compared = 0;
  for (const Twins& twin : twins) {
    Case c;
    c.name = "expression_law";
    c.spec.num_q_heads = 6, c.spec.num_kv_heads = 2, c.spec.head_dim_qk = c.spec.head_dim_v = 64;
    c.spec.mask = twin.mask, c.spec.score = twin.score;
    c.requests = {{8, 130, 0}, {1, 40, 1}, {140, 250, 2}, {0, 9, 3}, {1, 390, 4}};
    c.seed = 77;
    const CaseInputs built_in = make_inputs(c);
    CaseInputs in = built_in;
    in.spec.mask = {.causal = false};
    in.spec.score = {.sinks = twin.score.sinks}, in.alibi_slopes = {};
    if (*twin.mask_mod != 0) in.spec.mask_mod = parse_expression(twin.mask_mod);
    if (*twin.score_mod != 0) in.spec.score_mod = parse_expression(twin.score_mod);
    if (twin.score.alibi) in.expression_tensors.push_back({"slope", built_in.alibi_slopes});
    c.spec = in.spec;
    RunOptions o;
    if (!runs(c, GetParam()) || !options_for(c, GetParam(), o)) continue;
    o.check_cache = false;
    const RunResult result = run_case(*GetParam().backend, GetParam().device, in, o);
    EXPECT_TRUE(result.violations.empty()) << result.violations.front();
    const Judgement judgement = judge(expect(built_in), result);
    EXPECT_TRUE(judgement.pass()) << in.spec.str() << ": " << judgement.failure;
    ++compared;
  }
  if (compared == 0) GTEST_SKIP() << GetParam().name() << " has no expressions";
}

INSTANTIATE_TEST_SUITE_P(Backends, ExpressionLaws, testing::ValuesIn(targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test

// A law of soft caps: a cap that is far above all logits changes none, so that what computes its tanh has to be as exact near 0 as floats
// are.
#include <gtest/gtest.h>

#include "matrix.h"

namespace imbrex::test {
namespace {

class CapLaws : public testing::TestWithParam<Target> {};

TEST_P(CapLaws, ACapFarAboveAllLogitsChangesNone) {
  Case c;
  c.name = "cap_law";
  c.spec.num_q_heads = 6, c.spec.num_kv_heads = 2, c.spec.head_dim_qk = c.spec.head_dim_v = 64;
  c.spec.q_dtype = c.spec.kv_dtype = DType::f32;
  c.spec.kv_format = GetParam().kv_format;
  c.requests = {{1, 2, 0}, {1, 3, 1}, {5, 40, 2}, {30, 90, 3}, {1, 300, 4}};
  c.seed = 41;
  RunOptions options;
  if (!options_for(c, GetParam(), options) || !runs(c, GetParam())) GTEST_SKIP() << GetParam().name() << " has no " << c.spec.str();
  CaseInputs in = make_inputs(c);
  const Expected expected = expect(in);
  for (const float cap : {1e3f, 1e5f, 1e30f}) {
    in.spec.score.soft_cap = cap;
    const double bend = 300. / double(cap) / double(cap);  // of logits to 9: x^3 / (3 cap^2)
    Expected allowed = expected;
    allowed.bounds.max += bend, allowed.bounds.mean += bend, allowed.bounds.lse_absolute += bend;
    const Judgement judgement = judge(allowed, run_case(*GetParam().backend, GetParam().device, in, options));
    EXPECT_TRUE(judgement.pass()) << in.spec.str() << ": " << judgement.failure;
  }
}

INSTANTIATE_TEST_SUITE_P(All, CapLaws, testing::ValuesIn(targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test

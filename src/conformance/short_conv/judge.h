#pragma once
// The expected results of the short convolution, and how far a backend's may be from them.
#include <string>
#include <vector>

#include "conformance/error_stats.h"
#include "conformance/short_conv/runner.h"

namespace imbrex {

// States are exact, since h is rounded to dtype as it is kept. Outputs are not, since sums are floats: each may be off by
//   the error of float arithmetic, (width + 3) * 2^-24 * |C| * (|bias| + sum of |weight * h|), for width products, as many sums, the
//   product with C (the plain form has C = 1) and the squares of these errors, in any order and with or without fused operations;
//   with SiLU, what that makes of this error, and its own: (12 + 2 |s|) * 2^-24 of the result of a sum s, since exp(-s) is off by as much
//   as s is rounded, and 2^-119, since it is no float where s is below -87; the rounding of the output to dtype, half of a unit in its last
//   place, or of its smallest number.
struct ShortConvExpected {
  std::vector<double> out, allowed;  // [T, dim]
  HostTensor state;                  // [R, state_rows, dim], as in ShortConvRunResult
};
// Outputs in double precision, not rounded; the state is the reference backend's.
ShortConvExpected expect(const ShortConvCaseInputs&);
ShortConvExpected expected_outputs(const ShortConvCaseInputs&);  // the same without the state
// Given, as in a case file. What is allowed comes from the inputs: a wrong result must not widen it.
ShortConvExpected expect(const ShortConvCaseInputs&, const std::vector<float>& out, HostTensor state);

struct ShortConvJudgement {
  ErrorStats error, bound;  // bound.max: what is allowed where the error is the largest share of it; bound.mean: on average
  std::string failure;      // empty: it passed
  bool pass() const { return failure.empty(); }
};
ShortConvJudgement judge(const ShortConvExpected&, const ShortConvCaseInputs&, const ShortConvRunResult&);

}  // namespace imbrex

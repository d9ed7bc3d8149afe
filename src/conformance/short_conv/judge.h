#pragma once
// The expected results of the short convolution, and how far a backend's may be from them.
#include <string>
#include <vector>

#include "conformance/error_stats.h"
#include "conformance/short_conv/runner.h"

namespace imbrex {

// States are exact, since h is rounded to dtype as it is kept. Outputs are not, since sums are floats: each may be off by
//   the error of float arithmetic, (width + 3) * 2^-24 * |C| * (|bias| + sum of |weight * h|), for width products, as many sums, the
//   product with C and the squares of these errors, in any order and with or without fused operations;
//   the rounding of the output to dtype, half of a unit in its last place, or of its smallest number.
struct ShortConvExpected {
  std::vector<double> out, allowed;  // [T, dim]
  HostTensor state;                  // [R, state_rows, dim], as in ShortConvRunResult
};
// Outputs in double precision, not rounded; the state is the reference backend's.
ShortConvExpected expect(const ShortConvCaseInputs&);
// Given, as in a case file. What is allowed comes from the inputs: a wrong result must not widen it.
ShortConvExpected expect(const ShortConvCaseInputs&, const std::vector<float>& out, HostTensor state);

struct ShortConvJudgement {
  ErrorStats error, bound;  // bound.max: what is allowed where the error is the largest share of it; bound.mean: on average
  std::string failure;      // empty: it passed
  bool pass() const { return failure.empty(); }
};
ShortConvJudgement judge(const ShortConvExpected&, const ShortConvCaseInputs&, const ShortConvRunResult&);

}  // namespace imbrex

#pragma once
// The expected results of recurrent layers, and how far a backend's may be from them.
#include <string>
#include <vector>

#include "conformance/error_stats.h"
#include "conformance/recurrent/runner.h"

namespace imbrex {

// Results come from a recurrence in double precision of this file's own. Beside them it keeps, for each number of a state, how far float
// arithmetic may have taken it: what was there decays as the state does; each token adds the rounding of the decay, of what is written and
// of the sum, of the terms' sizes. That the delta rule takes off what S already has for a key also takes off a part of its error; the bound
// does not count on it, and adds no error of earlier tokens a second time. Outputs may be off by the errors of the state that the query
// sums up, and the rounding of that sum and to dtype. A state that steps hand on is
// rounded to its type.
// With products of rounded factors, what is written and what a query sums up is off by the rounding of their terms too. So it is where q, k
// and v come from a convolution and a backend may have rounded one of them otherwise (convolved.h); the rows that the convolution keeps are
// exact.
struct RecurrentExpected {
  std::vector<double> out, allowed;          // [T, num_v_heads, head_dim_v]
  std::vector<double> state, allowed_state;  // as RecurrentCaseInputs::state
  HostTensor conv_state;                     // as RecurrentCaseInputs::conv_state: exact
};
// chunk: as in RecurrentRunOptions, for states of fewer bits than a float.
// `products`: of a plan with rounded_products().
RecurrentExpected expect(const RecurrentCaseInputs&, int chunk, bool products = false);
// What is behind the recurrence: `out` and `allowed` of a token, which are the recurrence's, become those of the norm and the gate behind
// it.
void finish_outputs(const RecurrentCaseInputs&, int64_t token, RecurrentExpected&);

struct RecurrentJudgement {
  ErrorStats error, bound;  // of outputs; bound.max: what is allowed where the error is the largest share of it; bound.mean: on average
  double worst = 0;         // the largest share of what is allowed, of outputs and states
  std::string failure;      // empty: it passed
  bool pass() const { return failure.empty(); }
};
RecurrentJudgement judge(const RecurrentExpected&, const RecurrentCaseInputs&, const RecurrentRunResult&);

}  // namespace imbrex

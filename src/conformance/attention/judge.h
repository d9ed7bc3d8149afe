#pragma once
// The tolerance rule: how far a backend may be from float64, measured against a naive implementation in the case's own dtype.
// Used by the conformance tests, `imbrex verify`, `imbrex run --verify` and the bench.
#include <string>
#include <vector>

#include "conformance/attention/case_inputs.h"
#include "conformance/attention/case_runner.h"

namespace imbrex {

// Attention as one would write it in a framework in q_dtype: logits rounded to q_dtype after q.k and after the soft cap, softmax in
// float, probabilities rounded to q_dtype, their product with v accumulated in float and rounded to q_dtype. Keys and values are what
// the cache holds, times the scale, rounded to q_dtype. Where queries are fp8 it is bf16 that stands for q_dtype here; only exponentials,
// relative to 256 for the row's maximum, are rounded to e4m3, as for a product of bytes. Returns out [T, num_q_heads, head_dim_v].
// `keys_seen` becomes how many keys each row sees [T, num_q_heads].
std::vector<float> naive_attention(const CaseInputs&, std::vector<int>* keys_seen = nullptr);

// max <= 2x and mean <= 1.5x the naive implementation's error (soft cap: 3x the maximum; fp8 cache: 4x and 3x), the factors of
// FlashAttention-3's tests, plus a floor: twice what storing the expected value + 0.3 in q_dtype loses (theirs too) and, because a
// kernel's exponential is not the C library's, kExpError times the largest value. The mean gets a quarter of the floor.
// The log-sum-exp has no naive version: float arithmetic on exact products leaves only the exponential's error and rounding, that of a sum
// of all of a row's keys too. Where queries are fp8, a matrix unit of sm_90 also cuts what it adds to 13 bits behind the largest addend's
// first.
struct Bounds {
  double max = 0, mean = 0;
  double lse_absolute = 0, lse_relative = 0;  // and a part that grows with the keys that a row sees
};

struct Expected {
  std::vector<float> out, lse;  // lse empty: not compared
  std::vector<int> keys_seen;   // by each row
  ErrorStats naive;
  Bounds bounds;
};
Expected expect(const CaseInputs&);  // computed by the reference backend
// Given, as in a case file. The bounds still come from the reference: a wrong result must not widen them.
Expected expect(const CaseInputs&, std::vector<float> out, std::vector<float> lse);

struct Judgement {
  ErrorStats out;
  double lse = 0;       // largest error of the log-sum-exp, as a share of what is allowed
  std::string failure;  // empty: it passed
  bool pass() const { return failure.empty(); }
};
Judgement judge(const Expected&, const RunResult&);

}  // namespace imbrex

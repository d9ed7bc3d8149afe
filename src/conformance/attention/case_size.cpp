// See cases.h: what a case has, apart from the table of cases.
#include "conformance/attention/cases.h"

namespace imbrex {

int Case::num_tokens() const {
  int sum = 0;
  for (const CaseRequest& r : requests) sum += r.q_len;
  return sum;
}

int Case::num_keys() const {
  int sum = 0;
  for (const CaseRequest& r : requests) sum += r.seq_len;
  return sum;
}

int64_t Case::work() const {
  int64_t pairs = 0;
  for (const CaseRequest& r : requests) pairs += int64_t(r.q_len) * r.seq_len;
  return pairs * spec.num_q_heads * (spec.head_dim_qk + spec.head_dim_v);
}

}  // namespace imbrex

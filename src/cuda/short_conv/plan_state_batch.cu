// The list of requests of layers with a state, from lengths that lie on the device; launched by cuda/short_conv/short_conv.cpp in front of
// the layers of a step.
//
// A few hundred requests: bound by latency, so one thread block reads them all and writes 16 bytes for each.
#include "async.cuh"
#include "cuda/short_conv_params.h"

namespace imbrex::cuda {

struct Lengths {
  int begin, end, seq_len, slot, drafts, accepted;
};

// The first rule that the request breaks; kNumStateRules: none.
DEVICE int broken_rule(const PlanStateBatchParams& p, int r, const Lengths& q) {
  if (q.begin < 0 || q.end < q.begin || (r == 0 && q.begin != 0)) return kStateStartsRise;
  const int q_len = q.end - q.begin;
  if (q.end > p.max_tokens) return kStateTokensFit;
  if ((p.max_query_len > 0 && q_len > p.max_query_len) || (q_len > 0 && q_len < p.min_query_len)) return kStateQueryFits;
  if (q.seq_len < 0 || q.seq_len > p.max_seq_len) return kStateLengthFits;
  if (q.seq_len < q_len) return kStateQueriesAreKeys;
  if (q_len == 0) return kNumStateRules;
  if (q.slot < 0) return kStateSlotIsOne;
  if (q.drafts < 0 || q.drafts > min(p.max_drafts, q_len)) return kStateDraftsFit;
  if (q.accepted < 0 || q.accepted > (q.seq_len == q_len ? 0 : p.max_drafts)) return kStateAcceptedFit;
  return kNumStateRules;
}

extern "C" __global__ void __launch_bounds__(kPlanStateBatchThreads) plan_state_batch(const __grid_constant__ PlanStateBatchParams p) {
  griddep_wait();
  bool falls = false;
  for (int r = int(threadIdx.x); r < p.num_reqs; r += kPlanStateBatchThreads) {
    const Lengths q{p.starts[r],
                    p.starts[r + 1],
                    p.lengths[r],
                    p.slots[r],
                    p.drafts != nullptr ? p.drafts[r] : 0,
                    p.accepted != nullptr ? p.accepted[r] : 0};
    const int rule = broken_rule(p, r, q);
    if (rule < kNumStateRules) atomicMax(p.broken + rule, r + 1);
    falls = falls || rule == kStateStartsRise;
    p.requests[r] = {q.begin, rule < kNumStateRules ? -1 : q.slot, q.seq_len == q.end - q.begin ? -1 : q.accepted, q.drafts};
    if (r + 1 == p.num_reqs) p.requests[r + 1] = {q.end, -1, -1, 0};
  }
  falls = named_barrier_any(1, kPlanStateBatchThreads, falls);
  if (threadIdx.x == 0) *p.counts = {falls || p.num_reqs == 0 ? 0 : min(p.starts[p.num_reqs], p.max_tokens), p.num_reqs, {}};
}

}  // namespace imbrex::cuda

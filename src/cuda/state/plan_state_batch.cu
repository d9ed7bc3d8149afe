// The list of requests of layers with a state, from lengths that lie on the device; launched by cuda/state/state_lists.cpp in front of
// the layers of a step. And zeros for the outputs of requests that are padding, launched by it for each layer of a step that has some.
//
// A few hundred requests: bound by latency, so one thread block reads them all and writes 16 bytes for each. Each request claims the bit of
// its slot in shared memory. Where it was set, a warp looks through all requests for those that have the same slot: slots share a bit only
// where there are more of them than bits, so that this is rare.
#include "async.cuh"
#include "cuda/state_params.h"

namespace imbrex::cuda {

constexpr int kClaims = 1 << 17;  // bits; a slot's is the remainder

struct SharedStorage {
  uint4 claimed[kClaims / 128];
};

extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);
extern __shared__ __align__(16) char memory[];

struct Lengths {
  int begin, end, seq_len, slot, drafts, accepted, source;
  // Of a draft: what it follows.
  DEVICE int parent_of(const PlanStateBatchParams& p, int token) const {
    return p.parents == nullptr ? token - begin - 1 : p.parents[token];
  }
};

DEVICE Lengths lengths_of(const PlanStateBatchParams& p, int r) {
  return {p.starts[r],
          p.starts[r + 1],
          p.lengths[r],
          p.slots[r],
          p.drafts != nullptr ? p.drafts[r] : 0,
          p.accepted != nullptr ? p.accepted[r] : 0,
          p.sources != nullptr && p.lengths[r] > p.starts[r + 1] - p.starts[r] ? p.sources[r] : p.slots[r]};
}

DEVICE bool is_padding(const PlanStateBatchParams& p, const Lengths& q) {
  return p.has_pad_slot && q.slot == p.pad_slot && q.end > q.begin;
}

// The first rule that the request breaks; kNumStateRules: none.
DEVICE int broken_rule(const PlanStateBatchParams& p, int r, const Lengths& q) {
  if (q.begin < 0 || q.end < q.begin || (r == 0 && q.begin != 0)) return kStateStartsRise;
  const int q_len = q.end - q.begin;
  if (q.end > p.max_tokens) return kStateTokensFit;
  if ((p.max_query_len > 0 && q_len > p.max_query_len) || (q_len > 0 && q_len < p.min_query_len)) return kStateQueryFits;
  if (q.seq_len < 0 || q.seq_len > p.max_seq_len) return kStateLengthFits;
  if (q.seq_len < q_len) return kStateQueriesAreKeys;
  if (q_len == 0 || is_padding(p, q)) return kNumStateRules;
  if (q.slot < 0) return kStateSlotIsOne;
  if (q.drafts < 0 || q.drafts > min(p.max_drafts, q_len)) return kStateDraftsFit;
  if (q.accepted < 0 || q.accepted > (q.seq_len == q_len ? 0 : p.max_drafts)) return kStateAcceptedFit;
  if (q.source < 0) return kStateSourceIsOne;
  const int certain = q_len - q.drafts;
  for (int t = certain; p.parents != nullptr && t < q_len; ++t)
    if (const int parent = p.parents[q.begin + t]; parent < certain - 1 || parent >= t) return kStateParentsFit;
  return kNumStateRules;
}

// The slot that a request writes; negative: it has no tokens, breaks a rule, or is padding.
DEVICE int used_slot(const PlanStateBatchParams& p, int r, const Lengths& q) {
  if (q.end <= q.begin || broken_rule(p, r, q) != kNumStateRules) return kLeftOut;
  return is_padding(p, q) ? kIsPadding : q.slot;
}

// Returns whether another request has claimed the bit of this slot before.
DEVICE bool claim(int slot) {
  const u32 bit = 1u << slot % 32;
  return (atomicOr(reinterpret_cast<u32*>(memory) + slot % kClaims / 32, bit) & bit) != 0;
}
DEVICE bool is_claimed(int slot) { return (reinterpret_cast<const u32*>(memory)[slot % kClaims / 32] >> slot % 32 & 1) != 0; }

DEVICE void leave_out(const PlanStateBatchParams& p, int r, StateRule rule) {
  atomicMax(p.broken + rule, r + 1);
  p.requests[r].slot = kLeftOut;
}

// Leaves out a request and all others that have its slot: which of them is meant nobody knows. And one that reads a slot which another
// one writes. All lanes of a warp together.
DEVICE void leave_out_sharers(const PlanStateBatchParams& p, int r) {
  const Lengths q = lengths_of(p, r);
  const int slot = used_slot(p, r, q);
  if (slot < 0) return;
  for (int other = lane_id(); other < p.num_reqs; other += 32) {
    if (other == r || (p.slots[other] != slot && p.slots[other] != q.source)) continue;
    const int its = used_slot(p, other, lengths_of(p, other));
    if (its == slot) leave_out(p, r, kStateSlotIsOwn), leave_out(p, other, kStateSlotIsOwn);
    if (its == q.source && its != slot) leave_out(p, r, kStateSourceIsOthers);
  }
}

extern "C" __global__ void __launch_bounds__(kPlanStateBatchThreads) plan_state_batch(const __grid_constant__ PlanStateBatchParams p) {
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(memory);
  for (int i = int(threadIdx.x); i < kClaims / 128; i += kPlanStateBatchThreads) s.claimed[i] = {0, 0, 0, 0};
  griddep_wait();
  __syncthreads();
  bool falls = false;
  u32 found_claimed = 0;  // a bit for each turn, or for those that are 32 turns apart: the slot's bit was claimed by another request
  for (int r = int(threadIdx.x); r < p.num_reqs; r += kPlanStateBatchThreads) {
    const Lengths q = lengths_of(p, r);
    const int rule = broken_rule(p, r, q);
    if (rule < kNumStateRules) atomicMax(p.broken + rule, r + 1);
    falls = falls || rule == kStateStartsRise;
    const int slot = used_slot(p, r, q);
    if (slot >= 0 && claim(slot)) found_claimed |= 1u << r / kPlanStateBatchThreads % 32;
    p.requests[r] = {q.begin, slot, q.source, short(q.seq_len == q.end - q.begin ? -1 : q.accepted), short(q.drafts)};
    if (r + 1 == p.num_reqs) p.requests[r + 1] = {q.end, kLeftOut, -1, -1, 0};
    for (int token = q.end - q.drafts; p.parent_rows != nullptr && slot >= 0 && token < q.end; ++token)
      p.parent_rows[token] = q.parent_of(p, token) + 1 - (q.end - q.begin - q.drafts);
  }
  falls = named_barrier_any(1, kPlanStateBatchThreads, falls);  // now all requests are written, and all slots are claimed
  for (int r = int(threadIdx.x); p.sources != nullptr && r < p.num_reqs; r += kPlanStateBatchThreads) {
    const Lengths q = lengths_of(p, r);
    const int slot = used_slot(p, r, q);
    if (slot >= 0 && q.source != slot && is_claimed(q.source)) found_claimed |= 1u << r / kPlanStateBatchThreads % 32;
  }
  for (int first = warp_id() * 32, turn = 0; first < p.num_reqs; first += kPlanStateBatchThreads, ++turn) {
    u32 lanes = __ballot_sync(kFullWarp, (found_claimed >> turn % 32 & 1) != 0);
    for (; lanes != 0; lanes &= lanes - 1)
      if (const int r = first + lowest_bit(lanes); r < p.num_reqs) leave_out_sharers(p, r);
  }
  if (threadIdx.x == 0) *p.counts = {falls || p.num_reqs == 0 ? 0 : min(p.starts[p.num_reqs], p.max_tokens), p.num_reqs, 0, 0};
}

// Thread blocks take requests in turn, and their warps rows.
extern "C" __global__ void __launch_bounds__(kZeroPaddingThreads) zero_padding(const __grid_constant__ ZeroPaddingParams p) {
  griddep_launch();
  griddep_wait();
  const int num_tokens = p.counts->num_tokens, num_reqs = num_tokens > 0 ? p.counts->num_reqs : 0;
  const bool aligned = (reinterpret_cast<u64>(p.out) | u64(p.token_stride) | u64(p.row_stride) | u64(p.row_bytes)) % 16 == 0;
  for (int r = int(blockIdx.x); r < num_reqs; r += int(gridDim.x)) {
    if (p.requests[r].slot != kIsPadding) continue;
    const int begin = p.requests[r].begin, rows = (min(p.requests[r + 1].begin, num_tokens) - begin) * p.rows_of_token;
    for (int row = warp_id(); row < rows; row += kZeroPaddingThreads / 32) {
      char* const to = p.out + (begin + row / p.rows_of_token) * p.token_stride + row % p.rows_of_token * p.row_stride;
      if (aligned) {
        for (int i = lane_id() * 16; i < p.row_bytes; i += 32 * 16) *reinterpret_cast<uint4*>(to + i) = {0, 0, 0, 0};
      } else {
        for (int i = lane_id() * 2; i < p.row_bytes; i += 32 * 2) *reinterpret_cast<unsigned short*>(to + i) = 0;
      }
    }
  }
}

}  // namespace imbrex::cuda

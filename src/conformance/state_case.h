#pragma once
// Requests of cases of layers that keep a state of each request in a slot, and the steps that a server would compute them in.
#include <cstdint>
#include <span>
#include <vector>

#include "conformance/poison.h"
#include "imbrex/batch.h"

namespace imbrex {

struct StateCaseRequest {
  int q_len = 0;        // tokens of the step
  int context_len = 0;  // tokens gone by; 0: the state holds nothing
  int drafts = 0;       // of q_len, the last so many may be taken back
  int accepted = 0;     // of the drafts of the step before: the row of the state that is read first
  int id = 0;           // seeds the contents: the same id and position give the same numbers in any batch
};
using StateCaseRequests = std::vector<StateCaseRequest>;

int num_tokens(const StateCaseRequests&);

// Tokens [begin, end) of a request, counted from its first one in the case, as a step has them.
struct StatePart {
  int begin = 0, end = 0;
  int drafts = 0, accepted = 0;  // as in StateCaseRequest
};
using StateParts = std::vector<StatePart>;  // of each request

// Steps that compute `chunk` tokens of one request each, without drafts; 0: one step.
std::vector<StateParts> steps_of(const StateCaseRequests&, int chunk);

// The lists of a step's Batch.
struct StateLists {
  std::vector<int32_t> query_start_loc{0}, seq_lens, slots, drafts, accepted;

  // `slots`: of each request. That of one without tokens is not to be looked at.
  StateLists(const StateCaseRequests&, const StateParts&, std::span<const int32_t> slots, Poison);
  // with_drafts: whether the layer may have some.
  Batch batch(bool with_drafts) const;
  DeviceBatch device_batch(bool with_drafts);  // the lists, in host memory
};

// So many different slots of num_slots, in shuffled order.
std::vector<int32_t> shuffled_slots(int64_t num_slots, size_t count, uint64_t seed);

PlanLimits limits_of(const StateCaseRequests&);

}  // namespace imbrex

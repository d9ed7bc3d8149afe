#pragma once
// Requests of cases of layers that keep a state of each request in a slot, and the steps that a server would compute them in.
#include <cstdint>
#include <optional>
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
  // Of each draft the token that it follows, as in Batch::draft_parents. Empty: the one in front of it.
  std::vector<int> parents = {};
  bool is_padding = false;         // its slot is the batch's pad_slot: outputs are zeros, and there is no state
  int parent_of(int token) const;  // of a token of the step
  bool writes_state() const { return q_len > 0 && !is_padding; }
};
using StateCaseRequests = std::vector<StateCaseRequest>;

int num_tokens(const StateCaseRequests&);
bool has_padding(const StateCaseRequests&);

// Requests whose drafts are trees, of a layer with kTreeDrafts: with several roots, with siblings that are deep and shallow, from certain
// tokens and from none, new and not; with chains among them.
constexpr int kTreeDrafts = 6;
StateCaseRequests tree_requests();
// Requests in front of, between and behind padding, of one token and of as many as a prompt has.
StateCaseRequests padded_requests();

// Tokens [begin, end) of a request, counted from its first one in the case, as a step has them.
struct StatePart {
  int begin = 0, end = 0;
  int drafts = 0, accepted = 0;  // as in StateCaseRequest
  std::vector<int> parents = {};
};
using StateParts = std::vector<StatePart>;  // of each request

// Steps that compute `chunk` tokens of one request each, without drafts; 0: one step.
std::vector<StateParts> steps_of(const StateCaseRequests&, int chunk);

// The slots that a step's requests read and write.
struct StateSlots {
  std::span<const int32_t> read, written;
};

// The lists of a step's Batch.
struct StateBatchLists {
  std::vector<int32_t> query_start_loc{0}, seq_lens, slots, drafts, accepted;
  std::vector<int32_t> sources;  // empty where all requests read the slots that they write
  std::vector<int32_t> parents;  // empty where all drafts follow those in front of them
  std::optional<int32_t> pad_slot;

  // Slots of requests without tokens are not to be looked at, nor are those that new requests would read, nor anything else of padding.
  StateBatchLists(const StateCaseRequests&, const StateParts&, const StateSlots&, Poison);
  // with_drafts: whether the layer may have some.
  Batch batch(bool with_drafts) const;
  DeviceBatch device_batch(bool with_drafts);  // the lists, in host memory
};

// So many different slots of num_slots, in shuffled order.
std::vector<int32_t> shuffled_slots(int64_t num_slots, size_t count, uint64_t seed);

// The slots of the requests of a case: those that they write, and those that their first steps read. These are others where `others` says
// so, and requests with the same past have the same one.
struct StateSlotLists {
  StateSlotLists(const StateCaseRequests&, int64_t num_slots, uint64_t seed, bool others);
  std::vector<int32_t> written, read;
  StateSlots slots() const { return {.read = read, .written = written}; }
  void next_step(const StateParts&);  // behind a request's first tokens it reads what it has written
};

PlanLimits limits_of(const StateCaseRequests&);

}  // namespace imbrex

// See state_step.h.
#include "family/state_step.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "core/check.h"
#include "family/batch_checks.h"

namespace imbrex {
namespace {

// A request that has tokens, and a state.
bool has_state(const Batch& batch, int r) { return batch.query_len(r) > 0 && batch.state_slots[r] != batch.pad_slot; }

int drafts_of(const Batch& batch, int r) { return batch.num_drafts.empty() ? 0 : batch.num_drafts[r]; }

// What a request with tokens has in its lists.
void check_request(const StateDrafts& of_layer, const Batch& batch, int r) {
  const int q_len = batch.query_len(r), drafts = drafts_of(batch, r), most = std::min(of_layer.most, q_len);
  check(batch.state_slots[r] >= 0, "batch.state.slot", "expected a slot of 0 or more for request {}, got {}", r, batch.state_slots[r]);
  check(drafts >= 0 && drafts <= most, "batch.state.num_drafts", "expected 0 to {} drafts of request {} with {} tokens, got {}", most, r,
        q_len, drafts);
  const int accepted = batch.accepted_drafts.empty() ? 0 : batch.accepted_drafts[r];
  const int kept = batch.context_len(r) == 0 ? 0 : of_layer.most;
  check(accepted >= 0 && accepted <= kept, "batch.state.accepted_drafts", "expected 0 to {} accepted drafts of request {}, got {}", kept, r,
        accepted);
  for (int t = q_len - drafts; !batch.draft_parents.empty() && t < q_len; ++t) {
    const int parent = batch.draft_parents[batch.query_start_loc[r] + t];
    check(parent >= q_len - drafts - 1 && parent < t, "batch.draft_parents.range",
          "expected a parent of {} to {} for token {} of request {}, whose last {} tokens are drafts, got {}", q_len - drafts - 1, t - 1, t,
          r, drafts, parent);
  }
}

// Slots that are written have one owner, and nobody else reads them.
void check_slots(const Batch& batch) {
  std::vector<int32_t> slots;
  for (int r = 0; r < batch.num_reqs(); ++r)
    if (has_state(batch, r)) slots.push_back(batch.state_slots[r]);
  std::sort(slots.begin(), slots.end());
  const auto twice = std::adjacent_find(slots.begin(), slots.end());
  check(twice == slots.end(), "batch.state.shared", "expected a slot of its own for each request, slot {} has two",
        twice == slots.end() ? 0 : *twice);
  for (int r = 0; !batch.source_slots.empty() && r < batch.num_reqs(); ++r) {
    const int source = batch.source_slots[r];
    if (!has_state(batch, r) || batch.context_len(r) == 0 || source == batch.state_slots[r]) continue;
    check(source >= 0, "batch.state.source", "expected a slot of 0 or more that request {} reads, got {}", r, source);
    check(!std::binary_search(slots.begin(), slots.end(), source), "batch.state.source",
          "expected a slot that no other request writes, request {} reads slot {}, which one does", r, source);
  }
}

void check_states(const StateDrafts& drafts, const Batch& batch) {
  const size_t num_reqs = size_t(batch.num_reqs());
  const auto check_size = [&](std::span<const int32_t> list, const char* name, bool optional) {
    check(list.size() == num_reqs || (optional && list.empty()), "batch.state.size", "{}: expected {} entries, got {}", name, num_reqs,
          list.size());
  };
  check_size(batch.state_slots, "state_slots", false);
  check_size(batch.num_drafts, "num_drafts", true);
  check_size(batch.accepted_drafts, "accepted_drafts", true);
  check_size(batch.source_slots, "source_slots", true);
  check(drafts.tree || batch.draft_parents.empty(), "batch.draft_parents.unexpected",
        "expected none for a layer without tree_drafts, got {}", batch.draft_parents.size());
  check(batch.draft_parents.empty() || batch.draft_parents.size() >= size_t(batch.num_tokens()), "batch.draft_parents.size",
        "expected {} entries, got {}", batch.num_tokens(), batch.draft_parents.size());
  for (int r = 0; r < int(num_reqs); ++r)
    if (has_state(batch, r)) check_request(drafts, batch, r);
  check_slots(batch);
}

}  // namespace

void read_batch(const StateDrafts& drafts, const PlanLimits& limits, const Batch& batch, bool checked, StateStep& step) {
  if (checked) {
    check_lengths(batch, limits, true);
    check_states(drafts, batch);
  }
  step.requests.clear();
  step.padding.clear();
  step.parent_rows.clear();
  step.num_tokens = batch.num_tokens();
  step.num_slots = 0;
  if (drafts.tree && !batch.draft_parents.empty()) step.parent_rows.resize(size_t(step.num_tokens));
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int begin = batch.query_start_loc[r], q_len = batch.query_len(r);
    if (q_len == 0) continue;
    if (!has_state(batch, r)) {
      step.padding.push_back({begin, begin + q_len});
      continue;
    }
    const int slot = batch.state_slots[r];
    const bool fresh = batch.context_len(r) == 0;
    step.requests.push_back({.begin = begin,
                             .end = begin + q_len,
                             .slot = slot,
                             .source = fresh || batch.source_slots.empty() ? slot : batch.source_slots[r],
                             .fresh = fresh,
                             .first_row = batch.accepted_drafts.empty() ? 0 : batch.accepted_drafts[r],
                             .drafts = drafts_of(batch, r)});
    const StateRequest& request = step.requests.back();
    step.num_slots = std::max(step.num_slots, int64_t(std::max(slot, request.source)) + 1);
    const int certain = q_len - request.drafts;
    for (int t = certain; !step.parent_rows.empty() && t < q_len; ++t)
      step.parent_rows[size_t(begin) + size_t(t)] = batch.draft_parents[begin + t] + 1 - certain;
  }
}

void zero_padding(const StateStep& step, const TensorView& out) {
  const int64_t size = size_of(out.dtype), heads = out.rank == 3 ? out.size(1) : 1, head_stride = out.rank == 3 ? out.stride(1) : 0;
  for (const StatePadding& range : step.padding)
    for (int64_t token = range.begin; token < range.end; ++token)
      for (int64_t head = 0; head < heads; ++head)
        std::memset(out.as<char>() + (token * out.stride(0) + head * head_stride) * size, 0, size_t(out.size(out.rank - 1) * size));
}

}  // namespace imbrex

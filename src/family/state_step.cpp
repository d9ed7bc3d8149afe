// See state_step.h.
#include "family/state_step.h"

#include <algorithm>
#include <span>

#include "core/check.h"
#include "family/batch_checks.h"

namespace imbrex {
namespace {

void check_states(int most_drafts, const Batch& batch) {
  const size_t num_reqs = size_t(batch.num_reqs());
  const auto check_size = [&](std::span<const int32_t> list, const char* name, bool optional) {
    check(list.size() == num_reqs || (optional && list.empty()), "batch.state.size", "{}: expected {} entries, got {}", name, num_reqs,
          list.size());
  };
  check_size(batch.state_slots, "state_slots", false);
  check_size(batch.num_drafts, "num_drafts", true);
  check_size(batch.accepted_drafts, "accepted_drafts", true);
  std::vector<int32_t> slots;
  for (int r = 0; r < int(num_reqs); ++r) {
    const int q_len = batch.query_len(r);
    if (q_len == 0) continue;
    check(batch.state_slots[r] >= 0, "batch.state.slot", "expected a slot of 0 or more for request {}, got {}", r, batch.state_slots[r]);
    slots.push_back(batch.state_slots[r]);
    const int drafts = batch.num_drafts.empty() ? 0 : batch.num_drafts[r], most = std::min(most_drafts, q_len);
    check(drafts >= 0 && drafts <= most, "batch.state.num_drafts", "expected 0 to {} drafts of request {} with {} tokens, got {}", most, r,
          q_len, drafts);
    const int accepted = batch.accepted_drafts.empty() ? 0 : batch.accepted_drafts[r];
    const int kept = batch.context_len(r) == 0 ? 0 : most_drafts;
    check(accepted >= 0 && accepted <= kept, "batch.state.accepted_drafts", "expected 0 to {} accepted drafts of request {}, got {}", kept,
          r, accepted);
  }
  std::sort(slots.begin(), slots.end());
  const auto twice = std::adjacent_find(slots.begin(), slots.end());
  check(twice == slots.end(), "batch.state.shared", "expected a slot of its own for each request, slot {} has two",
        twice == slots.end() ? 0 : *twice);
}

}  // namespace

void read_batch(int most_drafts, const PlanLimits& limits, const Batch& batch, bool checked, StateStep& step) {
  if (checked) {
    check_lengths(batch, limits, true);
    check_states(most_drafts, batch);
  }
  step.requests.clear();
  step.num_tokens = batch.num_tokens();
  step.num_slots = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    if (batch.query_len(r) == 0) continue;
    step.requests.push_back({.begin = batch.query_start_loc[r],
                             .end = batch.query_start_loc[r + 1],
                             .slot = batch.state_slots[r],
                             .fresh = batch.context_len(r) == 0,
                             .first_row = batch.accepted_drafts.empty() ? 0 : batch.accepted_drafts[r],
                             .drafts = batch.num_drafts.empty() ? 0 : batch.num_drafts[r]});
    step.num_slots = std::max(step.num_slots, int64_t(batch.state_slots[r]) + 1);
  }
}

}  // namespace imbrex

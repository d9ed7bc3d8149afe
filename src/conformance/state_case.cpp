// See state_case.h.
#include "conformance/state_case.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <tuple>

namespace imbrex {

int num_tokens(const StateCaseRequests& requests) {
  int count = 0;
  for (const StateCaseRequest& r : requests) count += r.q_len;
  return count;
}

bool has_padding(const StateCaseRequests& requests) { return std::ranges::any_of(requests, &StateCaseRequest::is_padding); }

StateCaseRequests tree_requests() {
  const auto tree = [](int q_len, int context_len, int accepted, const std::vector<int>& parents) {
    return StateCaseRequest{
        .q_len = q_len, .context_len = context_len, .drafts = int(parents.size()), .accepted = accepted, .parents = parents};
  };
  return {tree(7, 140, 5, {0, 0, 1, 1, 2, 4}),
          tree(6, 33, 2, {-1, -1, 0, 1, 0, 4}),
          tree(5, 0, 0, {0, 0, 0, 1}),
          tree(6, 0, 0, {-1, 0, -1, 2, 1, 3}),
          {.q_len = 7, .context_len = 9, .drafts = 6, .accepted = 6},
          {.q_len = 3, .context_len = 2},
          tree(9, 5, 1, {2, 3, 4, 2, 2, 6}),
          {.q_len = 0, .context_len = 12, .accepted = 1},
          tree(24, 1, 0, {19, 19, 21, 20}),
          tree(5, 70, 0, {0, 1, 2, 3})};
}

StateCaseRequests padded_requests() {
  const auto padding = [](int q_len, int context_len) {
    return StateCaseRequest{.q_len = q_len, .context_len = context_len, .is_padding = true};
  };
  return {padding(1, 7),  {.q_len = 1, .context_len = 12},  {.q_len = 70}, padding(1, 0), padding(3, 20), {.q_len = 5, .context_len = 66},
          padding(80, 3), {.q_len = 140, .context_len = 9}, padding(1, 1), {.q_len = 0},  {.q_len = 1},   padding(2, 0)};
}

int StateCaseRequest::parent_of(int token) const {
  const int draft = token - (q_len - drafts);
  return draft < 0 || parents.empty() ? token - 1 : parents[size_t(draft)];
}

std::vector<StateParts> steps_of(const StateCaseRequests& requests, int chunk) {
  std::vector<StateParts> steps;
  for (bool more = true; more;) {
    more = false;
    StateParts parts;
    for (size_t r = 0; r < requests.size(); ++r) {
      const StateCaseRequest& request = requests[r];
      const int begin = steps.empty() ? 0 : steps.back()[r].end, end = chunk > 0 ? std::min(request.q_len, begin + chunk) : request.q_len;
      parts.push_back(chunk > 0 ? StatePart{begin, end} : StatePart{begin, end, request.drafts, request.accepted, request.parents});
      more = more || end < request.q_len;
    }
    steps.push_back(std::move(parts));
  }
  return steps;
}

StateBatchLists::StateBatchLists(const StateCaseRequests& requests, const StateParts& parts, const StateSlots& of_requests, Poison poison) {
  bool has_sources = false, has_parents = false;
  for (size_t r = 0; r < parts.size(); ++r) {
    const StatePart& p = parts[r];
    const bool pads = requests[r].is_padding, has_tokens = p.end > p.begin && !pads, has_past = requests[r].context_len + p.begin > 0;
    constexpr int32_t kPadSlot = -1;
    if (pads) pad_slot = kPadSlot;
    query_start_loc.push_back(query_start_loc.back() + p.end - p.begin);
    seq_lens.push_back(requests[r].context_len + p.end);
    slots.push_back(has_tokens ? of_requests.written[r] : pads ? kPadSlot : poison_index(poison));
    sources.push_back(has_tokens && has_past ? of_requests.read[r] : poison_index(poison));
    has_sources = has_sources || of_requests.read[r] != of_requests.written[r];
    drafts.push_back(pads ? poison_index(poison) : p.drafts);
    accepted.push_back(pads ? poison_index(poison) : p.accepted);
    has_parents = has_parents || !p.parents.empty();
    const int certain = p.end - p.begin - p.drafts;
    for (int t = 0; t < p.end - p.begin; ++t)
      parents.push_back(t < certain || pads ? poison_index(poison) : p.parents.empty() ? t - 1 : p.parents[size_t(t - certain)]);
  }
  if (!has_sources) sources.clear();
  if (!has_parents) parents.clear();
}

Batch StateBatchLists::batch(bool with_drafts) const {
  Batch batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.state_slots = slots, batch.source_slots = sources, batch.pad_slot = pad_slot;
  if (with_drafts) batch.num_drafts = drafts, batch.accepted_drafts = accepted, batch.draft_parents = parents;
  return batch;
}

DeviceBatch StateBatchLists::device_batch(bool with_drafts) {
  const auto view = [](std::vector<int32_t>& list) {
    return list.empty() ? TensorView{} : TensorView::contiguous(list.data(), DType::i32, {int64_t(list.size())});
  };
  DeviceBatch batch;
  batch.query_start_loc = view(query_start_loc), batch.seq_lens = view(seq_lens), batch.state_slots = view(slots);
  batch.source_slots = view(sources), batch.pad_slot = pad_slot;
  if (with_drafts) batch.num_drafts = view(drafts), batch.accepted_drafts = view(accepted), batch.draft_parents = view(parents);
  batch.max_num_tokens = std::max(query_start_loc.back(), 1);  // 0 would be: as many as the limits allow
  return batch;
}

std::vector<int32_t> shuffled_slots(int64_t num_slots, size_t count, uint64_t seed) {
  std::vector<int32_t> ids(static_cast<size_t>(num_slots));
  std::iota(ids.begin(), ids.end(), 0);
  std::mt19937_64 random(seed);
  for (size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[random() % i]);
  ids.resize(count);
  return ids;
}

StateSlotLists::StateSlotLists(const StateCaseRequests& requests, int64_t num_slots, uint64_t seed, bool others)
    : written(shuffled_slots(num_slots, requests.size() * 2, seed)) {
  read.assign(written.begin() + (others ? long(requests.size()) : 0), written.end());
  written.resize(requests.size()), read.resize(requests.size());
  const auto past_of = [](const StateCaseRequest& r) { return std::tuple(r.id, r.context_len, r.accepted); };
  for (size_t r = 0; others && r < requests.size(); ++r)
    for (size_t other = 0; other < r; ++other)
      if (past_of(requests[other]) == past_of(requests[r])) read[r] = read[other];
}

void StateSlotLists::next_step(const StateParts& parts) {
  for (size_t r = 0; r < parts.size(); ++r)
    if (parts[r].end > parts[r].begin) read[r] = written[r];
}

PlanLimits limits_of(const StateCaseRequests& requests) {
  PlanLimits limits{
      .max_num_reqs = std::max(1, int(requests.size())), .max_num_tokens = std::max(1, num_tokens(requests)), .max_seq_len = 1};
  for (const StateCaseRequest& r : requests) limits.max_seq_len = std::max(limits.max_seq_len, r.context_len + r.q_len);
  return limits;
}

}  // namespace imbrex

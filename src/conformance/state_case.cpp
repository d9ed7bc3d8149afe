// See state_case.h.
#include "conformance/state_case.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace imbrex {

int num_tokens(const StateCaseRequests& requests) {
  int count = 0;
  for (const StateCaseRequest& r : requests) count += r.q_len;
  return count;
}

std::vector<StateParts> steps_of(const StateCaseRequests& requests, int chunk) {
  std::vector<StateParts> steps;
  for (bool more = true; more;) {
    more = false;
    StateParts parts;
    for (size_t r = 0; r < requests.size(); ++r) {
      const StateCaseRequest& request = requests[r];
      const int begin = steps.empty() ? 0 : steps.back()[r].end, end = chunk > 0 ? std::min(request.q_len, begin + chunk) : request.q_len;
      parts.push_back(chunk > 0 ? StatePart{begin, end} : StatePart{begin, end, request.drafts, request.accepted});
      more = more || end < request.q_len;
    }
    steps.push_back(std::move(parts));
  }
  return steps;
}

StateLists::StateLists(const StateCaseRequests& requests, const StateParts& parts, std::span<const int32_t> slots_of_requests,
                       Poison poison) {
  for (size_t r = 0; r < parts.size(); ++r) {
    const StatePart& p = parts[r];
    query_start_loc.push_back(query_start_loc.back() + p.end - p.begin);
    seq_lens.push_back(requests[r].context_len + p.end);
    slots.push_back(p.end > p.begin ? slots_of_requests[r] : poison_index(poison));
    drafts.push_back(p.drafts);
    accepted.push_back(p.accepted);
  }
}

Batch StateLists::batch(bool with_drafts) const {
  Batch batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.state_slots = slots;
  if (with_drafts) batch.num_drafts = drafts, batch.accepted_drafts = accepted;
  return batch;
}

DeviceBatch StateLists::device_batch(bool with_drafts) {
  const auto view = [](std::vector<int32_t>& list) { return TensorView::contiguous(list.data(), DType::i32, {int64_t(list.size())}); };
  DeviceBatch batch;
  batch.query_start_loc = view(query_start_loc), batch.seq_lens = view(seq_lens), batch.state_slots = view(slots);
  if (with_drafts) batch.num_drafts = view(drafts), batch.accepted_drafts = view(accepted);
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

PlanLimits limits_of(const StateCaseRequests& requests) {
  PlanLimits limits{
      .max_num_reqs = std::max(1, int(requests.size())), .max_num_tokens = std::max(1, num_tokens(requests)), .max_seq_len = 1};
  for (const StateCaseRequest& r : requests) limits.max_seq_len = std::max(limits.max_seq_len, r.context_len + r.q_len);
  return limits;
}

}  // namespace imbrex

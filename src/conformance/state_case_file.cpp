// See state_case_file.h.
#include "conformance/state_case_file.h"

#include <algorithm>

#include "core/check.h"

namespace imbrex {
namespace {

// Checks a request of a step against the rules of Batch.
void check_state_request(int num_drafts, const StateCaseRequest& r) {
  const auto in_range = [&](const char* name, int value, int most) {
    check(value >= 0 && value <= most, "case_file.drafts", "{}: expected 0 to {} of request {} with {} tokens after {}, got {}", name, most,
          r.id, r.q_len, r.context_len, value);
  };
  in_range("num_drafts", r.drafts, std::min(num_drafts, r.q_len));
  in_range("accepted_drafts", r.accepted, r.context_len == 0 ? 0 : num_drafts);
}

}  // namespace

StateCaseRequests take_state_requests(CaseTensors& tensors, int num_drafts) {
  const HostTensor lens = tensors.take("seq_lens", {DType::i32}, {-1});
  const int64_t count = lens.sizes[0];
  const HostTensor starts = tensors.take("query_start_loc", {DType::i32}, {count + 1});
  const auto take_drafts = [&](const char* name) {
    return tensors.take_if(num_drafts > 0 && tensors.has(name), name, DType::i32, {count});
  };
  const HostTensor drafts = take_drafts("num_drafts"), accepted = take_drafts("accepted_drafts");
  StateCaseRequests requests;
  for (const int q_len : query_lens(starts)) {
    const int r = int(requests.size()), seq_len = int(lens.get(r));
    check(seq_len >= 0, "case_file.seq_lens.negative", "seq_lens[{}] is {}", r, seq_len);
    check(seq_len >= q_len, "case_file.seq_lens.shorter_than_query", "request {} has {} tokens of the step and only {} in all", r, q_len,
          seq_len);
    requests.push_back({.q_len = q_len,
                        .context_len = seq_len - q_len,
                        .drafts = drafts.empty() ? 0 : int(drafts.get(r)),
                        .accepted = accepted.empty() ? 0 : int(accepted.get(r)),
                        .id = r});
    check_state_request(num_drafts, requests.back());
  }
  return requests;
}

void add_state_requests(Safetensors& file, const StateCaseRequests& requests, int num_drafts) {
  std::vector<int32_t> starts{0}, lens, drafts, accepted;
  for (const StateCaseRequest& r : requests) {
    starts.push_back(starts.back() + r.q_len);
    lens.push_back(r.context_len + r.q_len);
    drafts.push_back(r.drafts);
    accepted.push_back(r.accepted);
  }
  file.tensors["query_start_loc"] = tensor_of(starts);
  file.tensors["seq_lens"] = tensor_of(lens);
  if (num_drafts > 0) file.tensors["num_drafts"] = tensor_of(drafts), file.tensors["accepted_drafts"] = tensor_of(accepted);
}

bool have_no_drafts(const StateCaseRequests& requests) {
  return std::ranges::all_of(requests, [](const StateCaseRequest& r) { return r.drafts == 0 && r.accepted == 0; });
}

}  // namespace imbrex

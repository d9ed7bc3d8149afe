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
  const int certain = r.q_len - r.drafts;
  for (int t = certain; t < r.q_len; ++t)
    check(r.parent_of(t) >= certain - 1 && r.parent_of(t) < t, "case_file.draft_parents",
          "expected a parent of {} to {} for token {} of request {}, got {}", certain - 1, t - 1, t, r.id, r.parent_of(t));
}

}  // namespace

StateCaseRequests take_state_requests(CaseTensors& tensors, const StateDrafts& of_layer) {
  const int num_drafts = of_layer.most;
  const HostTensor lens = tensors.take("seq_lens", {DType::i32}, {-1});
  const int64_t count = lens.sizes[0];
  const HostTensor starts = tensors.take("query_start_loc", {DType::i32}, {count + 1});
  const auto take_drafts = [&](const char* name) {
    return tensors.take_if(num_drafts > 0 && tensors.has(name), name, DType::i32, {count});
  };
  const HostTensor drafts = take_drafts("num_drafts"), accepted = take_drafts("accepted_drafts");
  const bool has_parents = of_layer.tree && tensors.has("draft_parents");
  const std::vector<int> q_lens = query_lens(starts);
  const HostTensor parents = tensors.take_if(has_parents, "draft_parents", DType::i32, {int64_t(starts.get(count))});
  const HostTensor padding = tensors.take_if(tensors.has("is_padding"), "is_padding", DType::i32, {count});
  StateCaseRequests requests;
  for (const int q_len : q_lens) {
    const int r = int(requests.size()), seq_len = int(lens.get(r));
    check(seq_len >= 0, "case_file.seq_lens.negative", "seq_lens[{}] is {}", r, seq_len);
    check(seq_len >= q_len, "case_file.seq_lens.shorter_than_query", "request {} has {} tokens of the step and only {} in all", r, q_len,
          seq_len);
    requests.push_back({.q_len = q_len,
                        .context_len = seq_len - q_len,
                        .drafts = drafts.empty() ? 0 : int(drafts.get(r)),
                        .accepted = accepted.empty() ? 0 : int(accepted.get(r)),
                        .id = r,
                        .is_padding = !padding.empty() && padding.get(r) != 0});
    StateCaseRequest& request = requests.back();
    for (int t = q_len - std::clamp(request.drafts, 0, q_len); has_parents && t < q_len; ++t)
      request.parents.push_back(int(parents.get(int64_t(starts.get(r)) + t)));
    check_state_request(num_drafts, requests.back());
  }
  return requests;
}

void add_state_requests(Safetensors& file, const StateCaseRequests& requests, const StateDrafts& of_layer) {
  std::vector<int32_t> starts{0}, lens, drafts, accepted, parents;
  for (const StateCaseRequest& r : requests) {
    starts.push_back(starts.back() + r.q_len);
    lens.push_back(r.context_len + r.q_len);
    drafts.push_back(r.drafts);
    accepted.push_back(r.accepted);
    for (int t = 0; t < r.q_len; ++t) parents.push_back(r.parent_of(t));
  }
  file.tensors["query_start_loc"] = tensor_of(starts);
  file.tensors["seq_lens"] = tensor_of(lens);
  if (of_layer.most > 0) file.tensors["num_drafts"] = tensor_of(drafts), file.tensors["accepted_drafts"] = tensor_of(accepted);
  if (of_layer.tree) file.tensors["draft_parents"] = tensor_of(parents);
  if (!has_padding(requests)) return;
  std::vector<int32_t> padding;
  for (const StateCaseRequest& r : requests) padding.push_back(r.is_padding);
  file.tensors["is_padding"] = tensor_of(padding);
}

bool have_no_drafts(const StateCaseRequests& requests) {
  return std::ranges::all_of(requests, [](const StateCaseRequest& r) { return r.drafts == 0 && r.accepted == 0; });
}

}  // namespace imbrex

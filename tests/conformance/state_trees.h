#pragma once
// Trees of drafts against their paths, for cases of layers that keep a state of each request in a slot.
#include <algorithm>
#include <cstring>
#include <vector>

#include "conformance/host_tensor.h"
#include "conformance/state_case.h"

namespace imbrex::test {

// A step with trees of drafts, and one behind it that begins from a draft of each; and steps that compute the paths to these drafts as
// chains. A request's tokens of the second step lie behind those of its tree.
struct TreeAndPaths {
  static constexpr int kBehind = 2;  // tokens of the second step
  StateCaseRequests tree, paths;
  std::vector<StateParts> tree_steps, path_steps;
  std::vector<int64_t> tokens;  // of each token of the paths, which one of the trees it is

  // `accepted`: the draft that is kept, counted from 1, or the request's last one; 0: none.
  TreeAndPaths(const StateCaseRequests& requests, int accepted) : tree_steps(2), path_steps(2) {
    int64_t first = 0;
    for (const StateCaseRequest& r : requests) {
      const int kept = std::min(accepted, r.drafts), certain = r.q_len - r.drafts;
      const bool has_tokens = r.q_len > 0;
      std::vector<int> path;
      if (has_tokens)  // where no draft is kept, the first one is there, so that drafts stay drafts
        for (int t = certain + (r.drafts > 0 ? std::max(kept, 1) : 0) - 1; t >= 0; t = r.parent_of(t)) path.push_back(t);
      std::ranges::reverse(path);
      const int length = int(path.size());
      const int drafts = int(std::ranges::count_if(path, [&](int t) { return t >= certain; }));
      StateCaseRequest whole = r, chain = r;
      whole.q_len += has_tokens ? kBehind : 0, whole.drafts = 0, whole.parents.clear();
      chain = whole, chain.q_len = length + (has_tokens ? kBehind : 0);
      tree.push_back(whole), paths.push_back(chain);
      tree_steps[0].push_back({0, r.q_len, r.drafts, r.accepted, r.parents});
      tree_steps[1].push_back({r.q_len, whole.q_len, 0, kept});
      path_steps[0].push_back({0, length, drafts, r.accepted});
      path_steps[1].push_back({length, chain.q_len, 0, kept > 0 ? drafts : 0});
      for (const int t : path) tokens.push_back(first + t);
      for (int t = r.q_len; t < whole.q_len; ++t) tokens.push_back(first + t);
      first += whole.q_len;
    }
  }
};

// Rows of a tensor with a row for each token; of none, none.
inline HostTensor token_rows(const HostTensor& t, const std::vector<int64_t>& rows) {
  if (t.empty()) return t;
  std::vector<int64_t> sizes = t.sizes;
  sizes[0] = int64_t(rows.size());
  HostTensor picked = HostTensor::make(t.dtype, sizes);
  const size_t row_bytes = t.bytes.size() / size_t(t.sizes[0]);
  for (size_t i = 0; i < rows.size(); ++i)
    std::memcpy(picked.bytes.data() + i * row_bytes, t.bytes.data() + size_t(rows[i]) * row_bytes, row_bytes);
  return picked;
}

// Rows of so many numbers.
inline std::vector<float> token_rows(const std::vector<float>& t, size_t numbers, const std::vector<int64_t>& rows) {
  std::vector<float> picked;
  for (const int64_t row : rows) picked.insert(picked.end(), t.begin() + row * long(numbers), t.begin() + (row + 1) * long(numbers));
  return picked;
}

// The requests with the parents of their chains said.
inline StateCaseRequests with_chains_as_trees(StateCaseRequests requests) {
  for (StateCaseRequest& r : requests) {
    r.parents.clear();
    for (int t = r.q_len - r.drafts; t < r.q_len; ++t) r.parents.push_back(t - 1);
  }
  return requests;
}
inline StateCaseRequests without_parents(StateCaseRequests requests) {
  for (StateCaseRequest& r : requests) r.parents.clear();
  return requests;
}

}  // namespace imbrex::test

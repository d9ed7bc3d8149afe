#pragma once
// Trees of drafts as the reference backends compute them: by walking from a token to its root. Other backends have find_nodes().
#include <cstdint>
#include <vector>

#include "attention/draft_tree.h"
#include "imbrex/batch.h"

namespace imbrex {

class ReferenceTree {
 public:
  // Of a step under Mask::tree.
  void set(const Batch& batch) {
    starts_.assign(batch.query_start_loc.begin(), batch.query_start_loc.end());
    parents_.clear(), depths_.clear();
    for (int r = 0; r < batch.num_reqs(); ++r)
      for (int t = 0; t < batch.query_len(r); ++t) {
        const int parent = parent_of(batch, r, t);
        parents_.push_back(parent);
        depths_.push_back(parent < 0 ? 0 : depths_[row(r, parent)] + 1);
      }
  }

  // How many queries are on the way from a query of request `r` to its root, without itself.
  int depth(int r, int64_t query) const { return depths_[row(r, query)]; }

  // Whether query number `above` of request `r` is on the way from query number `query` to its root, or that query itself.
  bool is_above(int r, int64_t above, int64_t query) const {
    if (depth(r, query) == query) return above <= query;  // all in front of it are
    while (query > above) query = parents_[row(r, query)];
    return query == above;
  }

 private:
  size_t row(int r, int64_t query) const { return size_t(starts_[size_t(r)] + query); }
  std::vector<int32_t> starts_, parents_, depths_;  // the last two of all query tokens
};

}  // namespace imbrex

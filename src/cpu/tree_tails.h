#pragma once
// What CPU kernels read of trees of drafts: of a request whose queries are one, bytes like those of a custom mask, but of its last keys
// alone, from the block on in which the keys of its queries begin. The blocks in front of these are computed as those of a causal layer.
#include <vector>

#include "attention/draft_tree.h"
#include "cpu/params.h"
#include "imbrex/schedule.h"

namespace imbrex::cpu {

class TreeTails {
 public:
  // Of a step under Mask::tree.
  void find(const Batch&, const Mask&);
  // Gives the items of the list's trees stretches: the keys in front of the tails, which are hidden from no query, and the tails.
  void add_stretches(Schedule&);
  // Leaves the parameters as they are where all requests are chains.
  void set(AttentionParams&) const;

 private:
  std::vector<TreeTail> tails_;  // of requests; empty: all are chains
  std::vector<unsigned char> shown_;
  std::vector<int> key_positions_, positions_;
  // Of one request at a time, and of one item: where the tails of its requests begin within its keys.
  std::vector<TreeNode> nodes_;
  std::vector<int> begins_;
};

}  // namespace imbrex::cpu

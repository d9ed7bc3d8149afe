#pragma once
// What a plan gives kernels of trees of drafts.
#include <vector>

#include "attention/draft_tree.h"
#include "cuda/params.h"

namespace imbrex::cuda {

struct TreeArrays {
  std::vector<int> positions, first;
  std::vector<unsigned long> seen;

  TreeArrays(const Batch& batch, const Mask& mask) {
    std::vector<TreeNode> nodes;
    if (mask.tree) find_nodes(batch, mask, nodes);
    for (const TreeNode& node : nodes) positions.push_back(node.position), first.push_back(node.first), seen.push_back(node.seen);
  }
  // Gives them to a kernel, under a mask that has them.
  TreeArrays(const Batch& batch, const Mask& mask, AttentionParams& p) : TreeArrays(batch, mask) {
    if (mask.tree) p.positions = positions.data(), p.tree_first = first.data(), p.tree_seen = seen.data();
  }
};

}  // namespace imbrex::cuda

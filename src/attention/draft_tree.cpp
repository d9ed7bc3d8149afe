// See draft_tree.h.
#include "attention/draft_tree.h"

#include <algorithm>
#include <array>

#include "attention/mask.h"
#include "core/check.h"

namespace imbrex {

bool is_chain(const Batch& batch, int r) {
  if (batch.draft_parents.empty()) return true;
  for (int t = 0, count = batch.query_len(r); t < count; ++t)
    if (parent_of(batch, r, t) != t - 1) return false;
  return true;
}

void check_draft_parents(const Batch& batch, bool of_trees) {
  const auto parents = batch.draft_parents;
  if (parents.empty()) return;
  check(of_trees, "batch.draft_parents.unexpected", "expected none for a layer whose mask is no tree, got {}", parents.size());
  check(parents.size() >= size_t(batch.num_tokens()), "batch.draft_parents.size", "expected {} entries, got {}", batch.num_tokens(),
        parents.size());
  const auto drafts = batch.num_drafts;
  check(drafts.empty() || drafts.size() == size_t(batch.num_reqs()), "batch.draft_parents.num_drafts",
        "num_drafts: expected {} entries, got {}", batch.num_reqs(), drafts.size());
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int q_len = batch.query_len(r);
    if (q_len == 0) continue;
    const int own = drafts.empty() ? q_len : drafts[size_t(r)];
    check(own >= 0 && own <= q_len, "batch.draft_parents.num_drafts", "expected 0 to {} drafts of request {}, got {}", q_len, r, own);
    for (int t = q_len - own; t < q_len; ++t) {
      const int parent = parent_of(batch, r, t);
      check(parent >= -1 && parent < t, "batch.draft_parents.range", "expected a parent of -1 to {} for token {} of request {}, got {}",
            t - 1, t, r, parent);
      check(q_len <= kMostTreeTokens || parent == t - 1, "batch.draft_parents.chain",
            "a tree has at most {} tokens: expected each of the {} tokens of request {} to follow the one in front of it, token {} follows "
            "{}",
            kMostTreeTokens, q_len, r, t, parent);
    }
  }
}

PositionRange tree_positions(const Batch& batch, int r, int t0, int t1) {
  const int q_len = batch.query_len(r), context = batch.context_len(r);
  if (batch.draft_parents.empty() || q_len > kMostTreeTokens) return usual_positions(q_len, batch.seq_lens[size_t(r)], t0, t1);
  std::array<int, kMostTreeTokens> depth{};
  int least = q_len;
  for (int t = 0; t < t1; ++t) {
    const int parent = parent_of(batch, r, t);
    depth[size_t(t)] = parent < 0 ? 0 : depth[size_t(parent)] + 1;
    if (t >= t0) least = std::min(least, depth[size_t(t)]);
  }
  return {context + least, context + t1 - 1};
}

static void append_nodes(const Batch& batch, const Mask& mask, int r, std::vector<TreeNode>& nodes) {
  const int q_len = batch.query_len(r), context = batch.context_len(r);
  const bool has_bits = q_len <= kMostTreeTokens;
  const size_t begin = nodes.size();
  for (int t = 0; t < q_len; ++t) {
    const int parent = has_bits ? parent_of(batch, r, t) : t - 1;
    TreeNode node{.seen = has_bits ? uint64_t(1) << t : 0, .position = context};
    if (parent >= 0) node.seen |= nodes[begin + size_t(parent)].seen, node.position = nodes[begin + size_t(parent)].position + 1;
    node.first = int(first_visible_key(mask, node.position));
    nodes.push_back(node);
  }
  if (!forgets(mask) || !has_bits) return;
  for (size_t t = begin; t < nodes.size(); ++t)
    for (size_t k = begin; k < t; ++k)
      if (nodes[k].position < nodes[t].first) nodes[t].seen &= ~(uint64_t(1) << (k - begin));
}

void find_nodes(const Batch& batch, const Mask& mask, int r, std::vector<TreeNode>& nodes) {
  nodes.clear();
  append_nodes(batch, mask, r, nodes);
}

void find_nodes(const Batch& batch, const Mask& mask, std::vector<TreeNode>& nodes) {
  nodes.clear();
  for (int r = 0; r < batch.num_reqs(); ++r) append_nodes(batch, mask, r, nodes);
}

}  // namespace imbrex

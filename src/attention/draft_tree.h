#pragma once
// Trees of drafts (Mask::tree): what Batch::draft_parents says of the query tokens of a request, and what each of them sees of the others.
#include <cstdint>
#include <span>
#include <vector>

#include "attention/cut_item.h"
#include "imbrex/batch.h"
#include "imbrex/spec.h"

namespace imbrex {

// The token that query token `t` of request `r` follows, counted from 0 among the request's tokens; -1: it follows the context.
inline int parent_of(const Batch& batch, int r, int t) {
  if (batch.draft_parents.empty()) return t - 1;
  const int first_draft = batch.num_drafts.empty() ? 0 : batch.query_len(r) - batch.num_drafts[size_t(r)];
  return t < first_draft ? t - 1 : batch.draft_parents[size_t(batch.query_start_loc[size_t(r)]) + size_t(t)];
}
// Whether each token follows the one in front of it, so that a causal mask says the same.
bool is_chain(const Batch&, int r);

// Errors batch.draft_parents.*
void check_draft_parents(const Batch&, bool of_trees);

// Where the queries [t0, t1) of a request stand, for cut_item(): the least of their positions, since windows and chunks begin by that, and
// the index of the last one's key among the request's keys, since behind it there are no ancestors.
PositionRange tree_positions(const Batch&, int r, int t0, int t1);

// A query token.
struct TreeNode {
  uint64_t seen = 0;  // bit k: it sees the key of its request's query token k. In a chain longer than kMostTreeTokens: no bits
  int position = 0;   // number of keys in front of its request's queries, plus its depth
  int first = 0;      // the first key that windows and chunks leave it
};
// Those of a request, in their order. A key that the mask hides by its position, which its depth says, is not seen.
void find_nodes(const Batch&, const Mask&, int r, std::vector<TreeNode>&);
// Those of all requests.
void find_nodes(const Batch&, const Mask&, std::vector<TreeNode>&);

}  // namespace imbrex

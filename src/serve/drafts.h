#pragma once
// Drafts that a replay makes for a token that is certain, as a chain or a tree, and which of them are kept: from hashes, so that the same
// token of a request has the same ones whatever is computed beside it.
#include <cstdint>
#include <vector>

namespace imbrex::serve {

constexpr int kMostDrafts = 64;  // that a layer with states takes back

struct DraftOptions {
  int tokens = 0;  // drafts of a request in a step at most; 0: none are made
  bool tree = false;
  double acceptance = 0.7;  // chance of a draft to be kept where the one that it follows is: in a tree, of any of those that follow it
};

struct Drafts {
  std::vector<int> parents;  // of each draft the one that it follows, counted from 0; -1: the certain token
  std::vector<int> depths;   // of each draft: drafts on the path to it, its own included
  std::vector<int> kept;     // on the path from the certain token, in order

  int count() const { return int(parents.size()); }
  // The number of the last one that is kept, as Batch::accepted_drafts has it: counted from 1; 0: none is.
  int last_kept() const { return kept.empty() ? 0 : kept.back() + 1; }
};

// `count` drafts, of paths of at most `depth`: at least 1 of both. In a chain no more than `depth`.
Drafts make_drafts(const DraftOptions&, int count, int depth, uint64_t key);

}  // namespace imbrex::serve

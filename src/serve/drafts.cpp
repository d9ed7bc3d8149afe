// See drafts.h.
#include "serve/drafts.h"

#include <algorithm>

#include "serve/hash.h"

namespace imbrex::serve {

Drafts make_drafts(const DraftOptions& options, int count, int depth, uint64_t key) {
  enum Tag : uint64_t { kParent, kAccept, kChild };
  Drafts drafts;
  if (!options.tree) count = std::min(count, depth);
  for (int i = 0; i < count; ++i) {
    int parent = options.tree ? int(hash_numbers(key, kParent, uint64_t(i)) % uint64_t(i + 1)) - 1 : i - 1;
    if (parent >= 0 && drafts.depths[size_t(parent)] == depth) parent = -1;
    drafts.parents.push_back(parent);
    drafts.depths.push_back(parent < 0 ? 1 : drafts.depths[size_t(parent)] + 1);
  }
  for (int at = -1;;) {
    std::vector<int> next;
    for (int i = at + 1; i < count; ++i)
      if (drafts.parents[size_t(i)] == at) next.push_back(i);
    const uint64_t behind = drafts.kept.size();  // paths have a draft of each length
    const double chance = double(hash_numbers(key, kAccept, behind) >> 11) * 0x1p-53;
    if (next.empty() || chance >= options.acceptance) return drafts;
    at = next[hash_numbers(key, kChild, behind) % next.size()];
    drafts.kept.push_back(at);
  }
}

}  // namespace imbrex::serve

// See slices.h.
#include "mla/slices.h"

#include <algorithm>

namespace imbrex {

int keys_of(const Batch& batch, const Mask& mask, const MlaQueries& queries) {
  const int r = queries.request;
  return mask.causal ? batch.context_len(r) + queries.q_end - batch.query_start_loc[r] : batch.seq_lens[r];
}

// A slice has room for a tree of drafts, so that of requests under Mask::tree only chains are cut. A causal mask counts positions from the
// last key, which is that of the last query of a part, too. Other windows and chunks count from the last of all queries.
bool can_cut_queries(const Mask& mask) {
  if (mask.custom || mask.positions) return false;
  return mask.causal || (mask.window_left < 0 && mask.window_right < 0 && mask.chunk == 0);
}

void MlaSlices::add(const Batch& batch, int r, int most, bool neighbours) {
  const int end = batch.query_start_loc[r + 1];
  for (int begin = batch.query_start_loc[r]; begin < end;) {
    const int part = std::min(most, end - begin);
    const bool apart = neighbours && count_ > 0 && slices_[count_ - 1].queries.back().q_end != begin;
    if (count_ == 0 || apart || slices_[count_ - 1].num_tokens + part > most) {
      if (count_ == slices_.size()) slices_.emplace_back();
      slices_[count_].queries.clear(), slices_[count_].num_tokens = 0;
      ++count_;
    }
    MlaSlice& to = slices_[count_ - 1];
    to.queries.push_back({r, begin, begin + part});
    to.num_tokens += part;
    begin += part;
  }
}

int64_t least_tokens_before(size_t i, int most, int most_queries) {
  const int64_t room_left = most - std::min(most, most_queries) + 1;  // of a slice that a part did not fit: its tokens at least
  return std::max(int64_t(i) * room_left, int64_t(i / 2) * (most + 1));
}

size_t most_slices(int tokens, int most, int most_queries) {
  size_t count = 1;
  while (tokens > most && least_tokens_before(count, most, most_queries) < tokens) ++count;
  return count;
}

}  // namespace imbrex

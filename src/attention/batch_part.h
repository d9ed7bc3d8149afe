#pragma once
// Some requests of a batch as a batch of their own: every request stays, those of others with no query tokens, so that block tables, CSR
// arrays and seq_lens are passed through untouched. That leaves the token axis:
//  - the tokens of a part are contiguous (engines order a step by phase, or it is all one phase): views, nothing is copied;
//  - they are not: slots, mask rows, positions and parents of drafts are gathered here, and rows of tensors by token_rows.h.
#include <cstdint>
#include <vector>

#include "attention/token_rows.h"
#include "imbrex/batch.h"

namespace imbrex {

struct BatchPart {
  std::vector<TokenRange> ranges;  // merged where they touch; empty: nothing to do this step
  int num_tokens = 0;
  std::vector<int32_t> query_start_loc;
  std::vector<int64_t> slots;                     // slot_mapping of this part's tokens, when gathered
  std::vector<uint8_t> custom_mask;               // likewise
  std::vector<int32_t> positions, draft_parents;  // likewise
  std::vector<int32_t> mask_indptr;               // of a packed mask, which a part keeps whole

  bool contiguous() const { return ranges.size() == 1; }
};

// Makes `part` of those requests with tokens for which is_mine(request) is true.
template <class IsMine>
void take_part(const Batch& batch, BatchPart& part, const IsMine& is_mine) {
  part.ranges.clear();
  part.query_start_loc.assign(1, 0);
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int q_len = batch.query_len(r);
    const bool mine = q_len > 0 && is_mine(r);
    part.query_start_loc.push_back(part.query_start_loc.back() + (mine ? q_len : 0));
    if (!mine) continue;
    const TokenRange range{batch.query_start_loc[r], batch.query_start_loc[r + 1]};
    if (!part.ranges.empty() && part.ranges.back().end == range.begin) {
      part.ranges.back().end = range.end;
    } else {
      part.ranges.push_back(range);
    }
  }
  part.num_tokens = part.query_start_loc.back();
}

// The batch of a part that take_part() has filled; it has views of the part.
Batch batch_of(const Batch&, BatchPart&);

}  // namespace imbrex

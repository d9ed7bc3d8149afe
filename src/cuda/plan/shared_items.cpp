// See shared_items.h.
#include "cuda/plan/shared_items.h"

#include <algorithm>

namespace imbrex::cuda {

void write_merges(const Schedule& list, MergeItem* to) {
  for (MergeItem merge : list.merges) {
    if (!list.details.parts.empty()) merge.first_partial = ~merge.first_partial;
    *to++ = merge;
  }
}

void write_items(const Schedule& list, WorkItem* to) {
  if (list.details.tokens.empty()) {
    if (list.details.items.empty() && !list.items.empty()) return write_work(list, to);
    std::ranges::copy(list.work, to);
    return;
  }
  const int num_tokens = int(list.details.request_of.size());  // kernels are given the tokens behind those of the batch
  for (WorkItem item : list.work) {
    if (item.q_begin >= num_tokens) item.q_begin -= num_tokens, item.q_end -= num_tokens;
    *to++ = item;
  }
}

void write_shared_tokens(const ListDetails& details, SharedToken* to) {
  const int* token = details.tokens.data() + details.request_of.size();
  for (const int merge : details.merge_of) *to++ = {*token++, merge};
}

}  // namespace imbrex::cuda

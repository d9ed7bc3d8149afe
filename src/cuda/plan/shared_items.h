#pragma once
// A list in the form in which kernels read it, where several requests may share items: AttentionParams::shared_tokens says what that form
// is, ListDetails what the host's is. A list without details is the same in both.
#include "cuda/params.h"
#include "imbrex/schedule.h"

namespace imbrex::cuda {

void write_merges(const Schedule&, MergeItem* to);  // list.merges.size() of them
// Schedule::num_work items. Of a list without details write_work() writes them, since nothing else has.
void write_items(const Schedule&, WorkItem* to);
void write_shared_tokens(const ListDetails&, SharedToken* to);  // merge_of.size() of them

}  // namespace imbrex::cuda

// One scheduler step as arrays (see step_plan.h).
#include "serve/step_plan.h"

#include "serve/hash.h"

namespace imbrex::serve {

namespace {

constexpr uint64_t kSharedToken = 1, kOwnToken = 2;  // domains of token_id

}  // namespace

uint64_t token_id(uint64_t seed, const TraceRequest& request, int prefix_block, int id, int position) {
  if (position < request.input_length && prefix_block > 0) {
    return hash_numbers(seed, kSharedToken, request.prefix_ids[size_t(position / prefix_block)], uint64_t(position % prefix_block));
  }
  return hash_numbers(seed, kOwnToken, uint64_t(id), uint64_t(position));
}

bool StepPlan::decodes_only() const {
  for (int r = 0; r < num_reqs(); ++r)
    if (certain_tokens(r) != 1) return false;
  return true;
}

Batch StepPlan::batch(int group) const {
  const Group& g = groups[size_t(group)];
  Batch batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  if (g.block_table.empty()) {
    batch.state_slots = state_slots;
    batch.source_slots = source_slots;
    batch.num_drafts = num_drafts, batch.accepted_drafts = accepted_drafts, batch.draft_parents = draft_parents;
    return batch;
  }
  batch.block_table = TensorView::contiguous(const_cast<int32_t*>(g.block_table.data()), DType::i32, {num_reqs(), stride});
  batch.slot_mapping = TensorView::contiguous(const_cast<int64_t*>(g.slot_mapping.data()), DType::i64, {num_tokens()});
  if (!draft_parents.empty()) batch.num_drafts = num_drafts, batch.draft_parents = draft_parents;
  return batch;
}

Batch StepPlan::kept_batch(int group) const {
  Batch kept = batch(group);
  kept.slot_mapping.data = const_cast<int64_t*>(groups[size_t(group)].kept_slots.data());
  return kept;
}

}  // namespace imbrex::serve

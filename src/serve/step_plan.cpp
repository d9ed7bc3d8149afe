// One scheduler step as arrays (see step_plan.h).
#include "serve/step_plan.h"

#include "serve/hash.h"

namespace imbrex::serve {

namespace {

enum Domain : uint64_t { kSharedToken = 1, kOwnToken, kSystemToken, kImageToken };  // of token_id

uint64_t id_of_text(uint64_t seed, const TraceRequest& request, int prefix_block, int id, int position) {
  if (position < request.system_tokens) return hash_numbers(seed, kSystemToken, uint64_t(position));
  const int behind = position - request.system_tokens;
  if (position < request.input_length && prefix_block > 0) {
    return hash_numbers(seed, kSharedToken, request.prefix_ids[size_t(behind / prefix_block)], uint64_t(behind % prefix_block));
  }
  return hash_numbers(seed, kOwnToken, uint64_t(id), uint64_t(position));
}

}  // namespace

uint64_t token_id(uint64_t seed, const TraceRequest& request, int prefix_block, int id, int position) {
  const uint64_t text = id_of_text(seed, request, prefix_block, id, position);
  const TokenSpan* const image = image_at(request, position);  // what its tokens are depends on all of it
  return image == nullptr ? text : hash_numbers(text, kImageToken, uint64_t(image->begin), uint64_t(image->end));
}

int StepPlan::position(int request, int query) const {
  const auto r = size_t(request);
  if (!positions.empty()) return positions[size_t(query_start_loc[r]) + size_t(query)];
  const int certain = certain_tokens(request);
  return first_positions[r] + (query < certain ? query : certain - 1 + drafts[r].depths[size_t(query - certain)]);
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
  batch.positions = positions;
  if (!draft_parents.empty()) batch.num_drafts = num_drafts, batch.draft_parents = draft_parents;
  return batch;
}

Batch StepPlan::kept_batch(int group) const {
  Batch kept = batch(group);
  kept.slot_mapping.data = const_cast<int64_t*>(groups[size_t(group)].kept_slots.data());
  return kept;
}

}  // namespace imbrex::serve

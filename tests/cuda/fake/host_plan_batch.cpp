// See host_plan_batch.h.
#include "cuda/fake/host_plan_batch.h"

#include <algorithm>
#include <cstdlib>

#include "cuda/tree_arrays.h"
#include "imbrex/schedule.h"

namespace imbrex::cuda::fake {
namespace {

SchedulePolicy policy_of(const CutRules& r) {
  return {.tile_q = r.tile_q,
          .tile_kv = r.tile_kv,
          .split_kv = r.split_kv,
          .split_max_q = r.split_max_q,
          .num_workers = r.num_workers,
          .max_splits = r.max_splits,
          .share_splits = r.share_splits,
          .longest_kv = r.longest_kv,
          .max_split_rows = r.max_split_rows,
          .split_kv_each = r.split_kv_each,
          .min_q = r.min_q,
          .max_q = r.max_q,
          .runs = r.runs,
          .most_in_run = r.most_in_run,
          .most_partial_rows = r.most_partial_rows,
          .few_splits = r.few_splits,
          .items_each = r.items_each,
          .workers_each = r.workers_each,
          .cost_by_keys = r.cost_by_keys};
}

}  // namespace

void plan_batch(const PlanBatchParams& p, const Mask& mask) {
  Batch batch;
  batch.query_start_loc = {p.starts_from, size_t(p.num_reqs) + 1};
  batch.seq_lens = {p.lengths_from, size_t(p.num_reqs)};
  std::copy_n(p.starts_from, p.num_reqs + 1, p.query_start);
  std::copy_n(p.lengths_from, p.num_reqs, p.seq_lens);
  long custom = 0;
  for (int r = 0; r < p.num_reqs; ++r) {
    p.block_start[r] = p.kv_starts ? p.kv_starts[r] : r * p.kv_stride;
    if (p.custom_start) p.custom_start[r] = custom;
    const long pairs = long(batch.query_len(r)) * batch.seq_lens[r];
    custom += p.mask_is_packed ? (pairs + 7) / 8 * 8 : pairs;
  }
  if (custom > p.mask_size && p.custom_start) std::abort();
  for (int token = 0; p.positions_from && token < batch.num_tokens(); ++token)
    p.positions[token] = std::clamp(p.positions_from[token], 0, p.most_position);
  if (p.positions && !mask.tree) batch.positions = {p.positions, size_t(batch.num_tokens())};
  if (p.parents_from) batch.draft_parents = {p.parents_from, size_t(batch.num_tokens())};
  if (p.num_drafts_from) batch.num_drafts = {p.num_drafts_from, size_t(p.num_reqs)};
  if (p.tree_seen) {
    const TreeArrays arrays(batch, mask);
    std::ranges::copy(arrays.positions, p.positions);
    std::ranges::copy(arrays.first, p.tree_first);
    std::ranges::copy(arrays.seen, p.tree_seen);
  }
  int rows = 0;
  for (const RegimeLists& regime : p.regimes) {
    SchedulePolicy policy = policy_of(regime.rules);
    policy.first_partial = rows;
    Schedule s;
    schedule(batch, mask, policy, s);
    std::copy(s.work.begin(), s.work.end(), regime.work);
    std::copy(s.merges.begin(), s.merges.end(), regime.merges);
    rows += s.num_partial_rows;
    *regime.counts = {.num_work = s.num_work,
                      .num_merges = int(s.merges.size()),
                      .num_tokens = batch.num_tokens(),
                      .num_reqs = p.num_reqs,
                      .heads_together = 1};
  }
}

}  // namespace imbrex::cuda::fake

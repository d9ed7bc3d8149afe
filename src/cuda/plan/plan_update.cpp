// The part of plan.h that takes a batch whose lengths are on the host: prepare() checks it, cuts it and writes it to pinned memory,
// commit() sends it.
#include <algorithm>

#include "attention/mask_mod_stretches.h"
#include "attention/packed_mask.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/attention/expressions.h"
#include "cuda/plan/plan.h"
#include "cuda/plan/shared_items.h"

namespace imbrex::cuda {
namespace {

// A step's arrays are all on the host or all on the device: validate() checks that.
void check_batch_memory(const Batch& batch, Device device) {
  constexpr std::string_view code = "update.device";
  const auto check_one = [&](const TensorView& t, const char* name) {
    if (!on_host(t)) check_memory(t, name, code, device);
  };
  check_one(batch.block_table, "block_table");
  check_one(batch.kv_indptr, "kv_indptr");
  check_one(batch.kv_indices, "kv_indices");
  check_one(batch.kv_start_loc, "kv_start_loc");
  check_one(batch.slot_mapping, "slot_mapping");
  check_one(batch.custom_mask, "custom_mask");
  check_one(batch.packed_mask, "packed_mask");
}

// That which the batch has of the two, bytes or bits.
const TensorView& custom_mask_of(const Batch& batch) { return batch.packed_mask.empty() ? batch.custom_mask : batch.packed_mask; }

// The number of block ids of the requests' keys, in whichever of the batch's arrays they are; 0 without blocks.
int64_t num_block_ids(const Batch& batch, const AttentionSpec& spec) {
  int64_t count = 0;
  for (int r = 0; spec.block_size > 0 && r < batch.num_reqs(); ++r) count += blocks_of(batch.seq_lens[r], spec.block_size);
  return count;
}

int heads_together(const Batch& batch, const SchedulePolicy& policy, long l2_keys, int num_kv_heads) {
  long keys = 0;  // of the requests that are cut by the policy
  for (int r = 0; l2_keys > 0 && r < batch.num_reqs(); ++r)
    if (const int q_len = batch.query_len(r); q_len >= policy.min_q && q_len <= policy.max_q) keys += batch.seq_lens[r];
  return heads_in_l2(l2_keys, keys, num_kv_heads);
}

}  // namespace

// The addresses of the batch's arrays for kernels. It throws before anything of the last step is changed.
Plan::BatchArrays Plan::place(const Batch& batch, bool captured) const {
  const TensorView& ids = !batch.block_table.empty() ? batch.block_table : batch.kv_indices;
  const BatchArrays& before = steps_.now().arrays;
  BatchArrays placed = before;
  if (!ids.empty()) {
    const int64_t count = on_host(ids) ? num_block_ids(batch, spec_) : 0;
    check(count <= int64_t(arrays_.block_ids.capacity), "update.block_ids",
          "expected host block tables with {} blocks in use at most, got {}: put them into device memory", arrays_.block_ids.capacity,
          count);
    placed.block_ids = on_host(ids) ? memory_->device(arrays_.block_ids) : ids.as<const int>();
  }
  if (const TensorView& mask = custom_mask_of(batch); !mask.empty()) {
    const int64_t bytes = on_host(mask) ? mask_bytes_in_use(batch) : 0;
    check(bytes <= int64_t(arrays_.custom_mask.capacity), "update.custom_mask",
          "expected a host custom mask with {} bytes in use at most, got {} of {}: put it into device memory", arrays_.custom_mask.capacity,
          bytes, mask);
    placed.custom_mask = on_host(mask) ? memory_->device(arrays_.custom_mask) : mask.as<const unsigned char>();
    placed.mask_is_packed = !batch.packed_mask.empty();
  }
  placed.has_slots = !batch.slot_mapping.empty();
  if (placed.has_slots) {
    placed.slots = on_host(batch.slot_mapping) ? TensorView::contiguous(memory_->device(arrays_.slots), DType::i64,
                                                                        {int64_t(arrays_.slots.capacity)}, device_.device)
                                               : batch.slot_mapping;
  }
  // A run() that is captured together with an update_on_device() reads the arrays which that names.
  const bool same_run =
      placed.block_ids == before.block_ids && placed.custom_mask == before.custom_mask && placed.mask_is_packed == before.mask_is_packed;
  const bool same = captured || ((!captured_run_ || same_run) && (!captured_write_ || placed.slots.data == before.slots.data));
  check(same, "update.moved",
        "a captured graph reads the block ids, slots or custom mask of an earlier update from another place, or bytes in place of bits");
  return placed;
}

void Plan::prepare(const Batch& batch, Stream stream) {
  if (options_.validate) validate(batch, spec_, options_.limits, -1);
  check_batch_memory(batch, device_.device);
  const CurrentContext current(*context_);
  check(!is_captured(cu_stream(stream)), "update.captured", "expected a stream that captures nothing: update() is not part of a graph");
  const PlanLimits& limits = options_.limits;
  check(batch.num_reqs() <= limits.max_num_reqs && batch.num_tokens() <= limits.max_num_tokens, "update.limits",
        "expected at most {} requests and {} tokens, got {} and {}", limits.max_num_reqs, limits.max_num_tokens, batch.num_reqs(),
        batch.num_tokens());
  Step& next = steps_.spare();
  next.arrays = place(batch, false);
  if (!spec_.mask_mod.empty()) {
    const int64_t bytes = mask_tensor_bytes(spec_, batch.mask_tensors), room = int64_t(arrays_.mask_elements.capacity);
    check(bytes <= room, "update.mask_tensors", "expected tensors of mask_mod with {} bytes at most, got {}", room, bytes);
  }
  const TensorView& starts = spec_.block_size == 0 ? batch.kv_start_loc : batch.kv_indptr;
  next.key_starts = !starts.empty() && !on_host(starts) ? starts : TensorView{};
  if (next.key_starts.empty()) find_keys(batch, next.keys);
  int rows = 0;
  for (const Regime regime : kRegimes) {
    Schedule& schedule = next.schedules[regime];
    SchedulePolicy policy = regimes_[regime].policy;
    policy.first_partial = rows;
    if (!spec_.mask_mod.empty() && regimes_[regime].kernel.mask_teams == 0) {
      cut_seen(batch, regimes_[regime], policy, schedule);
    } else {
      cut(batch, spec_.mask, policy, schedule);
    }
    rows += schedule.num_partial_rows;
  }
  share(batch, next, rows);
  for (const Regime regime : kRegimes) {
    const RegimePlan& s = regimes_[regime];
    const Schedule& schedule = next.schedules[regime];
    check(size_t(schedule.num_work) <= s.work.capacity && schedule.merges.size() <= s.merges.capacity, "update.limits",
          "expected a batch within the limits: {} work items and {} merges, got {} and {}", s.work.capacity, s.merges.capacity,
          schedule.num_work, schedule.merges.size());
  }
  check(rows <= partial_rows_, "update.limits", "expected a batch within the limits: {} partial rows, got {}", partial_rows_, rows);
  next.flat = flat_ ? flat_->plan(batch) : FlatStep{};
  next.num_reqs = batch.num_reqs();
  next.num_tokens = batch.num_tokens();
  next.reach = reach_of(batch, spec_, options_.validate);
  next.on_device = false;
  check_captured_cache(next.reach);
  put_lists(batch, next);
}

// Joins items of requests whose keys are the same blocks, as far as the host knows the blocks. The list is then in Schedule::work already.
// `rows`: where the partial rows of all regimes end.
void Plan::share(const Batch& batch, Step& next, int& rows) {
  const TensorView& ids = next.keys.ids;
  if (!next.key_starts.empty() || ids.empty() || !on_host(ids)) return;
  if (shares_prefixes_ && share_prefixes(batch, next, rows)) return;
  if (!may_share_) return;
  Schedule& list = next.schedules[kDecode];
  SchedulePolicy policy = regimes_[kDecode].policy;
  const int tile_rows = regimes_[kDecode].kernel.tile.rows;
  const SharePolicy share{.block_size = spec_.block_size,
                          .most_tokens = tile_rows / spec_.group_size(),
                          .overhead_keys = plan_overhead_keys(),
                          .seen_by_all = true,
                          .windows = windows_of(spec_.mask)};
  // Shorter runs need more rows. These lie behind those of other regimes, which stay where they are.
  policy.first_partial = rows > list.num_partial_rows ? rows : 0;
  policy.most_partial_rows = int(std::min<int64_t>(partial_rows_, INT32_MAX));
  if (!shorten_runs(batch, next.keys, share, policy, list, share_scratch_)) return;
  if (!list.merges.empty()) rows = std::max(rows, list.merges.front().first_partial + list.num_partial_rows);
  list.work.resize(size_t(list.num_work));
  write_work(list, list.work.data());
  share_keys(batch, next.keys, share, list, share_scratch_);
}

// The kernel of verify's list may take the requests of decode too, with the keys that neighbours have in common in items of them all.
bool Plan::share_prefixes(const Batch& batch, Step& next, int& rows) {
  Schedule &decode = next.schedules[kDecode], &verify = next.schedules[kVerify];
  const RegimePlan& s = regimes_[kVerify];
  const int most_q = most_prefix_queries(s.policy);
  for (int r = 0; r < batch.num_reqs(); ++r)
    if (batch.query_len(r) > most_q && batch.query_len(r) <= s.policy.max_q) return false;  // it has several tiles
  const PrefixCosts costs = prefix_costs(spec_);
  const int others = rows - decode.num_partial_rows - verify.num_partial_rows;  // of prefill, behind these
  const PrefixPolicy policy{.block_size = spec_.block_size,
                            .tile_q = s.policy.tile_q,
                            .tile_kv = s.policy.tile_kv,
                            .num_workers = s.policy.num_workers,
                            .split_cost = costs.split_cost,
                            .max_q = most_q,
                            .first_partial = others > 0 ? rows : 0,
                            .most_percent = costs.most_percent,
                            .most_work = int64_t(s.work.capacity),
                            .most_merges = int64_t(s.merges.capacity),
                            .most_parts = int64_t(s.merge_parts.capacity),
                            .most_partial_rows = std::min<int64_t>(partial_rows_, INT32_MAX)};
  if (!imbrex::share_prefixes(batch, next.keys, policy, verify, prefix_scratch_)) return false;
  decode.clear();
  rows = std::max(policy.first_partial + verify.num_partial_rows, others > 0 ? rows : 0);
  return true;
}

// Cuts the keys that mask_mod shows, and gives items their stretches of these as far as there is room. (Prefill with wgmma finds hidden
// tiles by the mask's bits.)
void Plan::cut_seen(const Batch& batch, const RegimePlan& s, const SchedulePolicy& policy, Schedule& list) const {
  const MaskModTiles tiles(BoundExpression(spec_.mask_mod, batch.mask_tensors), spec_, batch, policy.tile_q, policy.tile_kv,
                           std::max(policy.min_q, 1), policy.max_q);
  cut(batch, spec_.mask, policy, list, [&](int request, int query) { return tiles.seen(request, query); });
  if (list.num_work == 0) return;
  list.work.resize(size_t(list.num_work));
  write_work(list, list.work.data());
  tiles.give_stretches(s.stretches.capacity, list);
}

// Checks what run() and write_kv() check outside of graphs: a graph reads the cache of its capture.
void Plan::check_captured_cache(const BatchReach& reach) const {
  const int64_t entries = captured_entries_;
  if (spec_.block_size == 0) {
    check(reach.rows <= entries, "update.captured_cache", "a captured graph reads {} rows of k and v, the batch needs {}", entries,
          reach.rows);
  } else {
    check(reach.block < entries && reach.slot < entries * spec_.block_size, "update.captured_cache",
          "a captured graph has a cache of {} blocks of {} tokens, the batch has block {} and slot {}", entries, spec_.block_size,
          reach.block, reach.slot);
  }
}

// Writes the step's lists and tables to pinned memory, from where commit() sends them.
void Plan::put_lists(const Batch& batch, const Step& step) {
  const size_t reqs = size_t(step.num_reqs);
  PlanArrays& m = *memory_;
  m.begin();
  PlanCounts counts;  // in the end those of prefill
  for (const Regime regime : kRegimes) {
    const RegimePlan& s = regimes_[regime];
    const Schedule& schedule = step.schedules[regime];
    counts = {.num_work = schedule.num_work,
              .num_merges = int(schedule.merges.size()),
              .num_tokens = step.num_tokens,
              .num_reqs = step.num_reqs,
              .heads_together = heads_together(batch, s.policy, s.l2_keys, spec_.num_kv_heads)};
    *m.put(s.counts, 1) = counts;
    if (!s.chooses_in_graph()) continue;
    const int64_t tasks = int64_t(counts.num_work) * spec_.num_kv_heads * s.row_blocks;
    int fewest = RegimePlan::kManyTasks;
    for (const int i : s.in_graph)
      if (s.takes(i, tasks)) fewest = std::max(fewest, i);
    PlanCounts* launch = m.put(s.of_launches, int64_t(s.in_graph.size()));
    for (const int i : s.in_graph) {
      *launch = counts;
      if (i != fewest) launch->num_work = 0;
      ++launch;
    }
  }
  if (flat_) *m.put(arrays_.flat_counts, 1) = flat_->counts_in_graph(counts, step.flat, captured_flat_blocks_);
  if (step.num_tokens == 0) return;
  std::copy_n(batch.query_start_loc.data(), reqs + 1, m.put(arrays_.query_start, reqs + 1));
  std::copy_n(batch.seq_lens.data(), reqs, m.put(arrays_.seq_lens, reqs));
  put_key_starts(batch, step);
  if (spec_.mask.custom) {
    Batch rows = batch;
    if (on_host(custom_mask_of(batch))) rows.mask_indptr = {};  // gather_mask() leaves nothing between requests
    find_mask_starts(rows, mask_starts_);
    std::ranges::copy(mask_starts_, m.put(arrays_.custom_start, reqs));
  }
  if (step.flat.kv_heads > 0) {
    flat_->put_starts(batch, m.put(arrays_.flat_start, reqs));
    flat_->put_first_keys(batch, m.put(arrays_.flat_first_keys, reqs));
    flat_->put_requests(batch, m.put(arrays_.flat_requests, size_t(step.flat.blocks)));
  }
  for (const Regime regime : kRegimes)
    if (const Schedule& list = step.schedules[regime]; !list.merges.empty())
      write_merges(list, m.put(regimes_[regime].merges, list.merges.size()));
  for (const Regime regime : kRegimes)
    if (const Schedule& list = step.schedules[regime]; list.num_work > 0)
      write_items(list, m.put(regimes_[regime].work, size_t(list.num_work)));
  for (const Regime regime : kRegimes) {
    const ListDetails& details = step.schedules[regime].details;
    if (!details.tokens.empty()) write_shared_tokens(details, m.put(regimes_[regime].shared_tokens, details.merge_of.size()));
    if (!details.parts.empty()) std::ranges::copy(details.parts, m.put(regimes_[regime].merge_parts, details.parts.size()));
    if (details.items.empty()) continue;
    std::ranges::copy(details.items, m.put(regimes_[regime].item_details, details.items.size()));
    std::ranges::copy(details.stretches, m.put(regimes_[regime].stretches, details.stretches.size()));
  }
  put_trees(batch);
  if (spec_.mask.positions) std::copy_n(batch.positions.data(), step.num_tokens, m.put(arrays_.positions, size_t(step.num_tokens)));
  const size_t shared_positions = arrays_.shared_positions.capacity;
  if (shared_positions > 0) std::fill_n(m.put(arrays_.shared_positions, shared_positions), shared_positions, kMostPosition);
  const size_t mask_tensors = arrays_.mask_tensors.capacity;
  if (mask_tensors > 0)
    place_mask_tensors(spec_, batch.mask_tensors, m.device(arrays_.mask_elements), m.put(arrays_.mask_tensors, mask_tensors));
  if (!batch.slot_mapping.empty() && on_host(batch.slot_mapping))
    std::copy_n(batch.slot_mapping.as<const long>(), step.num_tokens, m.put(arrays_.slots, size_t(step.num_tokens)));
  put_block_ids(batch, step);
  if (const TensorView& mask = custom_mask_of(batch); !mask.empty() && on_host(mask))
    gather_mask(batch, m.put(arrays_.custom_mask, size_t(mask_bytes_in_use(batch))));
  if (mask_tensors > 0)
    pack_mask_tensors(spec_, batch.mask_tensors, m.put(arrays_.mask_elements, size_t(mask_tensor_bytes(spec_, batch.mask_tensors))));
}

// What each token of a tree of drafts sees of the others, and where it stands.
void Plan::put_trees(const Batch& batch) {
  if (!spec_.mask.tree) return;
  find_nodes(batch, spec_.mask, nodes_);
  std::ranges::transform(nodes_, memory_->put(arrays_.positions, nodes_.size()), &TreeNode::position);
  std::ranges::transform(nodes_, memory_->put(arrays_.tree_first, nodes_.size()), &TreeNode::first);
  std::ranges::transform(nodes_, memory_->put(arrays_.tree_seen, nodes_.size()), &TreeNode::seen);
}

void Plan::commit(Stream stream) {
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  try {
    memory_->send(cu);
  } catch (...) {
    if (memory_->has_sent()) restore_derived(cu);
    throw;
  }
  try {
    derive_arrays(steps_.spare(), cu);
  } catch (...) {
    memory_->take_back(cu);
    restore_derived(cu);
    throw;
  }
  steps_.flip();
  has_step_ = true;
}

void Plan::revert(Stream stream) noexcept {
  const CurrentContext current(*context_, std::nothrow);
  steps_.flip();
  memory_->take_back(cu_stream(stream));
  restore_derived(cu_stream(stream));
}

void Plan::derive_arrays(const Step& step, CUstream stream) const {
  if (!step.key_starts.empty()) tables_->widen_starts(step.key_starts, memory_->device(arrays_.block_start), step.num_reqs, stream);
  pack_mask_mod(step.on_device ? regimes_[kPrefill].bounds.num_work : step.schedules[kPrefill].num_work, stream);
}
// The copies that were sent may have overwritten what was derived.
void Plan::restore_derived(CUstream stream) noexcept {
  has_step_ = memory_->is_whole();
  try {
    derive_arrays(steps_.now(), stream);
  } catch (...) {
    has_step_ = false;
  }
}

// Of ids on the host only those of blocks in use are sent, without padding.
void Plan::put_key_starts(const Batch& batch, const Step& step) {
  if (!step.key_starts.empty()) return;
  const KeySource& keys = step.keys;
  long* starts = memory_->put(arrays_.block_start, keys.start.size());
  if (keys.ids.empty() || !on_host(keys.ids)) {
    std::ranges::copy(keys.start, starts);
    return;
  }
  long packed = 0;
  for (int r = 0; r < step.num_reqs; ++r) {
    starts[r] = packed;
    packed += blocks_of(batch.seq_lens[r], spec_.block_size);
  }
}

void Plan::put_block_ids(const Batch& batch, const Step& step) {
  const KeySource& keys = step.keys;
  if (!step.key_starts.empty() || keys.ids.empty() || !on_host(keys.ids)) return;
  int* ids = memory_->put(arrays_.block_ids, size_t(num_block_ids(batch, spec_)));
  for (int r = 0; r < step.num_reqs; ++r) ids = std::copy_n(keys.ids_of(r), blocks_of(batch.seq_lens[r], spec_.block_size), ids);
}

}  // namespace imbrex::cuda

// See plan_outline.h.
#include "cuda/plan/plan_outline.h"

#include <algorithm>
#include <numeric>

#include "attention/kv_codec.h"
#include "attention/shared_keys.h"
#include "core/check.h"

namespace imbrex::cuda {
namespace {

// Sums between the pieces of runs, of all multiprocessors: memory of its own for each regime, whose launches then need not wait for each
// other, where all of it and `others` bytes are not much. Balanced lists have no runs.
void lay_out_run_sums(PlanOutline& o, ArrayLayout& layout, const DeviceInfo& device, int64_t others) {
  constexpr int64_t kMost = int64_t(168) << 20;
  std::array<int64_t, kNumRegimes> floats{};
  for (const Regime regime : kRegimes)
    if (const PlanOutline::OfRegime& s = o.regimes[regime]; s.bounds.num_merges > 0 && !s.policy.balanced)
      floats[regime] = s.kernel.run_sums * std::max(device.num_workers, 1);
  const int64_t all = std::accumulate(floats.begin(), floats.end(), int64_t{0}) * int64_t(sizeof(float));
  o.scratch.one_for_run_sums = all > 0 && others + all > kMost;
  if (o.scratch.one_for_run_sums) return o.scratch.run_sums.fill(layout.add<float>(*std::max_element(floats.begin(), floats.end())));
  for (const Regime regime : kRegimes) o.scratch.run_sums[regime] = layout.add<float>(floats[regime]);
}

void lay_out_scratch(PlanOutline& o, const AttentionSpec& spec, const DeviceInfo& device, const PlanLimits& limits) {
  const int64_t rows = checked_mul("plan.scratch", o.partial_rows, spec.num_q_heads);
  const int64_t partial_bytes = checked_mul("plan.scratch", rows, (spec.head_dim_v + 2) * int64_t(sizeof(float)));
  ArrayLayout layout;
  o.scratch.flat_keys = layout.add<char>(o.flat.bytes);
  o.scratch.partial_out = layout.add<float>(rows * spec.head_dim_v);
  lay_out_run_sums(o, layout, device, o.flat.bytes + partial_bytes);
  o.scratch.partial_state = layout.add<float>(rows * 2);
  const PlanOutline::OfRegime& prefill = o.regimes[kPrefill];
  ArrayLayout of_step;
  if (prefill.kernel.mask_teams > 0 && prefill.bounds.num_work > 0) {
    const int64_t tiles = blocks_of(limits.max_seq_len, prefill.kernel.tile.keys), tokens = limits.max_num_tokens;
    ArrayLayout& memory = spec.mask.custom ? layout : of_step;
    o.mask.words = int(tiles * prefill.kernel.tile.keys / 32), o.mask.seen_tile_words = int((tiles + 31) / 32);
    o.mask.bits = memory.add<unsigned>(checked_mul("plan.scratch", tokens, o.mask.words));
    o.mask.seen_tiles = memory.add<unsigned>(checked_mul("plan.scratch", tokens, (1 + prefill.kernel.mask_teams) * o.mask.seen_tile_words));
  }
  o.scratch_bytes = layout.bytes(), o.step_mask_bytes = of_step.bytes();
}

// Partial rows for a step in which requests share items: their runs are shorter, and what other regimes do not need is left to them. So
// there is room for as many rows as all regimes together may use, whichever of them a plan has.
int64_t shared_rows(const CutPolicy& policies, const PlanLimits& limits) {
  SchedulePolicy decode = policies[kDecode];
  const int64_t most = decode.most_partial_rows = policies[kPrefill].most_partial_rows;
  return decode.runs && !decode.balanced ? std::min(schedule_bounds(decode, limits).num_partial_rows, most) : 0;
}

// The kernel for items that requests share; no entry where they do not.
RegimeKernel sharing_kernel(const AttentionKernels& table, std::string_view arch, const AttentionSpec& spec, Regime regime,
                            const PlanLimits& limits) {
  const bool wanted = regime == kDecode && table.sharing != nullptr && limits.shared_prompts && limits.max_num_reqs > 1;
  return wanted ? table.sharing->kernel(arch, spec, regime) : RegimeKernel{};
}

// The room that lists of shared prefixes take: a step that needs more has none.
void make_room_for_prefixes(PlanOutline& o, const AttentionSpec& spec, const PlanLimits& limits) {
  constexpr int64_t kMostParts = int64_t(1) << 20, kMostRows = 4096, kMostBytes = int64_t(128) << 20;
  PlanOutline::OfRegime& s = o.regimes[kVerify];
  const int most_q = most_prefix_queries(s.policy), longest = limits.max_query_len > 0 ? std::min(limits.max_query_len, most_q) : most_q;
  const int64_t workers = s.policy.num_workers, reqs = std::min(limits.max_num_reqs, limits.max_num_tokens);
  const int64_t tokens = std::min<int64_t>(limits.max_num_tokens, reqs * longest);
  s.bounds.num_work = std::max(s.bounds.num_work, 4 * reqs + workers);
  s.bounds.num_merges = std::max(s.bounds.num_merges, reqs);
  o.prefix_parts = std::min(reqs * (workers + 16), kMostParts);
  const int64_t row_bytes = int64_t(spec.num_q_heads) * (spec.head_dim_v + 2) * int64_t(sizeof(float));
  o.partial_rows += std::min({2 * tokens, kMostRows, kMostBytes / row_bytes}) + workers * s.policy.tile_q;
}

}  // namespace

Regime prefix_kernel(const AttentionSpec& spec) { return codec_of(spec).values_in_keys ? kLongVerify : kVerify; }

PrefixCosts prefix_costs(const AttentionSpec& spec) {
  constexpr PrefixCosts kOfLatents{70, 128}, kOfOthers{80, 0};
  return codec_of(spec).values_in_keys ? kOfLatents : kOfOthers;
}

bool may_share_prefixes(const AttentionKernels& table, std::string_view arch, const AttentionSpec& spec) {
  const bool latents = codec_of(spec).values_in_keys;
  const RegimeKernel kernel = table.kernel(arch, spec, prefix_kernel(spec)), decode = table.kernel(arch, spec, kDecode);
  const int group = spec.group_size();
  AttentionSpec without_tree = spec;
  without_tree.mask.tree = false;
  const bool is_plain = spec.block_size > 0 && !spec.mask.positions && windows_of(spec.mask) == nullptr;
  return is_plain && is_position_free(without_tree) && kernel.entry != nullptr && (latents ? kernel.tile.merged : !kernel.joins_pieces) &&
         kernel.tile.rows / group >= 2 * std::max(decode.tile.rows / group, 1);
}

PlanOutline outline(const AttentionKernels& table, const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) {
  const std::string arch = arch_of(device);
  PlanOutline o;
  std::array<Tile, kNumRegimes> tiles;
  o.shares_prefixes =
      options.balanced && options.limits.shared_prompts && options.limits.max_num_reqs > 1 && may_share_prefixes(table, arch, spec);
  for (const Regime regime : kRegimes) {
    PlanOutline::OfRegime& s = o.regimes[regime];
    s.kernel_of = o.shares_prefixes && regime == kVerify ? prefix_kernel(spec) : regime;
    s.kernel = table.kernel(arch, spec, s.kernel_of);
    tiles[regime] = s.kernel.tile;
    if (const RegimeKernel sharing = sharing_kernel(table, arch, spec, regime, options.limits); sharing.entry != nullptr) {
      // Requests are cut as without it, so that no result depends on whether they may share.
      o.may_share = true, s.kernel = sharing;
      tiles[regime].blocks = sharing.tile.blocks, tiles[regime].blocks_each = sharing.tile.blocks_each;
      tiles[regime].most_in_run = sharing.tile.most_in_run;
    }
    s.row_blocks = (spec.group_size() + s.kernel.tile.rows - 1) / s.kernel.tile.rows * s.kernel.row_blocks;
    if (table.flat != nullptr) s.flat_kernel = table.flat->kernel(arch, spec, regime);
    // Balanced lists are cut for the workers of `kernel`.
    for (size_t i = 0; i < kFewTasksTables && !options.balanced; ++i)
      if (table.few_tasks[i] != nullptr) s.few_tasks_kernels[i] = table.few_tasks[i]->kernel(arch, spec, regime);
  }
  CutPolicy policies = gpu::cut_policy(spec, device, tiles, options.balanced);
  int64_t run_sums = 0;
  for (const PlanOutline::OfRegime& s : o.regimes) run_sums = std::max(run_sums, s.kernel.run_sums);
  run_sums *= std::max(device.num_workers, 1) * int64_t(sizeof(float));
  if (!options.balanced) gpu::bound_partials(policies, spec, options.limits, run_sums);
  for (const Regime regime : kRegimes) {
    o.regimes[regime].policy = policies[regime];
    o.regimes[regime].bounds = schedule_bounds(policies[regime], options.limits);
  }
  if (const PlanOutline::OfRegime& prefill = o.regimes[kPrefill]; prefill.flat_kernel.entry != nullptr && prefill.bounds.num_work > 0)
    o.flat = flat_room(spec, prefill.policy, options.limits, int(prefill.flat_kernel.cluster));
  o.partial_rows = partial_rows_bound(policies, options.limits);
  if (o.shares_prefixes) make_room_for_prefixes(o, spec, options.limits);
  if (o.may_share) o.partial_rows = std::max(o.partial_rows, shared_rows(policies, options.limits));
  lay_out_scratch(o, spec, device, options.limits);
  return o;
}

}  // namespace imbrex::cuda

// The part of plan.h that launches: run() checks shapes, fills the parameters, and makes the launches that the step, or a graph, needs.
#include <algorithm>

#include "attention/kv_codec.h"
#include "attention/mask.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "cuda/attention/attention_sm90.h"
#include "cuda/attention/expressions.h"
#include "cuda/attention/kv_side.h"
#include "cuda/driver/graph_branches.h"
#include "cuda/merge_params.h"
#include "cuda/plan/plan.h"
#include "gpu/launch_order.h"

namespace imbrex::cuda {
namespace {

// The number of parts in which merge.cu takes the rows of an item and kv head: those of a token, or as many as a tile has.
int merge_shares(const AttentionSpec& spec, const SchedulePolicy& policy) {
  const int rows = policy.tile_q * spec.group_size(), each = least_merge_rows(spec.head_dim_v);
  return (rows + each - 1) / each;
}

}  // namespace

const Plan::Specialised& Plan::loaded(ByOutput& kernels, DType out, bool captured) const {
  Specialised& s = kernels[size_t(std::ranges::find(spec_.out_dtypes(), out) - spec_.out_dtypes().begin())];
  check(!s.entry.empty(), "run.out_dtype", "expected an output of {}, as the plan was asked for, got one of {}",
        to_string(options_.out_dtype.value_or(out)), to_string(out));
  return loaded(s, captured);
}

const Plan::Specialised& Plan::loaded(Specialised& s, bool captured) const {
  if (s.module) return s;
  check(!captured, "run.on_demand",
        "expected {} to be loaded before a capture: by plan(), unless load_on_demand, or by an earlier run() with such tensors",
        s.key.path);
  load(s);
  return s;
}

// What kernels are told of the batch and the layer's masks, without a call's tensors.
AttentionParams Plan::batch_params(void* mask_memory) const {
  const PlanArrays& m = *memory_;
  const BatchArrays& arrays = steps_.now().arrays;
  AttentionParams a{};
  a.query_start = m.device(arrays_.query_start);
  a.seq_lens = m.device(arrays_.seq_lens);
  a.block_ids = spec_.block_size > 0 ? arrays.block_ids : nullptr;
  a.block_start = m.device(arrays_.block_start);
  if (spec_.mask.custom) {
    a.custom_mask = arrays.custom_mask, a.mask_is_packed = arrays.mask_is_packed;
    a.custom_start = m.device(arrays_.custom_start);
  }
  if (mask_.words > 0) {
    a.mask_bits = gpu::array_in(mask_memory, mask_.bits), a.seen_tiles = gpu::array_in(mask_memory, mask_.seen_tiles);
    a.mask_words = mask_.words, a.seen_tile_words = mask_.seen_tile_words;
    a.least_masked_q = regimes_[kPrefill].policy.min_q;
  }
  if (spec_.mask.positions || spec_.mask.tree) a.positions = m.device(arrays_.positions);
  a.shared_positions = m.device(arrays_.shared_positions);
  if (spec_.mask.tree) a.tree_seen = m.device(arrays_.tree_seen), a.tree_first = m.device(arrays_.tree_first);
  a.mask_tensors = m.device(arrays_.mask_tensors);
  a.window_left = spec_.mask.window_left;
  a.window_right = spec_.mask.window_right;
  a.chunk = spec_.mask.chunk;
  a.chunk_before = lookback_tokens(spec_.mask);
  return a;
}

AttentionParams Plan::params(const AttentionInputs& in, const KvCache& kv, const AttentionOutputs& out,
                             const gpu::ScratchMemory& scratch) const {
  AttentionParams a = batch_params(spec_.mask.custom ? scratch.data.get() : step_mask_.as<void>());
  a.q = in.q.as<const char>();
  a.q_token_stride = byte_stride(in.q, 0);
  a.q_head_stride = byte_stride(in.q, 1);
  a.out = out.out.as<char>();
  a.out_token_stride = byte_stride(out.out, 0);
  a.out_head_stride = byte_stride(out.out, 1);
  if (!out.lse.empty()) {
    a.lse = out.lse.as<float>();
    a.lse_token_stride = out.lse.stride(0);
    a.lse_head_stride = out.lse.stride(1);
  }
  set_sides(spec_, kv, a);
  set_score_tensors(spec_, in.score_tensors, a);
  a.num_kv_heads = a.kv_heads_now = spec_.num_kv_heads;
  const Fp8Scales q_scale = fp8_scales(in.q_scale, device_.device);
  a.q_scales = q_scale.device;
  a.q_scale_stride = q_scale.stride;
  a.scale = spec_.scale() * q_scale.host;
  a.soft_cap = spec_.score.soft_cap;
  a.head_scales = in.head_scales.as<const float>();
  a.alibi_slopes = in.alibi_slopes.as<const float>();
  a.sinks = in.sinks.as<const float>();
  a.bias_by_distance = tables_->bias_by_distance();
  a.bias_reach = tables_->bias_reach();
  a.partial_out = gpu::array_in(scratch.data.get(), scratch_.partial_out);
  a.partial_state = gpu::array_in(scratch.data.get(), scratch_.partial_state);
  return a;
}

// Launches as many thread blocks as the device holds at a time, or as there are tasks if these are fewer: blocks, or clusters of them, take
// tasks until there are none.
template <class... Maps>
void Plan::launch(const Specialised& s, int64_t tasks, CUstream stream, const AttentionParams& a, const Maps&... maps) const {
  const unsigned grid = unsigned(std::min<int64_t>(s.grid, tasks * s.cluster));
  s.kernel.launch({.grid_x = grid, .threads = s.threads, .cluster = s.cluster, .programmatic = programmatic_}, stream, a, maps...);
}

// Computes the bits of a mask_mod for the step, once for all layers; `items`: of prefill, at most.
void Plan::pack_mask_mod(int64_t items, CUstream stream) const {
  if (spec_.mask_mod.empty() || mask_.words == 0 || items == 0) return;
  AttentionParams a = batch_params(step_mask_.as<void>());
  a.counts = memory_->device(regimes_[kPrefill].counts);
  launch(loaded(pack_mask_, is_captured(stream)), items * mask_.seen_tile_words, stream, a);
}

void Plan::run(const AttentionInputs& in, const AttentionOutputs& out, Stream stream) const {
  const Step& step = steps_.now();
  check_step(*this);
  const DType out_dtype = check_run(spec_, device_.device, in, out, step.num_tokens, step.reach);
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  // A graph has to hold all launches that a later batch may need, and so does a step whose lists only the device knows. Otherwise launches
  // that this step does not need are left out.
  const bool captured = is_captured(cu), any = captured || step.on_device;
  const std::shared_ptr<const gpu::ScratchMemory> scratch = workspace_->memory();
  const KvCache kv = with_values(spec_, in.kv);
  AttentionParams a = params(in, kv, out, *scratch);
  // Copies end before a kernel after them begins. Kernels of this plan that write lists may still run then, unless they are in front of a
  // whole graph.
  a.lists_are_there = a.keys_are_there = device_plan_ == nullptr && (captured || step.key_starts.empty());
  a.may_be_idle = a.lists_are_there && captured && several_kernels_;
  a.keys_are_there = a.keys_are_there && !keys_come_late_;
  if (spec_.score.relative_buckets > 0) tables_->expand_bias(in.relative_bias, cu);
  int64_t merge_tasks = 0;
  std::array<gpu::RegimeTasks, kNumRegimes> work;
  for (const Regime regime : kRegimes) {
    const RegimePlan& s = regimes_[regime];
    const int64_t items = any ? s.bounds.num_work : int64_t(step.schedules[regime].num_work);
    const bool folds = s.kernel.run_sums > 0 && scratch_.one_for_run_sums;
    work[regime] = {.tasks = items * spec_.num_kv_heads * s.row_blocks, .folds = folds};
  }
  std::optional<GraphBranches> branches;
  if (captured && programmatic_) branches.emplace(cu);
  const bool drafts = work[kPrefill].tasks == 0 || has_drafts(options_.limits);
  for (const gpu::RegimeLaunch& now : gpu::launch_order(work, captured, step.on_device, drafts)) {
    if (branches && now.branches) branches->next();
    const Regime regime = now.regime;
    const int64_t tasks = now.tasks;
    const RegimePlan& s = regimes_[regime];
    const Schedule& schedule = step.schedules[regime];
    a.work = memory_->device(s.work);
    a.merges = memory_->device(s.merges);
    a.shared_tokens = memory_->device(s.shared_tokens), a.merge_parts = memory_->device(s.merge_parts);
    a.item_details = memory_->device(s.item_details), a.stretches = memory_->device(s.stretches);
    a.counts = memory_->device(s.counts);
    a.next_task = counters_.as<int>() + regime;
    a.arrivals = counters_.as<int>() + s.arrivals;
    const ArrayOf<float>& sums = scratch_.run_sums[regime];
    a.run_sums = sums.capacity > 0 ? gpu::array_in(scratch->data.get(), sums) : nullptr;
    a.beside = now.beside, a.next_waits = now.next_waits;
    if (regime == kPrefill && spec_.mask.custom && mask_.words > 0)
      launch(loaded(pack_mask_, captured), tasks * mask_.seen_tile_words, cu, a);
    bool mapped = true;
    const auto run_over_cache = [&](const PlanCounts* counts) {
      AttentionParams over_cache = a;
      over_cache.counts = counts;
      AttentionMaps maps{};
      mapped = s.kernel.maps == nullptr || s.kernel.maps(spec_, in.q, kv, maps);
      const auto run_kernel = [&](ByOutput& kernels, int64_t most_tasks) {
        launch(loaded(kernels, out_dtype, captured), most_tasks, cu, over_cache, maps.q, maps.k,
               maps.v);  // without maps it does not see them
      };
      if (!mapped) return run_kernel(s.without_maps, tasks);
      if (!captured || !s.chooses_in_graph()) return run_kernel(s.at(s.kernels_for(tasks)), tasks);
      over_cache.counts = memory_->device(s.of_launches);
      GraphBranches of_regime(cu);
      for (const int i : s.in_graph) {
        if (s.in_branches) of_regime.next();
        run_kernel(s.at(i), i == RegimePlan::kManyTasks ? tasks : s.most_tasks(i));
        ++over_cache.counts;
      }
      of_regime.join();
    };
    const auto in_front = [&] {
      if (captured) run_over_cache(&memory_->device(arrays_.flat_counts)->over_cache);
    };
    const bool flat = regime == kPrefill && (captured || !any) && run_over_flat(in.q, kv, a, out_dtype, *scratch, cu, captured, in_front);
    if (!flat) run_over_cache(a.counts);
    if (mapped ? s.kernel.joins_pieces : s.mapless_joins) continue;
    const int64_t of_regime = any ? s.bounds.num_merges : int64_t(schedule.merges.size());
    if (of_regime == 0) continue;
    a.merge_lists[regime] = {a.merges, a.counts, merge_shares(spec_, s.policy), s.kernel.short_sums && !options_.balanced};
    merge_tasks += of_regime * spec_.num_kv_heads * a.merge_lists[regime].shares;
  }
  if (branches) branches->join();
  a.beside = false;
  a.merge_parts = memory_->device(regimes_[kVerify].merge_parts);
  if (spec_.kv_format == KvFormat::latent_rope) a.v = a.k;  // merge.cu wants the scale of values
  const int parts = std::max(many_merge_parts(spec_.head_dim_v), 1);
  if (merge_tasks > 0) launch(loaded(merge_, out_dtype, captured), merge_tasks * parts, cu, a);
  if (!captured) return;
  captured_run_ = true;
  if (captured_scratch_.empty() || captured_scratch_.back() != scratch) captured_scratch_.push_back(scratch);
  captured_entries_ = std::min(captured_entries_, in.kv.k.size(0));
}

// Runs prefill over flat keys, for a step whose lists the host has made; false: it has to be run over the cache itself. In a graph these
// launches serve the steps whose flat keys have room; for other steps `in_front` makes a launch over the cache.
template <class InFront>
bool Plan::run_over_flat(const TensorView& q, const KvCache& kv, const AttentionParams& all, DType out, const gpu::ScratchMemory& scratch,
                         CUstream stream, bool captured, const InFront& in_front) const {
  if (!flat_ || !FlatKv::takes(kv)) return false;
  const Step& step = steps_.now();
  const RegimePlan& s = regimes_[kPrefill];
  const FlatStep flat = captured ? flat_->in_graph(step.flat) : step.flat;
  if (captured) captured_flat_blocks_ = std::min(captured_flat_blocks_, flat.blocks);
  if (flat.kv_heads == 0 || flat.blocks == 0) return false;
  AttentionParams a = all;
  a.keys_are_there = false;  // the kernel in front writes them
  a.block_ids = nullptr, a.block_start = memory_->device(arrays_.flat_start);
  const FlatCounts* const counts = memory_->device(arrays_.flat_counts);
  if (captured) a.counts = &counts->over_flat;
  FlattenKvParams keys{.k = all.k,
                       .v = all.v,
                       .block_ids = all.block_ids,
                       .block_start = all.block_start,
                       .seq_lens = all.seq_lens,
                       .requests = memory_->device(arrays_.flat_requests),
                       .flat_start = a.block_start,
                       .first_keys = memory_->device(arrays_.flat_first_keys),
                       .to_k = nullptr,
                       .to_v = nullptr,
                       .first_kv_head = 0,
                       .num_heads = 0,
                       .num_blocks = flat.blocks,
                       .num_blocks_now = captured ? &counts->num_blocks : nullptr,
                       .lists_are_there = all.lists_are_there};
  const Specialised& kernel = loaded(s.over_flat, out, captured);
  const int64_t num_work = captured ? s.bounds.num_work : step.schedules[kPrefill].num_work;
  for (int head = 0; head < spec_.num_kv_heads; head += flat.kv_heads) {
    a.first_kv_head = keys.first_kv_head = head;
    a.kv_heads_now = keys.num_heads = std::min(flat.kv_heads, spec_.num_kv_heads - head);
    const KvCache cache = flat_->cache(gpu::array_in(scratch.data.get(), scratch_.flat_keys), flat, a.kv_heads_now);
    keys.to_k = cache.k.as<char>(), keys.to_v = cache.v.as<char>();
    AttentionMaps maps{};
    if (!s.flat_kernel.maps(spec_, q, cache, maps)) return false;  // because of the queries: at once
    if (head == 0) in_front();
    flat_->run(keys, programmatic_, stream);
    launch(kernel, num_work * a.kv_heads_now * s.flat_kernel.row_blocks, stream, a, maps.q, maps.k, maps.v);
  }
  return true;
}

void Plan::write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream stream) const {
  check(write_kv_ != nullptr, "write_kv.ragged", "write_kv needs a paged cache, but block_size is {}", spec_.block_size);
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  const bool captured = is_captured(cu);
  const Step& step = steps_.now();
  check_step(*this);
  const BatchArrays& arrays = step.arrays;
  const NewTokens tokens{.slots = arrays.has_slots || step.num_tokens == 0 ? arrays.slots : TensorView{},
                         .num_tokens = step.num_tokens,
                         .reach = step.reach,
                         .captured_tokens = step.on_device ? step.num_tokens
                                            : captured     ? options_.limits.max_num_tokens
                                                           : 0,
                         .now = &memory_->device(regimes_[kDecode].counts)->num_tokens};
  write_kv_->run(cache, k, v, tokens, cu);
  if (!captured) return;
  captured_write_ = true;
  captured_entries_ = std::min(captured_entries_, cache.k.size(0));
}

}  // namespace imbrex::cuda

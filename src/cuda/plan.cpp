// See plan.h. Everything that depends on the batch happens in prepare() and commit(); run() checks shapes, fills one POD and launches.
#include "cuda/plan.h"

#include <algorithm>
#include <future>

#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "cuda/attention_sm90.h"
#include "cuda/kv_side.h"

namespace imbrex::cuda {
namespace {

constexpr int64_t kMaxHostBlocks = int64_t(1) << 22;  // ids of host block tables: 16 MiB on the device
constexpr int64_t kMaxHostMask = int64_t(64) << 20;   // bytes of host custom masks

bool has_flat(const AttentionKernels& table, std::string_view arch, const AttentionSpec& spec, Shape shape) {
  return table.flat != nullptr && table.flat->shape(arch, spec, shape).entry != nullptr;
}

bool packs_mask(const AttentionKernels& table, std::string_view arch, const AttentionSpec& spec) {
  return spec.mask.custom && table.shape(arch, spec, kPrefill).mask_teams > 0;
}

// Of the rows of an item and kv head, which are a token's or as many as a tile has.
int merge_shares(const AttentionSpec& spec, const SchedulePolicy& policy) {
  const int rows = policy.tile_q * spec.group_size(), each = least_merge_rows(spec.head_dim_v);
  return (rows + each - 1) / each;
}

}  // namespace

std::vector<KernelKey> plan_kernels(const AttentionKernels& table, std::string_view arch, const AttentionSpec& spec, Extent extent) {
  std::vector<KernelKey> keys;
  if (spec.kv_format != KvFormat::strided) return keys;
  for (const DType out : spec.out_dtypes().first(extent == Extent::all ? spec.out_dtypes().size() : 1)) {
    for (const Shape shape : kShapes) {
      const ShapeKernel kernel = table.shape(arch, spec, shape);
      if (kernel.tile.rows == 0) return {};
      keys.push_back(table.attention(arch, spec, shape, out));
      if (kernel.maps != nullptr && extent != Extent::usual) keys.push_back(table.without_maps->attention(arch, spec, shape, out));
      if (has_flat(table, arch, spec, shape)) keys.push_back(table.flat->attention(arch, spec, shape, out));
    }
    keys.push_back(table.merge(arch, spec, out));
  }
  if (packs_mask(table, arch, spec)) keys.push_back(pack_mask_key(arch, spec));
  if (has_flat(table, arch, spec, kPrefill)) keys.push_back(flatten_kv_key(arch, spec));
  keys.push_back(plan_tables_key(arch));
  keys.push_back(plan_batch_key(arch));
  return keys;
}

Plan::Plan(const AttentionKernels& table, const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options)
    : table_(table),
      spec_(spec),
      device_(device),
      options_(options),
      arch_(arch_of(device)),
      context_(Context::of_device(device.device.index)),
      workspace_(workspace_for(context_, options.workspace)),
      programmatic_(device.sm >= 90) {
  check(!options.on_device || !options.balanced, "backend.on_device",
        "expected on_device or balanced, got both: shares of the load are "
        "computed on the host");
  const CurrentContext current(*context_);
  std::array<Tile, kNumShapes> tiles;
  for (const Shape shape : kShapes) {
    ShapePlan& s = shapes_[shape];
    s.kernel = table.shape(arch_, spec, shape);
    tiles[shape] = s.kernel.tile;
    s.row_blocks = (spec.group_size() + s.kernel.tile.rows - 1) / s.kernel.tile.rows * s.kernel.row_blocks;
    if (table.flat != nullptr) s.flat_kernel = table.flat->shape(arch_, spec, shape);
  }
  const CutPolicy policies = cut_policy(spec, device, tiles, options.balanced);
  partial_rows_ = partial_rows_bound(policies, options.limits);
  for (const Shape shape : kShapes) {
    shapes_[shape].policy = policies[shape];
    shapes_[shape].bounds = schedule_bounds(policies[shape], options.limits);
    shapes_[shape].l2_keys = keys_in_l2(spec, device, shape);
  }
  name_kernels();
  if (const ShapePlan& prefill = shapes_[kPrefill]; prefill.flat_kernel.entry != nullptr && prefill.bounds.num_work > 0)
    flat_ = std::make_unique<FlatKv>(context_, arch_, spec, prefill.policy, options.limits, int(prefill.flat_kernel.cluster));
  if (flat_ && !flat_->is_needed()) flat_ = nullptr;
  lay_out();
  // Every item has a query token.
  if (options.on_device) device_plan_ = std::make_unique<DevicePlan>(context_, arch_, spec, options.limits, options.limits.max_num_tokens);
}

// And loads them, several at the same time, unless that is to wait.
void Plan::name_kernels() {
  std::vector<Specialised*> now;
  const auto name = [&](ByOutput& kernels, const char* entry, unsigned threads, unsigned cluster, bool on_demand, const auto& key_of) {
    size_t i = 0;
    for (const DType out : spec_.out_dtypes()) {
      Specialised& s = kernels[i++];
      if (out != options_.out_dtype.value_or(out)) continue;
      s = {.key = key_of(out), .entry = entry, .threads = threads, .cluster = cluster, .module = {}, .kernel = {}};
      if (!on_demand) now.push_back(&s);
    }
  };
  const auto name_attention = [&](ByOutput& kernels, const AttentionKernels& table, Shape shape, bool on_demand) {
    const ShapeKernel kernel = table.shape(arch_, spec_, shape);
    name(kernels, kernel.entry, kernel.threads, kernel.cluster, on_demand,
         [&](DType out) { return table.attention(arch_, spec_, shape, out); });
    for (Specialised& s : kernels) s.one_each = kernel.run_sums > 0;
  };
  for (const Shape shape : kShapes) {
    ShapePlan& s = shapes_[shape];
    if (s.bounds.num_work == 0) continue;
    name_attention(s.kernels, table_, shape, options_.load_on_demand);
    if (s.flat_kernel.entry != nullptr) name_attention(s.over_flat, *table_.flat, shape, options_.load_on_demand);
    if (s.kernel.maps == nullptr) continue;
    s.mapless_joins = table_.without_maps->shape(arch_, spec_, shape).joins_pieces;
    name_attention(s.without_maps, *table_.without_maps, shape, true);
  }
  const auto merges = [](const ShapePlan& s) { return !s.kernel.joins_pieces && s.bounds.num_merges > 0; };
  if (std::ranges::any_of(shapes_, merges))
    name(merge_, "merge", kMergeThreads, 1, options_.load_on_demand, [&](DType out) { return table_.merge(arch_, spec_, out); });
  if (shapes_[kPrefill].bounds.num_work > 0 && packs_mask(table_, arch_, spec_)) {
    pack_mask_.key = pack_mask_key(arch_, spec_), pack_mask_.entry = "pack_mask", pack_mask_.threads = kPackMaskThreads;
    if (!options_.load_on_demand) now.push_back(&pack_mask_);
  }
  std::vector<std::future<void>> compiled;
  compiled.reserve(now.size());
  for (const Specialised* one : now) compiled.push_back(std::async(std::launch::async, [one] { get_kernel(one->key); }));
  for (std::future<void>& one : compiled) one.get();
  for (Specialised* one : now) load(*one);
  tables_ = std::make_unique<PlanTables>(context_, arch_, spec_);
  if (spec_.block_size > 0) write_kv_ = std::make_unique<WriteKv>(context_, arch_, spec_);
}

void Plan::load(Specialised& s) const {
  s.module = Module::load(context_, s.key);
  s.kernel = s.module->kernel(s.entry);
  const int each = s.one_each ? 1 : std::max(s.kernel.blocks_per_multiprocessor(int(s.threads)), 1);
  s.grid = unsigned(std::max(device_.num_workers, 1) * each) / s.cluster * s.cluster;
}

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

void Plan::lay_out() {
  const PlanLimits& limits = options_.limits;
  const int64_t reqs = limits.max_num_reqs, tokens = limits.max_num_tokens;
  const int64_t blocks = spec_.block_size > 0 ? checked_mul("plan.scratch", reqs, blocks_of(limits.max_seq_len, spec_.block_size)) : 0;
  const int64_t mask = spec_.mask.custom ? checked_mul("plan.scratch", tokens, limits.max_seq_len) : 0;
  // What every step sends comes first, what is long last.
  ArrayLayout layout;
  for (ShapePlan& s : shapes_) s.counts = layout.add<PlanCounts>(1);
  arrays_.flat_counts = layout.add<FlatCounts>(flat_ ? 1 : 0);
  arrays_.query_start = layout.add<int>(reqs + 1);
  arrays_.seq_lens = layout.add<int>(reqs);
  arrays_.block_start = layout.add<long>(reqs);
  arrays_.custom_start = layout.add<long>(spec_.mask.custom ? reqs : 0);
  arrays_.flat_start = layout.add<long>(flat_ ? reqs : 0);
  arrays_.flat_first_keys = layout.add<int>(flat_ ? reqs : 0);
  arrays_.flat_requests = layout.add<int>(flat_ ? flat_->most_blocks() : 0);
  for (ShapePlan& s : shapes_) s.merges = layout.add<MergeItem>(s.bounds.num_merges);
  for (ShapePlan& s : shapes_) s.work = layout.add<WorkItem>(s.bounds.num_work);
  arrays_.slots = layout.add<long>(spec_.block_size > 0 ? tokens : 0);
  arrays_.block_ids = layout.add<int>(std::min(blocks, kMaxHostBlocks));
  arrays_.custom_mask = layout.add<unsigned char>(std::min(mask, kMaxHostMask));
  memory_ = std::make_unique<PlanArrays>(context_, layout);

  steps_.now().arrays = {
      .block_ids = memory_->device(arrays_.block_ids),
      .custom_mask = memory_->device(arrays_.custom_mask),
      .slots = TensorView::contiguous(memory_->device(arrays_.slots), DType::i64, {int64_t(arrays_.slots.capacity)}, device_.device)};
  size_t counters = kNumShapes;
  for (ShapePlan& s : shapes_) {
    s.arrivals = counters;
    if (s.kernel.joins_pieces) counters += size_t(s.bounds.num_merges) * size_t(spec_.num_kv_heads) * size_t(s.row_blocks);
  }
  counters_ = zeroed(context_, counters * sizeof(int));
  const int64_t rows = checked_mul("plan.scratch", partial_rows_, spec_.num_q_heads);
  int64_t run_sums = 0;
  for (const ShapePlan& s : shapes_)
    if (s.bounds.num_merges > 0) run_sums = std::max(run_sums, s.kernel.run_sums);
  ArrayLayout scratch;
  scratch_.flat_keys = scratch.add<char>(flat_ ? flat_->bytes() : 0);
  scratch_.partial_out =
      scratch.add<float>(checked_mul("plan.scratch", rows, spec_.head_dim_v * int64_t(sizeof(float))) / int64_t(sizeof(float)));
  scratch_.run_sums = scratch.add<float>(run_sums * std::max(device_.num_workers, 1));
  scratch_.partial_state = scratch.add<float>(rows * 2);
  if (const ShapeKernel& prefill = shapes_[kPrefill].kernel; !pack_mask_.entry.empty()) {
    const int64_t tiles = blocks_of(limits.max_seq_len, prefill.tile.keys);
    mask_words_ = int(tiles * prefill.tile.keys / 32), seen_tile_words_ = int((tiles + 31) / 32);
    scratch_.mask_bits = scratch.add<unsigned>(checked_mul("plan.scratch", tokens, mask_words_));
    scratch_.seen_tiles = scratch.add<unsigned>(checked_mul("plan.scratch", tokens, (1 + prefill.mask_teams) * seen_tile_words_));
  }
  workspace_->reserve(scratch.bytes());
}

AttentionParams Plan::params(const Inputs& in, const Outputs& out, const DeviceBuffer& scratch) const {
  const PlanArrays& m = *memory_;
  const BatchArrays& arrays = steps_.now().arrays;
  AttentionParams a{};
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
  a.k = kv_side(in.kv.k, in.kv.k_scale, spec_);
  a.v = kv_side(in.kv.v, in.kv.v_scale, spec_);
  a.query_start = m.device(arrays_.query_start);
  a.seq_lens = m.device(arrays_.seq_lens);
  a.block_ids = spec_.block_size > 0 ? arrays.block_ids : nullptr;
  a.block_start = m.device(arrays_.block_start);
  if (spec_.mask.custom) {
    a.custom_mask = arrays.custom_mask;
    a.custom_start = m.device(arrays_.custom_start);
    a.mask_bits = array_in(scratch, scratch_.mask_bits), a.seen_tiles = array_in(scratch, scratch_.seen_tiles);
    a.mask_words = mask_words_, a.seen_tile_words = seen_tile_words_;
    a.least_masked_q = shapes_[kPrefill].policy.min_q;
  }
  a.num_kv_heads = a.kv_heads_now = spec_.num_kv_heads;
  const Fp8Scales q_scale = fp8_scales(in.q_scale, device_.device);
  a.q_scales = q_scale.device;
  a.q_scale_stride = q_scale.stride;
  a.scale = spec_.scale() * q_scale.host;
  a.soft_cap = spec_.score.soft_cap;
  a.window_left = spec_.mask.window_left;
  a.window_right = spec_.mask.window_right;
  a.chunk = spec_.mask.chunk;
  a.head_scales = in.head_scales.as<const float>();
  a.alibi_slopes = in.alibi_slopes.as<const float>();
  a.sinks = in.sinks.as<const float>();
  a.bias_by_distance = tables_->bias_by_distance();
  a.bias_reach = tables_->bias_reach();
  a.partial_out = array_in(scratch, scratch_.partial_out);
  a.partial_state = array_in(scratch, scratch_.partial_state);
  a.run_sums = array_in(scratch, scratch_.run_sums);
  return a;
}

// Thread blocks, or clusters of them, take tasks until there are none; so many as there are tasks, if these are few.
template <class... Maps>
void Plan::launch(const Specialised& s, int64_t tasks, CUstream stream, const AttentionParams& a, const Maps&... maps) const {
  const unsigned grid = unsigned(std::min<int64_t>(s.grid, tasks * s.cluster));
  s.kernel.launch({.grid_x = grid, .threads = s.threads, .cluster = s.cluster, .programmatic = programmatic_}, stream, a, maps...);
}

void Plan::run(const Inputs& in, const Outputs& out, Stream stream) const {
  const Step& step = steps_.now();
  check_step(*this);
  const DType out_dtype = check_run(spec_, device_.device, in, out, step.num_tokens, step.reach);
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  // A graph has to hold what a later batch may need, and so do lists that only the device knows; otherwise what this one does not need is
  // left out.
  const bool captured = is_captured(cu), any = captured || step.on_device;
  const std::shared_ptr<const DeviceBuffer> scratch = workspace_->memory();
  AttentionParams a = params(in, out, *scratch);
  // Copies end before a kernel behind them begins. Kernels of this plan that write lists need not: but for those in front of a whole graph.
  a.lists_are_there = a.keys_are_there = device_plan_ == nullptr && (captured || step.key_starts.empty());
  const auto num_kernels = std::ranges::count_if(shapes_, [](const ShapePlan& s) { return s.bounds.num_work > 0; }) + (flat_ ? 1 : 0);
  a.may_be_idle = a.lists_are_there && captured && num_kernels > 1;
  if (spec_.score.relative_buckets > 0) tables_->expand_bias(in.relative_bias, cu);
  int64_t merge_tasks = 0;
  // Beside each other, long items begin first. In a graph most launches are idle, and one that is let in while another reads keys by TMA
  // holds that up by some 4 us on an H100, whatever it does itself: the longest queries that the graph may have come last.
  constexpr std::array kEager = {kPrefill, kVerify, kDecode}, kCaptured = {kDecode, kVerify, kPrefill};
  const std::array<Shape, kNumShapes>& order = captured ? kCaptured : kEager;
  const auto tasks_of = [&](Shape shape) {
    const ShapePlan& s = shapes_[shape];
    return (any ? s.bounds.num_work : int64_t(step.schedules[shape].num_work)) * spec_.num_kv_heads * s.row_blocks;
  };
  Shape last = order.front();
  for (const Shape shape : order)
    if (tasks_of(shape) > 0) last = shape;
  bool is_first = true, sums_in_use = false;  // sums: by a kernel in front, which folds runs in the same memory
  for (const Shape shape : order) {
    const ShapePlan& s = shapes_[shape];
    const Schedule& schedule = step.schedules[shape];
    a.work = memory_->device(s.work);
    a.merges = memory_->device(s.merges);
    a.counts = memory_->device(s.counts);
    a.next_task = counters_.as<int>() + shape;
    a.arrivals = counters_.as<int>() + s.arrivals;
    const int64_t tasks = tasks_of(shape);
    if (tasks == 0) continue;
    // Of a graph most launches have nothing to do: they are over soonest where each is there before the one in front has ended.
    const bool folds = s.kernel.run_sums > 0;
    a.beside = !any && !is_first && !(folds && sums_in_use);
    a.next_waits = any || shape == last;
    is_first = false, sums_in_use = sums_in_use || folds;
    if (shape == kPrefill && !pack_mask_.entry.empty()) launch(loaded(pack_mask_, captured), tasks * seen_tile_words_, cu, a);
    bool mapped = true;
    const auto run_over_cache = [&](const PlanCounts* counts) {
      AttentionParams over_cache = a;
      over_cache.counts = counts;
      AttentionMaps maps{};
      mapped = s.kernel.maps == nullptr || s.kernel.maps(spec_, in.q, in.kv, maps);
      ByOutput& kernels = mapped ? s.kernels : s.without_maps;
      launch(loaded(kernels, out_dtype, captured), tasks, cu, over_cache, maps.q, maps.k, maps.v);  // without maps it does not see them
    };
    const auto in_front = [&] {
      if (captured) run_over_cache(&memory_->device(arrays_.flat_counts)->over_cache);
    };
    const bool flat = shape == kPrefill && (captured || !any) && run_over_flat(in, a, out_dtype, *scratch, cu, captured, in_front);
    if (!flat) run_over_cache(a.counts);
    if (mapped ? s.kernel.joins_pieces : s.mapless_joins) continue;
    const int64_t of_shape = any ? s.bounds.num_merges : int64_t(schedule.merges.size());
    if (of_shape == 0) continue;
    a.merge_lists[shape] = {a.merges, a.counts, merge_shares(spec_, s.policy)};
    merge_tasks += of_shape * spec_.num_kv_heads * a.merge_lists[shape].shares;
  }
  a.beside = false;
  if (merge_tasks > 0) launch(loaded(merge_, out_dtype, captured), merge_tasks, cu, a);
  if (!captured) return;
  captured_run_ = true;
  if (captured_scratch_.empty() || captured_scratch_.back() != scratch) captured_scratch_.push_back(scratch);
  captured_entries_ = std::min(captured_entries_, in.kv.k.size(0));
}

// Prefill of a step whose lists the host has made; false: it has to be run over the cache itself. In a graph, launches that do it for steps
// which have the room for it; others are left to one over the cache, which `in_front` makes.
bool Plan::run_over_flat(const Inputs& in, const AttentionParams& all, DType out, const DeviceBuffer& scratch, CUstream stream,
                         bool captured, const std::function<void()>& in_front) const {
  if (!flat_ || !FlatKv::takes(in.kv)) return false;
  const Step& step = steps_.now();
  const ShapePlan& s = shapes_[kPrefill];
  const FlatStep flat = captured ? flat_->in_graph(step.flat) : step.flat;
  if (captured) captured_flat_blocks_ = std::min(captured_flat_blocks_, flat.blocks);
  if (flat.kv_heads == 0 || flat.blocks == 0) return false;
  AttentionParams a = all;
  a.keys_are_there = false;
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
                       .may_be_idle = all.may_be_idle};
  const Specialised& kernel = loaded(s.over_flat, out, captured);
  const int64_t num_work = captured ? s.bounds.num_work : step.schedules[kPrefill].num_work;
  for (int head = 0; head < spec_.num_kv_heads; head += flat.kv_heads) {
    a.first_kv_head = keys.first_kv_head = head;
    a.kv_heads_now = keys.num_heads = std::min(flat.kv_heads, spec_.num_kv_heads - head);
    const KvCache cache = flat_->cache(array_in(scratch, scratch_.flat_keys), flat, a.kv_heads_now);
    keys.to_k = cache.k.as<char>(), keys.to_v = cache.v.as<char>();
    AttentionMaps maps{};
    if (!s.flat_kernel.maps(spec_, in.q, cache, maps)) return false;  // because of the queries: at once
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
                         .now = &memory_->device(shapes_[kDecode].counts)->num_tokens};
  write_kv_->run(cache, k, v, tokens, cu);
  if (!captured) return;
  captured_write_ = true;
  captured_entries_ = std::min(captured_entries_, cache.k.size(0));
}

std::string Plan::str() const {
  const Step& step = steps_.now();
  if (step.on_device) return fmt::format("{} ({}): planned on the device, for at most {} tokens", table_.backend, arch_, step.num_tokens);
  std::string items;
  size_t merges = 0;
  for (const Schedule& schedule : step.schedules) {
    items += fmt::format("{}{}", items.empty() ? "" : " + ", schedule.num_work);
    merges += schedule.merges.size();
  }
  const std::string flat = step.flat.kv_heads > 0
                               ? fmt::format(", prefill over {} keys made flat {} kv heads at a time", step.flat.rows(), step.flat.kv_heads)
                               : "";
  return fmt::format("{} ({}): {} work items (decode + verify + prefill) x {} kv heads, {} merges{}", table_.backend, arch_, items,
                     spec_.num_kv_heads, merges, flat);
}

}  // namespace imbrex::cuda

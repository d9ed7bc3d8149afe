// See plan.h. Everything that depends on the batch happens in update(); run() checks shapes, fills one POD and launches.
#include "cuda/plan.h"

#include <algorithm>
#include <future>

#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/attention_sm90.h"
#include "cuda/kv_side.h"

namespace imbrex::cuda {
namespace {

constexpr int64_t kMaxHostBlocks = int64_t(1) << 22;  // ids of host block tables: 16 MiB on the device
constexpr int64_t kMaxHostMask = int64_t(64) << 20;   // bytes of host custom masks

bool on_host(const TensorView& t) { return t.device.type == DeviceType::cpu; }

// A step's arrays lie all on the host or all on the device: validate() sees to it.
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
}

int64_t blocks_of(int seq_len, int block_size) { return (int64_t(seq_len) + block_size - 1) / block_size; }

// Of the requests' keys, wherever they are named; 0 without blocks.
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

std::vector<KernelKey> plan_kernels(const AttentionKernels& table, std::string_view arch, const AttentionSpec& spec, size_t num_outputs) {
  std::vector<KernelKey> keys;
  if (spec.kv_format != KvFormat::strided) return keys;
  for (const DType out : spec.out_dtypes().first(std::min(spec.out_dtypes().size(), num_outputs))) {
    for (const Shape shape : kShapes) {
      const ShapeKernel kernel = table.shape(arch, spec, shape);
      if (kernel.tile.rows == 0) return {};
      keys.push_back(table.attention(arch, spec, shape, out));
      if (kernel.maps != nullptr) keys.push_back(table.without_maps->attention(arch, spec, shape, out));
    }
    keys.push_back(table.merge(arch, spec, out));
  }
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
    s.row_blocks = (spec.group_size() + s.kernel.tile.rows - 1) / s.kernel.tile.rows;
  }
  const CutPolicy policies = cut_policy(spec, device, tiles, options.balanced);
  partial_rows_ = partial_rows_bound(policies, options.limits);
  for (const Shape shape : kShapes) {
    shapes_[shape].policy = policies[shape];
    shapes_[shape].bounds = schedule_bounds(policies[shape], options.limits);
    shapes_[shape].l2_keys = keys_in_l2(spec, device, shape);
  }
  name_kernels();
  lay_out();
  // Every item has a query token.
  if (options.on_device)
    device_plan_ = std::make_unique<DevicePlan>(context_, arch_, spec, options.limits, std::max(options.limits.max_num_tokens, 0));
}

// And loads them, several at the same time, unless that is to wait.
void Plan::name_kernels() {
  std::vector<Specialised*> now;
  const auto name = [&](ByOutput& kernels, const char* entry, unsigned threads, unsigned cluster, bool on_demand, const auto& key_of) {
    size_t i = 0;
    for (const DType out : spec_.out_dtypes()) {
      Specialised& s = kernels[i++];
      s = {.key = key_of(out), .entry = entry, .threads = threads, .cluster = cluster, .module = {}, .kernel = {}};
      if (!on_demand) now.push_back(&s);
    }
  };
  const auto name_attention = [&](ByOutput& kernels, const AttentionKernels& table, Shape shape, bool on_demand) {
    const ShapeKernel kernel = table.shape(arch_, spec_, shape);
    name(kernels, kernel.entry, kernel.threads, kernel.cluster, on_demand,
         [&](DType out) { return table.attention(arch_, spec_, shape, out); });
  };
  for (const Shape shape : kShapes) {
    ShapePlan& s = shapes_[shape];
    if (s.bounds.num_work == 0) continue;
    name_attention(s.kernels, table_, shape, options_.load_on_demand);
    if (s.kernel.maps != nullptr) name_attention(s.without_maps, *table_.without_maps, shape, true);
  }
  const auto merges = [](const ShapePlan& s) { return !s.kernel.joins_pieces && s.bounds.num_merges > 0; };
  if (std::ranges::any_of(shapes_, merges))
    name(merge_, "merge", kMergeThreads, 1, options_.load_on_demand, [&](DType out) { return table_.merge(arch_, spec_, out); });
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
  s.grid =
      unsigned(std::max(device_.num_workers, 1) * std::max(s.kernel.blocks_per_multiprocessor(int(s.threads)), 1)) / s.cluster * s.cluster;
}

const Plan::Specialised& Plan::loaded(ByOutput& kernels, DType out, bool captured) const {
  Specialised& s = kernels[size_t(std::ranges::find(spec_.out_dtypes(), out) - spec_.out_dtypes().begin())];
  if (s.module) return s;
  check(!captured, "run.on_demand",
        "expected {} to be loaded before a capture: by plan(), unless load_on_demand, or by an earlier run() with such tensors",
        s.key.path);
  load(s);
  return s;
}

void Plan::lay_out() {
  const PlanLimits& limits = options_.limits;
  const int64_t reqs = std::max(limits.max_num_reqs, 0), tokens = std::max(limits.max_num_tokens, 0);
  const int64_t blocks =
      spec_.block_size > 0 ? checked_mul("update.block_ids", reqs, blocks_of(std::max(limits.max_seq_len, 0), spec_.block_size)) : 0;
  const int64_t mask = spec_.mask.custom ? checked_mul("update.custom_mask", tokens, std::max(limits.max_seq_len, 0)) : 0;
  // What every step sends comes first, what is long last.
  ArrayLayout layout;
  for (ShapePlan& s : shapes_) s.counts = layout.add<PlanCounts>(1);
  arrays_.query_start = layout.add<int>(reqs + 1);
  arrays_.seq_lens = layout.add<int>(reqs);
  arrays_.block_start = layout.add<long>(reqs);
  arrays_.custom_start = layout.add<long>(spec_.mask.custom ? reqs : 0);
  for (ShapePlan& s : shapes_) s.merges = layout.add<MergeItem>(s.bounds.num_merges);
  for (ShapePlan& s : shapes_) s.work = layout.add<WorkItem>(s.bounds.num_work);
  arrays_.slots = layout.add<long>(spec_.block_size > 0 ? tokens : 0);
  arrays_.block_ids = layout.add<int>(std::min(blocks, kMaxHostBlocks));
  arrays_.custom_mask = layout.add<unsigned char>(std::min(mask, kMaxHostMask));
  memory_ = std::make_unique<PlanArrays>(context_, layout);

  batch_ = {.block_ids = memory_->device(arrays_.block_ids),
            .custom_mask = memory_->device(arrays_.custom_mask),
            .slots = TensorView::contiguous(memory_->device(arrays_.slots), DType::i64, {0}, device_.device)};
  size_t counters = kNumShapes;
  for (ShapePlan& s : shapes_) {
    s.arrivals = counters;
    if (s.kernel.joins_pieces) counters += size_t(s.bounds.num_merges) * size_t(spec_.num_kv_heads) * size_t(s.row_blocks);
  }
  counters_ = zeroed(context_, counters * sizeof(int));
  const size_t rows = size_t(partial_rows_) * size_t(spec_.num_q_heads);
  partial_out_ = DeviceBuffer(context_, rows * size_t(spec_.head_dim_v) * sizeof(float));
  partial_state_ = DeviceBuffer(context_, rows * 2 * sizeof(float));
}

// Where kernels find the batch's arrays, checked before anything of the last step is given up.
Plan::BatchArrays Plan::place(const Batch& batch, bool captured) const {
  const TensorView& ids = !batch.block_table.empty() ? batch.block_table : batch.kv_indices;
  BatchArrays placed = batch_;
  if (!ids.empty()) {
    const int64_t count = on_host(ids) ? num_block_ids(batch, spec_) : 0;
    check(count <= int64_t(arrays_.block_ids.capacity), "update.block_ids",
          "expected host block tables with {} blocks in use at most, got {}: put them into device memory", arrays_.block_ids.capacity,
          count);
    placed.block_ids = on_host(ids) ? memory_->device(arrays_.block_ids) : ids.as<const int>();
  }
  if (!batch.custom_mask.empty()) {
    const TensorView& mask = batch.custom_mask;
    check(!on_host(mask) || mask.size(0) <= int64_t(arrays_.custom_mask.capacity), "update.custom_mask",
          "expected a host custom mask of {} bytes at most, got {}: put it into device memory", arrays_.custom_mask.capacity, mask);
    placed.custom_mask = on_host(mask) ? memory_->device(arrays_.custom_mask) : mask.as<const unsigned char>();
  }
  placed.has_slots = !batch.slot_mapping.empty();
  if (placed.has_slots) {
    placed.slots = on_host(batch.slot_mapping)
                       ? TensorView::contiguous(memory_->device(arrays_.slots), DType::i64, {batch.num_tokens()}, device_.device)
                       : batch.slot_mapping;
  }
  // What is captured after an update that is captured too reads where that update points to.
  const bool same = captured || ((!captured_run_ || (placed.block_ids == batch_.block_ids && placed.custom_mask == batch_.custom_mask)) &&
                                 (!captured_write_ || placed.slots.data == batch_.slots.data));
  check(same, "update.moved", "a captured graph reads the block ids, slots or custom mask of an earlier update from another place");
  return placed;
}

void Plan::update(const Batch& batch, Stream stream) {
  if (options_.validate) validate(batch, spec_, options_.limits, -1);
  check_batch_memory(batch, device_.device);
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  check(!is_captured(cu), "update.captured", "expected a stream that captures nothing: update() is not part of a graph");
  const PlanLimits& limits = options_.limits;
  check(batch.num_reqs() <= limits.max_num_reqs && batch.num_tokens() <= limits.max_num_tokens, "update.limits",
        "expected at most {} requests and {} tokens, got {} and {}", limits.max_num_reqs, limits.max_num_tokens, batch.num_reqs(),
        batch.num_tokens());
  const BatchArrays placed = place(batch, false);
  int rows = 0;
  for (ShapePlan& s : shapes_) {
    s.policy.first_partial = rows;
    cut(batch, spec_.mask, s.policy, s.schedule);
    rows += s.schedule.num_partial_rows;
    check(size_t(s.schedule.num_work) <= s.work.capacity, "update.limits", "expected a batch within the limits: {} work items, got {}",
          s.work.capacity, s.schedule.num_work);
  }
  check(rows <= partial_rows_, "update.limits", "expected a batch within the limits: {} partial rows, got {}", partial_rows_, rows);
  const int num_reqs = batch.num_reqs(), num_tokens = batch.num_tokens();
  const size_t reqs = size_t(num_reqs);
  PlanArrays& m = *memory_;
  m.begin();
  for (const ShapePlan& s : shapes_)
    *m.put(s.counts, 1) = {.num_work = s.schedule.num_work,
                           .num_merges = int(s.schedule.merges.size()),
                           .num_tokens = num_tokens,
                           .num_reqs = num_reqs,
                           .heads_together = heads_together(batch, s.policy, s.l2_keys, spec_.num_kv_heads)};
  if (num_tokens > 0) {
    std::copy_n(batch.query_start_loc.data(), reqs + 1, m.put(arrays_.query_start, reqs + 1));
    std::copy_n(batch.seq_lens.data(), reqs, m.put(arrays_.seq_lens, reqs));
    put_block_starts(batch);
    if (spec_.mask.custom) {
      long* starts = m.put(arrays_.custom_start, reqs);
      long start = 0;
      for (int r = 0; r < num_reqs; ++r) {
        starts[r] = start;
        start += long(batch.query_len(r)) * batch.seq_lens[r];
      }
    }
    for (const ShapePlan& s : shapes_)
      if (const auto& merges = s.schedule.merges; !merges.empty()) std::ranges::copy(merges, m.put(s.merges, merges.size()));
    for (const ShapePlan& s : shapes_)
      if (s.schedule.num_work > 0) write_work(s.schedule, m.put(s.work, size_t(s.schedule.num_work)));
    if (!batch.slot_mapping.empty() && on_host(batch.slot_mapping))
      std::copy_n(batch.slot_mapping.as<const long>(), num_tokens, m.put(arrays_.slots, size_t(num_tokens)));
    put_block_ids(batch);
    if (!batch.custom_mask.empty() && on_host(batch.custom_mask)) {
      const size_t bytes = size_t(batch.custom_mask.size(0));
      std::copy_n(batch.custom_mask.as<const unsigned char>(), bytes, m.put(arrays_.custom_mask, bytes));
    }
  }
  m.send(cu);
  const TensorView& starts = spec_.block_size == 0 ? batch.kv_start_loc : batch.kv_indptr;
  if (!starts.empty() && !on_host(starts)) tables_->widen_starts(starts, m.device(arrays_.block_start), num_reqs, cu);
  batch_ = placed;
  reach_ = options_.validate ? reach_of(batch, spec_) : BatchReach{};
  num_tokens_ = num_tokens;
  on_device_ = false;
}

// Host tables are packed: only blocks that are in use travel.
void Plan::put_block_starts(const Batch& batch) {
  const int num_reqs = batch.num_reqs();
  const TensorView& table = batch.block_table;
  if (spec_.block_size == 0 ? !on_host(batch.kv_start_loc) : table.empty() && !on_host(batch.kv_indptr)) return;
  long* starts = memory_->put(arrays_.block_start, size_t(num_reqs));
  long packed = 0;
  for (int r = 0; r < num_reqs; ++r) {
    if (spec_.block_size == 0) {
      starts[r] = batch.kv_start_loc.empty() ? 0 : batch.kv_start_loc.as<const int>()[r];
    } else if (!table.empty() && !on_host(table)) {
      starts[r] = r * table.stride(0);
    } else {
      starts[r] = packed;
      packed += blocks_of(batch.seq_lens[r], spec_.block_size);
    }
  }
}

void Plan::put_block_ids(const Batch& batch) {
  const TensorView &table = batch.block_table, &indices = batch.kv_indices;
  if (table.empty() ? indices.empty() || !on_host(indices) : !on_host(table)) return;
  int* ids = memory_->put(arrays_.block_ids, size_t(num_block_ids(batch, spec_)));
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const int* row =
        table.empty() ? indices.as<const int>() + batch.kv_indptr.as<const int>()[r] : table.as<const int>() + r * table.stride(0);
    ids = std::copy_n(row, blocks_of(batch.seq_lens[r], spec_.block_size), ids);
  }
}

bool Plan::is_captured(CUstream stream) const {
  int status = kCaptureStatusNone;
  if (stream != nullptr) check_cuda(need_driver().cuStreamIsCapturing(stream, &status), "ask whether a stream is captured");
  return status != kCaptureStatusNone;
}

AttentionParams Plan::params(const Inputs& in, const Outputs& out, DType out_dtype) const {
  const PlanArrays& m = *memory_;
  const long q_size = size_of(in.q.dtype), out_size = size_of(out_dtype);
  AttentionParams a{};
  a.q = in.q.as<const char>();
  a.q_token_stride = in.q.stride(0) * q_size;
  a.q_head_stride = in.q.stride(1) * q_size;
  a.out = out.out.as<char>();
  a.out_token_stride = out.out.stride(0) * out_size;
  a.out_head_stride = out.out.stride(1) * out_size;
  if (!out.lse.empty()) {
    a.lse = out.lse.as<float>();
    a.lse_token_stride = out.lse.stride(0);
    a.lse_head_stride = out.lse.stride(1);
  }
  a.k = kv_side(in.kv.k, in.kv.k_scale, spec_);
  a.v = kv_side(in.kv.v, in.kv.v_scale, spec_);
  a.query_start = m.device(arrays_.query_start);
  a.seq_lens = m.device(arrays_.seq_lens);
  a.block_ids = spec_.block_size > 0 ? batch_.block_ids : nullptr;
  a.block_start = m.device(arrays_.block_start);
  if (spec_.mask.custom) {
    a.custom_mask = batch_.custom_mask;
    a.custom_start = m.device(arrays_.custom_start);
  }
  a.num_kv_heads = spec_.num_kv_heads;
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
  a.partial_out = partial_out_.as<float>();
  a.partial_state = partial_state_.as<float>();
  return a;
}

// Thread blocks, or clusters of them, take tasks until there are none; so many as there are tasks, if these are few.
template <class... Maps>
void Plan::launch(const Specialised& s, int64_t tasks, CUstream stream, const AttentionParams& a, const Maps&... maps) const {
  const unsigned grid = unsigned(std::min<int64_t>(s.grid, tasks * s.cluster));
  s.kernel.launch({.grid_x = grid, .threads = s.threads, .cluster = s.cluster, .programmatic = programmatic_}, stream, a, maps...);
}

void Plan::run(const Inputs& in, const Outputs& out, Stream stream) const {
  const DType out_dtype = check_run(spec_, device_.device, in, out, num_tokens_, reach_);
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  // A graph has to hold what a later batch may need, and so do lists that only the device knows; otherwise what this one does not need is
  // left out.
  const bool captured = is_captured(cu), any = captured || on_device_;
  AttentionParams a = params(in, out, out_dtype);
  if (spec_.score.relative_buckets > 0) tables_->expand_bias(in.relative_bias, cu);
  for (const Shape shape : {kPrefill, kVerify, kDecode}) {
    const ShapePlan& s = shapes_[shape];
    a.work = memory_->device(s.work);
    a.merges = memory_->device(s.merges);
    a.counts = memory_->device(s.counts);
    a.next_task = counters_.as<int>() + shape;
    a.arrivals = counters_.as<int>() + s.arrivals;
    const int64_t tasks = (any ? s.bounds.num_work : int64_t(s.schedule.num_work)) * spec_.num_kv_heads * s.row_blocks;
    if (tasks == 0) continue;
    AttentionMaps maps{};
    const bool mapped = s.kernel.maps == nullptr || s.kernel.maps(spec_, in.q, in.kv, maps);
    ByOutput& kernels = mapped ? s.kernels : s.without_maps;
    launch(loaded(kernels, out_dtype, captured), tasks, cu, a, maps.q, maps.k, maps.v);  // a kernel that takes no maps does not see them
    const int64_t merges = s.kernel.joins_pieces ? 0 : any ? s.bounds.num_merges : int64_t(s.schedule.merges.size());
    if (merges > 0) launch(loaded(merge_, out_dtype, captured), merges * spec_.num_q_heads, cu, a);
  }
  captured_run_ = captured_run_ || captured;
}

void Plan::write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream stream) const {
  check(write_kv_ != nullptr, "write_kv.ragged", "write_kv needs a paged cache, but block_size is {}", spec_.block_size);
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  const bool captured = is_captured(cu);
  const NewTokens tokens{.slots = batch_.has_slots || num_tokens_ == 0 ? batch_.slots : TensorView{},
                         .num_tokens = num_tokens_,
                         .reach = reach_,
                         .captured_tokens = on_device_ ? num_tokens_
                                            : captured ? options_.limits.max_num_tokens
                                                       : 0,
                         .now = &memory_->device(shapes_[kDecode].counts)->num_tokens};
  write_kv_->run(cache, k, v, tokens, cu);
  captured_write_ = captured_write_ || captured;
}

std::string Plan::str() const {
  if (on_device_) return fmt::format("{} ({}): planned on the device, for at most {} tokens", table_.backend, arch_, num_tokens_);
  std::string items;
  size_t merges = 0;
  for (const ShapePlan& s : shapes_) {
    items += fmt::format("{}{}", items.empty() ? "" : " + ", s.schedule.num_work);
    merges += s.schedule.merges.size();
  }
  return fmt::format("{} ({}): {} work items (decode + verify + prefill) x {} kv heads, {} merges", table_.backend, arch_, items,
                     spec_.num_kv_heads, merges);
}

}  // namespace imbrex::cuda

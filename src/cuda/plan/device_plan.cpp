// See device_plan.h; host side of plan_batch.cu.
#include "cuda/plan/device_plan.h"

#include <algorithm>

#include "attention/cut_rules.h"
#include "attention/plan_checks.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/plan/plan.h"
#include "family/batch_checks.h"

namespace imbrex::cuda {
namespace {

constexpr int kLeastThreads = 128;

// What they are is the kernel's affair.
void check_positions(const AttentionSpec& spec, const TensorView& positions, int tokens) {
  check(spec.mask.positions || positions.empty(), "batch.positions.unexpected", "positions given for a spec whose mask is {}: {}",
        spec.mask.str(), positions);
  if (!spec.mask.positions) return;
  check(positions.size(0) >= tokens, "batch.positions.size", "the spec has given positions, expected i32[{} or more], got {}", tokens,
        positions);
  check(positions.dtype == DType::i32 && positions.rank == 1 && (positions.size(0) == 1 || positions.stride(0) == 1),
        "batch.positions.dtype", "expected contiguous i32[{} or more], got {}", tokens, positions);
}

}  // namespace

KernelKey plan_batch_key(std::string_view arch) { return {"plan_batch.cu", std::string(arch), {}}; }

DevicePlan::DevicePlan(const ContextPtr& context, std::string_view arch, const AttentionSpec& spec, const PlanLimits& limits,
                       int64_t most_items)
    : spec_(spec),
      limits_(limits),
      device_{DeviceType::cuda, context->device()},
      module_(Module::load(context, plan_batch_key(arch))),
      kernel_(module_->kernel("plan_batch")),
      item_start_(context, size_t(limits.max_num_reqs) * sizeof(int)),
      items_(context, size_t(most_items) * sizeof(CutItem)),
      broken_(zeroed(context, kNumBatchRules * sizeof(int))),
      zeros_(size_t(limits.max_num_reqs) + 1) {}

Batch DevicePlan::arrays_of(const DeviceBatch& batch) const {
  check_lengths(batch, limits_);
  const int64_t reqs = batch.num_reqs();
  const int tokens = max_tokens(batch, limits_);
  const TensorView &slots = batch.slot_mapping, &mask = batch.custom_mask;
  Batch arrays{.query_start_loc = std::span(zeros_).first(size_t(reqs) + 1),
               .seq_lens = std::span(zeros_).first(size_t(reqs)),
               .block_table = batch.block_table,
               .kv_indptr = batch.kv_indptr,
               .kv_indices = batch.kv_indices,
               .kv_last_page_len = {},
               .kv_start_loc = batch.kv_start_loc,
               .slot_mapping = slots,
               .custom_mask = {}};
  validate(arrays, spec_, limits_, -1);
  check(slots.empty() || slots.size(0) >= tokens, "batch.slot_mapping.size", "expected {} entries, got {}", tokens, slots);
  check(spec_.mask.custom != mask.empty(), mask.empty() ? "batch.custom_mask.missing" : "batch.custom_mask.unexpected",
        "the spec's mask is {}, custom_mask is {}", spec_.mask.str(), mask);
  check(mask.empty() || (mask.dtype == DType::u8 && mask.rank == 1 && (mask.size(0) <= 1 || mask.stride(0) == 1)),
        "batch.custom_mask.dtype", "expected contiguous u8[sum of q_len * seq_len], got {}", mask);
  arrays.custom_mask = mask;
  check_positions(spec_, batch.positions, tokens);
  const auto on_device = [&](const TensorView& t, const char* name) { check_memory(t, name, "update.device", device_); };
  on_device(batch.seq_lens, "seq_lens");
  on_device(batch.query_start_loc, "query_start_loc");
  on_device(batch.block_table, "block_table");
  on_device(batch.kv_indptr, "kv_indptr");
  on_device(batch.kv_indices, "kv_indices");
  on_device(batch.kv_start_loc, "kv_start_loc");
  on_device(slots, "slot_mapping");
  on_device(mask, "custom_mask");
  on_device(batch.positions, "positions");
  return arrays;
}

PlanBatchParams DevicePlan::params(const DeviceBatch& batch) const {
  const TensorView &table = batch.block_table, &starts = spec_.block_size > 0 ? batch.kv_indptr : batch.kv_start_loc;
  PlanBatchParams p{};
  p.lengths_from = batch.seq_lens.as<const int>();
  p.starts_from = batch.query_start_loc.as<const int>();
  p.kv_starts = starts.as<const int>();
  p.kv_stride = table.empty() ? 0 : table.stride(0);
  p.kv_entries = std::min<long>(!table.empty() ? table.size(1) : spec_.block_size > 0 ? batch.kv_indices.size(0) : INT32_MAX, INT32_MAX);
  p.entry_keys = std::max(spec_.block_size, 1);
  p.mask_bytes = batch.custom_mask.size(0);
  p.num_reqs = int(batch.num_reqs());
  p.max_tokens = max_tokens(batch, limits_);
  p.min_query_len = limits_.min_query_len;
  p.max_query_len = limits_.max_query_len;
  p.max_seq_len = limits_.max_seq_len;
  p.num_kv_heads = spec_.num_kv_heads;
  p.positions_from = batch.positions.as<const int>();
  p.most_position = kMostPosition;
  p.queries_are_keys = spec_.kind != AttentionKind::encoder_decoder;
  p.item_start = item_start_.as<int>();
  p.items = items_.as<CutItem>();
  p.broken = broken_.as<int>();
  return p;
}

// A thread for each kind of splits of as many requests, as far as there are threads.
void DevicePlan::launch(const PlanBatchParams& p, CUstream stream) const {
  const int threads = std::clamp((kSplitKinds * p.num_reqs + 31) / 32 * 32, kLeastThreads, kMostPlanThreads);
  kernel_.launch({.grid_x = 1, .threads = unsigned(threads)}, stream, p);
}

std::vector<Reason> DevicePlan::problems(CUstream stream) const {
  int last[kNumBatchRules];
  copy_to_host(last, broken_.address(), sizeof last, stream);
  fill_bytes(broken_.address(), 0, broken_.bytes(), stream);
  check_cuda(need_driver().cuStreamSynchronize(stream), "wait for what a plan on the device found");
  const Reason rules[kNumBatchRules] = {
      {"batch.query_start_loc.monotone", "starts that begin with 0 and do not fall", {}},
      {"batch.num_tokens.limit", "query tokens within the batch's max_num_tokens", {}},
      {"batch.query_len.limit",
       fmt::format("no query tokens of a request, or {} to {}", std::max(limits_.min_query_len, 1),
                   limits_.max_query_len > 0 ? limits_.max_query_len : limits_.max_num_tokens),
       {}},
      {"batch.seq_len.limit", fmt::format("0 to {} keys", limits_.max_seq_len), {}},
      {"batch.seq_len.shorter_than_query", "as many keys as query tokens, or more", {}},
      {"batch.keys.room", "blocks, or rows, for all keys", {}},
      {"batch.custom_mask.size", "rows of the custom mask for all query tokens", {}},
  };
  std::vector<Reason> problems;
  for (int rule = 0; rule < kNumBatchRules; ++rule)
    if (last[rule] > 0)
      problems.push_back({rules[rule].code, rules[rule].wanted, fmt::format("something else in request {}", last[rule] - 1)});
  return problems;
}

void Plan::update_on_device(const DeviceBatch& batch, Stream stream) {
  check(device_plan_ != nullptr, "update.on_device", "expected a plan made with PlanOptions::on_device, got one without");
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  const BatchArrays placed = place(device_plan_->arrays_of(batch), is_captured(cu));
  const PlanArrays& m = *memory_;
  PlanBatchParams p = device_plan_->params(batch);
  p.query_start = m.device(arrays_.query_start);
  p.seq_lens = m.device(arrays_.seq_lens);
  p.block_start = m.device(arrays_.block_start);
  p.custom_start = spec_.mask.custom ? m.device(arrays_.custom_start) : nullptr;
  p.positions = spec_.mask.positions ? m.device(arrays_.positions) : nullptr;
  static_assert(kPlanRegimes == kNumRegimes);
  for (const Regime regime : kRegimes) {
    const RegimePlan& s = regimes_[regime];
    p.regimes[regime] = {cut_rules(spec_.mask, s.policy), s.bounds.num_work > 0 ? m.device(s.work) : nullptr, m.device(s.merges),
                         m.device(s.counts), s.l2_keys};
  }
  p.flat = flat_ ? m.device(arrays_.flat_counts) : nullptr;
  device_plan_->launch(p, cu);
  memory_->made_on_device();
  Step& step = steps_.now();
  step.arrays = placed;
  step.reach = {};
  step.num_tokens = p.max_tokens;
  step.on_device = true;
  step.key_starts = {};
  has_step_ = true;
}

std::vector<Reason> Plan::device_problems(Stream stream) {
  if (device_plan_ == nullptr) return {};
  const CurrentContext current(*context_);
  return device_plan_->problems(cu_stream(stream));
}

}  // namespace imbrex::cuda

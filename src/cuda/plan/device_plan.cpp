// See device_plan.h; host side of plan_batch.cu.
#include "cuda/plan/device_plan.h"

#include <algorithm>
#include <array>

#include "attention/cut_rules.h"
#include "attention/plan_checks.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/driver/open_device.h"
#include "cuda/plan/plan.h"
#include "family/batch_checks.h"

namespace imbrex::cuda {
namespace {

constexpr int kLeastThreads = 128;

// In the order of BatchRule.
std::vector<gpu::Rule> rules_of(const PlanLimits& limits) {
  const std::array own{gpu::Rule{"batch.keys.room", "blocks, or rows, for all keys"},
                       gpu::Rule{"batch.custom_mask.size", "rows of the custom mask for all query tokens"},
                       gpu::Rule{"batch.draft_parents.range", "parents in front of their tokens, and a chain of more than 64 of these"}};
  static_assert(gpu::kNumLengthRules + std::tuple_size_v<decltype(own)> == kNumBatchRules);
  return gpu::rules_of_lengths(limits, own);
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
      broken_(std::make_shared<ContextDevice>(context), rules_of(limits)),
      zeros_(size_t(limits.max_num_reqs) + 1) {}

PlanBatchParams DevicePlan::params(const DeviceBatch& batch) const {
  const TensorView &table = batch.block_table, &starts = spec_.block_size > 0 ? batch.kv_indptr : batch.kv_start_loc;
  PlanBatchParams p{};
  p.lengths_from = batch.seq_lens.as<const int>();
  p.starts_from = batch.query_start_loc.as<const int>();
  p.kv_starts = starts.as<const int>();
  p.kv_stride = table.empty() ? 0 : table.stride(0);
  p.kv_entries = std::min<long>(!table.empty() ? table.size(1) : spec_.block_size > 0 ? batch.kv_indices.size(0) : INT32_MAX, INT32_MAX);
  p.entry_keys = std::max(spec_.block_size, 1);
  p.mask_is_packed = !batch.packed_mask.empty();
  p.mask_size = p.mask_is_packed ? 8 * batch.packed_mask.size(0) : batch.custom_mask.size(0);
  p.num_reqs = int(batch.num_reqs());
  p.max_tokens = max_tokens(batch, limits_);
  p.min_query_len = limits_.min_query_len;
  p.max_query_len = limits_.max_query_len;
  p.max_seq_len = limits_.max_seq_len;
  p.num_kv_heads = spec_.num_kv_heads;
  p.positions_from = batch.positions.as<const int>();
  if (spec_.mask.tree) {
    p.parents_from = batch.draft_parents.as<const int>();
    if (p.parents_from != nullptr) p.num_drafts_from = batch.num_drafts.as<const int>();
  }
  p.most_position = kMostPosition;
  p.queries_are_keys = spec_.kind != AttentionKind::encoder_decoder;
  p.item_start = item_start_.as<int>();
  p.items = items_.as<CutItem>();
  p.broken = broken_.last_requests();
  return p;
}

// A thread for each kind of splits of as many requests, as far as there are threads.
void DevicePlan::launch(const PlanBatchParams& p, CUstream stream) const {
  const int threads = std::clamp((kSplitKinds * p.num_reqs + 31) / 32 * 32, kLeastThreads, kMostPlanThreads);
  kernel_.launch({.grid_x = 1, .threads = unsigned(threads)}, stream, p);
}

void Plan::update_on_device(const DeviceBatch& batch, Stream stream) {
  check(device_plan_ != nullptr, "update.on_device", "expected a plan made with PlanOptions::on_device, got one without");
  if (!spec_.mask_mod.empty())
    check(spec_.mask_mod.tensors().empty(), "update.mask_tensors",
          "expected a mask_mod without tensors where lengths are on the device, got {}", spec_.mask_mod.str());
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  const BatchArrays placed = place(device_plan_->arrays_of(batch), is_captured(cu));
  const PlanArrays& m = *memory_;
  PlanBatchParams p = device_plan_->params(batch);
  p.query_start = m.device(arrays_.query_start);
  p.seq_lens = m.device(arrays_.seq_lens);
  p.block_start = m.device(arrays_.block_start);
  p.custom_start = spec_.mask.custom ? m.device(arrays_.custom_start) : nullptr;
  p.positions = spec_.mask.positions || spec_.mask.tree ? m.device(arrays_.positions) : nullptr;
  if (spec_.mask.tree) p.tree_seen = m.device(arrays_.tree_seen), p.tree_first = m.device(arrays_.tree_first);
  static_assert(kPlanRegimes == kNumRegimes);
  for (const Regime regime : kRegimes) {
    const RegimePlan& s = regimes_[regime];
    p.regimes[regime] = {cut_rules(spec_.mask, s.policy), s.bounds.num_work > 0 ? m.device(s.work) : nullptr, m.device(s.merges),
                         m.device(s.counts), s.l2_keys};
  }
  p.flat = flat_ ? m.device(arrays_.flat_counts) : nullptr;
  device_plan_->launch(p, cu);
  pack_mask_mod(regimes_[kPrefill].bounds.num_work, cu);
  memory_->made_on_device();
  Step& step = steps_.now();
  step.arrays = placed;
  step.reach = {};
  step.num_tokens = p.max_tokens;
  step.on_device = true;
  step.key_starts = {};
  has_step_ = true;
}

Plan::Lengths Plan::lengths() const {
  const PlanCounts* const counts = memory_->device(regimes_[kDecode].counts);
  return {&counts->num_tokens, &counts->num_reqs, memory_->device(arrays_.query_start), memory_->device(arrays_.seq_lens)};
}

std::vector<Reason> Plan::device_problems(Stream stream) {
  if (device_plan_ == nullptr) return {};
  return device_plan_->problems(stream);
}

}  // namespace imbrex::cuda

// See state_lists.h.
#include "cuda/state/state_lists.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "cuda/driver/open_device.h"
#include "family/batch_checks.h"

namespace imbrex::cuda {
namespace {

// In the order of StateRule.
std::vector<gpu::Rule> rules_of(int max_drafts, const PlanLimits& limits) {
  const std::array own{
      gpu::Rule{"batch.state.slot", "a slot of 0 or more"},
      gpu::Rule{"batch.state.num_drafts", fmt::format("0 to {} drafts, and no more than tokens", max_drafts)},
      gpu::Rule{"batch.state.accepted_drafts", fmt::format("0 to {} accepted drafts, none where nothing has gone by", max_drafts)},
      gpu::Rule{"batch.state.source", "a slot of 0 or more to read"},
      gpu::Rule{"batch.draft_parents.range", "a parent in front of each draft, at or behind the last token that is no draft"},
      gpu::Rule{"batch.state.shared", "a slot of its own for each request"},
      gpu::Rule{"batch.state.source", "a slot to read that no other request writes"},
      gpu::Rule{"batch.state.slot", "a slot of the state that run() was given"}};
  static_assert(gpu::kNumLengthRules + std::tuple_size_v<decltype(own)> == kNumStateRules);
  return gpu::rules_of_lengths(limits, own);
}

}  // namespace

KernelKey plan_state_batch_key(std::string_view arch) { return {"plan_state_batch.cu", std::string(arch), {}}; }

StateLists::StateLists(const ContextPtr& context, const DeviceInfo& device, const PlanOptions& options, std::string_view arch,
                       const StateDrafts& drafts)
    : device_(device), options_(options), drafts_(drafts), arch_(arch), context_(context) {
  check(!options.on_device || !options.balanced, "backend.on_device",
        "expected on_device or balanced, got both: shares of the load are computed on the host");
  ArrayLayout layout;  // in this order, so that a step is one copy
  counts_ = layout.add<StateCounts>(1);
  requests_ = layout.add<StateRequest>(int64_t(options.limits.max_num_reqs) + 1);
  if (drafts.tree) parent_rows_ = layout.add<int>(options.limits.max_num_tokens);
  const auto open = std::make_shared<ContextDevice>(context);
  memory_ = std::make_unique<PlanArrays>(open, layout);
  if (!options.on_device) return;
  plan_module_ = Module::load(context, plan_state_batch_key(arch));
  plan_kernel_ = plan_module_->kernel("plan_state_batch");
  broken_ = std::make_unique<gpu::BrokenRules>(open, rules_of(drafts.most, options.limits));
}

// Checks the slots of a step against the state of a captured graph, as run() does outside of graphs. The numbers of rows are not checked,
// since the graph may not be replayed for this step.
void StateLists::check_captured(const StateStep& step) const {
  check(step.padding.empty() || !captured_without_padding_, "update.captured_padding",
        "a captured graph has no launch for padding, since its step had no pad_slot; the batch has {} requests that are padding",
        step.padding.size());
  check(step.num_slots <= captured_slots_, "update.captured_cache", "a captured graph has a state of {} slots, the batch has slot {}",
        captured_slots_, step.num_slots - 1);
}

// Into pinned memory, from where they are sent.
void StateLists::put(const StateStep& step) {
  memory_->begin();
  *memory_->put(counts_, 1) = counts_of(step);
  StateRequest* to = memory_->put(requests_, size_t(num_requests(step)) + 1);
  const auto put_other = [&](int begin, int slot) { *to++ = {.begin = begin, .slot = slot, .source = -1, .first_row = -1, .drafts = 0}; };
  auto padding = step.padding.begin();
  const auto put_padding = [&](int end) {  // that is in front of a token
    for (; padding != step.padding.end() && padding->begin < end; ++padding) put_other(padding->begin, kIsPadding);
  };
  for (const imbrex::StateRequest& r : step.requests) {
    put_padding(r.begin);
    *to++ = {
        .begin = r.begin, .slot = r.slot, .source = r.source, .first_row = short(r.fresh ? -1 : r.first_row), .drafts = short(r.drafts)};
  }
  put_padding(step.num_tokens);
  put_other(step.num_tokens, kLeftOut);
  if (!drafts_.tree) return;
  int* const rows = memory_->put(parent_rows_, size_t(step.num_tokens));
  for (const imbrex::StateRequest& r : step.requests)
    for (int token = r.begin; token < r.end; ++token)
      rows[token] = step.parent_rows.empty() ? std::max(token - (r.end - r.drafts), 0) : step.parent_rows[size_t(token)];
}

void StateLists::update(const Batch& batch, Stream stream) {
  read_batch(drafts_, options_.limits, batch, options_.validate, spare_.step);
  spare_.on_device = false;
  spare_.has_pad_slot = batch.pad_slot.has_value();
  const CUstream cu = cu_stream(stream);
  check(!is_captured(cu), "update.captured", "expected a stream that captures nothing: update() is not part of a graph");
  const auto count = size_t(num_requests(spare_.step));
  check(count < requests_.capacity, "update.limits", "expected at most {} requests with tokens, got {}", requests_.capacity - 1, count);
  check(spare_.step.num_tokens <= options_.limits.max_num_tokens, "update.limits", "expected at most {} tokens, got {}",
        options_.limits.max_num_tokens, spare_.step.num_tokens);
  check_captured(spare_.step);
  if (spare_.has_pad_slot) load_padding();
  put(spare_.step);
  try {
    memory_->send(cu);
  } catch (...) {
    has_step_ = memory_->is_whole();
    throw;
  }
  std::swap(now_, spare_);
  has_step_ = true;
}

void StateLists::check_parents(const TensorView& t, int64_t num_tokens) const {
  const bool fits = t.rank == 1 && t.dtype == DType::i32 && t.size(0) >= num_tokens && (t.size(0) <= 1 || t.stride(0) == 1);
  check(fits, "batch.draft_parents.size", "expected contiguous i32[>= {}], got {}", num_tokens, t);
  check_layout(t, "draft_parents");
  check(t.device == device_.device, "update.device", "draft_parents: expected memory of {}, got {}", device_.device, t);
}

void StateLists::update_on_device(const DeviceBatch& batch, Stream stream) {
  check(plan_module_ != nullptr, "update.on_device", "expected a plan made with PlanOptions::on_device, got one without");
  check_lengths(batch, options_.limits);
  const int64_t reqs = batch.num_reqs();
  const auto list = [&](const TensorView& t, const char* name, bool optional) -> const int* {
    if (reqs == 0 || (optional && t.empty())) return nullptr;
    check_list(t, name, reqs, "batch.state.size");
    check(t.device == device_.device, "update.device", "{}: expected memory of {}, got {}", name, device_.device, t);
    return t.as<const int>();
  };
  for (const TensorView* t : {&batch.seq_lens, &batch.query_start_loc})
    check(reqs == 0 || t->device == device_.device, "update.device", "{}: expected memory of {}, got {}",
          t == &batch.seq_lens ? "seq_lens" : "query_start_loc", device_.device, *t);
  const PlanLimits& limits = options_.limits;
  check(drafts_.tree || batch.draft_parents.empty(), "batch.draft_parents.unexpected",
        "expected none for a layer without tree_drafts, got {}", batch.draft_parents);
  if (!batch.draft_parents.empty()) check_parents(batch.draft_parents, max_tokens(batch, limits));
  const PlanStateBatchParams params{.starts = batch.query_start_loc.as<const int>(),
                                    .lengths = batch.seq_lens.as<const int>(),
                                    .slots = list(batch.state_slots, "state_slots", false),
                                    .drafts = list(batch.num_drafts, "num_drafts", true),
                                    .accepted = list(batch.accepted_drafts, "accepted_drafts", true),
                                    .sources = list(batch.source_slots, "source_slots", true),
                                    .parents = batch.draft_parents.as<const int>(),
                                    .num_reqs = int(reqs),
                                    .max_tokens = max_tokens(batch, limits),
                                    .min_query_len = limits.min_query_len,
                                    .max_query_len = limits.max_query_len,
                                    .max_seq_len = limits.max_seq_len,
                                    .max_drafts = drafts_.most,
                                    .has_pad_slot = batch.pad_slot.has_value(),
                                    .pad_slot = batch.pad_slot.value_or(0),
                                    .requests = memory_->device(requests_),
                                    .parent_rows = parent_rows(),
                                    .counts = memory_->device(counts_),
                                    .broken = broken_->last_requests()};
  if (params.has_pad_slot) load_padding();
  plan_kernel_.launch({.threads = kPlanStateBatchThreads}, cu_stream(stream), params);
  memory_->made_on_device();
  now_.step.requests.clear();
  now_.step.padding.clear();
  now_.has_pad_slot = params.has_pad_slot;
  now_.step.num_tokens = params.max_tokens;
  now_.step.num_slots = 0;
  now_.on_device = true;
  has_step_ = true;
}

void StateLists::load_padding() {
  if (padding_module_ != nullptr) return;
  const std::shared_ptr<const Module> module = Module::load(context_, plan_state_batch_key(arch_));
  padding_kernel_ = module->kernel("zero_padding");
  padding_module_ = module;
}

void StateLists::zero_padding(const TensorView& out, bool captured, CUstream stream) const {
  const bool known = !captured && !now_.on_device;
  if (known ? now_.step.padding.empty() : !now_.has_pad_slot) return;
  constexpr int64_t kBlocksTogether = 4;  // of a multiprocessor
  const int64_t requests = known ? num_requests() : options_.limits.max_num_reqs, size = size_of(out.dtype);
  const bool has_heads = out.rank == 3;
  const ZeroPaddingParams params{.requests = this->requests(),
                                 .counts = counts(),
                                 .out = out.as<char>(),
                                 .token_stride = out.stride(0) * size,
                                 .row_stride = has_heads ? out.stride(1) * size : 0,
                                 .rows_of_token = has_heads ? int(out.size(1)) : 1,
                                 .row_bytes = int(out.size(out.rank - 1) * size)};
  const int64_t grid = std::clamp<int64_t>(requests, 1, std::max(device_.num_workers, 1) * kBlocksTogether);
  padding_kernel_.launch({.grid_x = unsigned(grid), .threads = kZeroPaddingThreads, .programmatic = device_.sm >= 90}, stream, params);
}

std::vector<Reason> StateLists::device_problems(Stream stream) {
  return broken_ == nullptr ? std::vector<Reason>() : broken_->take(stream);
}

void StateLists::check_has_step(std::string_view plan) const {
  check(has_step_, "plan.no_step", "expected a step to compute: the last update of {} failed, and the step before could not be kept",
        str(plan));
}

std::string StateLists::str(std::string_view plan) const {
  if (now_.on_device) return fmt::format("{}: planned on the device, for at most {} tokens", plan, now_.step.num_tokens);
  return fmt::format("{}: {} tokens of {} requests", plan, now_.step.num_tokens, num_requests());
}

}  // namespace imbrex::cuda

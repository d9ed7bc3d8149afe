// The backend of the short convolution for NVIDIA GPUs: its plan keeps the step's requests in device memory and launches one kernel a
// layer. Grids and addresses follow from the limits where a launch is captured, so that a graph replays any batch within them.
#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/driver/module.h"
#include "cuda/driver/open_device.h"
#include "cuda/plan/plan_arrays.h"
#include "cuda/short_conv/short_conv.h"
#include "family/batch_checks.h"
#include "family/begin_plan.h"
#include "gpu/broken_rules.h"
#include "short_conv/step.h"

namespace imbrex {
namespace cuda {
namespace {

constexpr const char* kName = "cuda_sm80";
constexpr int kLeastSm = 80;

// In the order of StateRule.
std::vector<gpu::Rule> rules_of(const ShortConvSpec& spec, const PlanLimits& limits) {
  const std::array own{
      gpu::Rule{"batch.state.slot", "a slot of 0 or more"},
      gpu::Rule{"batch.state.num_drafts", fmt::format("0 to {} drafts, and no more than tokens", spec.num_drafts)},
      gpu::Rule{"batch.state.accepted_drafts", fmt::format("0 to {} accepted drafts, none where nothing has gone by", spec.num_drafts)},
      gpu::Rule{"batch.state.shared", "a slot of its own for each request"},
      gpu::Rule{"batch.state.slot", "a slot of the state that run() was given"}};
  static_assert(gpu::kNumLengthRules + std::tuple_size_v<decltype(own)> == kNumStateRules);
  return gpu::rules_of_lengths(limits, own);
}

class ShortConvCudaPlan final : public ShortConvPlan {
 public:
  ShortConvCudaPlan(const ShortConvSpec& spec, const DeviceInfo& device, const PlanOptions& options)
      : spec_(spec), device_(device), options_(options), arch_(arch_of(device)), context_(Context::of_device(device.device.index)) {
    check(!options.on_device || !options.balanced, "backend.on_device",
          "expected on_device or balanced, got both: shares of the load are computed on the host");
    const CurrentContext current(*context_);
    ArrayLayout layout;  // in this order, so that a step is one copy
    counts_ = layout.add<StateCounts>(1);
    requests_ = layout.add<StateRequest>(int64_t(options.limits.max_num_reqs) + 1);
    const auto open = std::make_shared<ContextDevice>(context_);
    memory_ = std::make_unique<PlanArrays>(open, layout);
    if (!options.load_on_demand) load();
    if (!options.on_device) return;
    plan_module_ = Module::load(context_, plan_state_batch_key(arch_));
    plan_kernel_ = plan_module_->kernel("plan_state_batch");
    broken_ = std::make_unique<gpu::BrokenRules>(open, rules_of(spec, options.limits));
  }

  void update(const Batch&, Stream) override;
  void update_on_device(const DeviceBatch&, Stream) override;
  std::vector<Reason> device_problems(Stream) override;
  void run(const ShortConvInputs&, const ShortConvOutputs&, Stream) const override;
  bool capturable() const override { return !options_.load_on_demand; }

  std::string str() const override {
    if (now_.on_device) return fmt::format("{} ({}): planned on the device, for at most {} tokens", kName, arch_, now_.step.num_tokens);
    return fmt::format("{} ({}): {} tokens of {} requests", kName, arch_, now_.step.num_tokens, now_.step.requests.size());
  }

 private:
  struct Entry {
    Kernel kernel;
    ShortConvGrid grid;
  };
  struct Step {
    StateStep step;
    bool on_device = false;  // the host knows no more than how many tokens there may be
  };

  // All of it or, where the driver fails in the middle, nothing.
  void load() const {
    const auto module = Module::load(context_, short_conv_key(arch_, spec_, short_conv_tuning(spec_)));
    std::vector<Entry> entries;
    for (const char* entry : {"short_conv_unaligned", "short_conv_aligned"}) {
      const Kernel kernel = module->kernel(entry);
      const int64_t each = std::max(kernel.blocks_per_multiprocessor(kShortConvThreads), 1);
      entries.push_back({kernel, ShortConvGrid(spec_, std::max(device_.num_workers, 1) * each)});
    }
    module_ = module, entries_ = std::move(entries);
  }
  void check_captured(const StateStep&) const;
  void put(const StateStep&);

  ShortConvSpec spec_;
  DeviceInfo device_;
  PlanOptions options_;
  std::string arch_;
  ContextPtr context_;
  ArrayOf<StateCounts> counts_;
  ArrayOf<StateRequest> requests_;
  std::unique_ptr<PlanArrays> memory_;
  std::shared_ptr<const Module> plan_module_;  // null: PlanOptions::on_device was not asked for
  Kernel plan_kernel_;
  std::unique_ptr<gpu::BrokenRules> broken_;  // null likewise
  Step now_, spare_;
  bool has_step_ = true;

  // Made by the first run(), if they are to be loaded on demand.
  mutable std::shared_ptr<const Module> module_;
  mutable std::vector<Entry> entries_;          // short_conv_unaligned, short_conv_aligned
  mutable int64_t captured_slots_ = INT64_MAX;  // of the smallest state that a captured graph was given
};

// Checks the slots of a step against the state of a captured graph, as run() does outside of graphs. The numbers of rows are not checked,
// since the graph may not be replayed for this step.
void ShortConvCudaPlan::check_captured(const StateStep& step) const {
  check(step.num_slots <= captured_slots_, "update.captured_cache", "a captured graph has a state of {} slots, the batch has slot {}",
        captured_slots_, step.num_slots - 1);
}

StateCounts counts_of(const StateStep& step) {
  return {.num_tokens = step.num_tokens, .num_reqs = int(step.requests.size()), .padding = {}};
}

// Into pinned memory, from where they are sent.
void ShortConvCudaPlan::put(const StateStep& step) {
  const size_t count = step.requests.size();
  memory_->begin();
  *memory_->put(counts_, 1) = counts_of(step);
  StateRequest* to = memory_->put(requests_, count + 1);
  for (const imbrex::StateRequest& r : step.requests)
    *to++ = {.begin = r.begin, .slot = r.slot, .first_row = r.fresh ? -1 : r.first_row, .drafts = r.drafts};
  *to = {.begin = step.num_tokens, .slot = -1, .first_row = -1, .drafts = 0};
}

void ShortConvCudaPlan::update(const Batch& batch, Stream stream) {
  read_batch(spec_.num_drafts, options_.limits, batch, options_.validate, spare_.step);
  spare_.on_device = false;
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  check(!is_captured(cu), "update.captured", "expected a stream that captures nothing: update() is not part of a graph");
  const size_t count = spare_.step.requests.size();
  check(count < requests_.capacity, "update.limits", "expected at most {} requests with tokens, got {}", requests_.capacity - 1, count);
  check(spare_.step.num_tokens <= options_.limits.max_num_tokens, "update.limits", "expected at most {} tokens, got {}",
        options_.limits.max_num_tokens, spare_.step.num_tokens);
  check_captured(spare_.step);
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

void ShortConvCudaPlan::update_on_device(const DeviceBatch& batch, Stream stream) {
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
  const PlanStateBatchParams params{.starts = batch.query_start_loc.as<const int>(),
                                    .lengths = batch.seq_lens.as<const int>(),
                                    .slots = list(batch.state_slots, "state_slots", false),
                                    .drafts = list(batch.num_drafts, "num_drafts", true),
                                    .accepted = list(batch.accepted_drafts, "accepted_drafts", true),
                                    .num_reqs = int(reqs),
                                    .max_tokens = max_tokens(batch, limits),
                                    .min_query_len = limits.min_query_len,
                                    .max_query_len = limits.max_query_len,
                                    .max_seq_len = limits.max_seq_len,
                                    .max_drafts = spec_.num_drafts,
                                    .requests = memory_->device(requests_),
                                    .counts = memory_->device(counts_),
                                    .broken = broken_->last_requests()};
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  plan_kernel_.launch({.threads = kPlanStateBatchThreads}, cu, params);
  memory_->made_on_device();
  now_.step.requests.clear();
  now_.step.num_tokens = params.max_tokens;
  now_.step.num_slots = 0;
  now_.on_device = true;
  has_step_ = true;
}

std::vector<Reason> ShortConvCudaPlan::device_problems(Stream stream) {
  return broken_ == nullptr ? std::vector<Reason>() : broken_->take(stream);
}

void ShortConvCudaPlan::run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream stream) const {
  check(has_step_, "plan.no_step", "expected a step to compute: the last update of {} failed, and the step before could not be kept",
        str());
  const StateStep& step = now_.step;
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  const bool captured = is_captured(cu);
  if (step.num_tokens == 0 && !captured) return;
  check_run(spec_, device_.device, in, out, step.num_tokens, step.num_slots);
  check(module_ != nullptr || !captured, "run.on_demand",
        "expected short_conv.cu to be loaded before a capture: by plan(), unless load_on_demand, or by an earlier run()");
  if (module_ == nullptr) load();
  const Entry& entry = entries_[are_aligned(spec_, in, out) ? 1 : 0];
  const ShortConvGrid& grid = entry.grid;
  ShortConvParams p = short_conv_params(spec_, in, out);
  p.requests = memory_->device(requests_);
  p.counts = memory_->device(counts_);
  p.broken = broken_ != nullptr ? broken_->last_requests() : nullptr;
  p.chunks_at_once = grid.chunks_at_once;
  p.most_chunks = grid.most_chunks;
  p.lists_are_there = plan_module_ == nullptr;  // copies end before a kernel behind them begins
  // Blocks take units in turn. A graph, and a step of which only the device knows how long it is, have no more of them than run at a time:
  // most steps have work for few.
  int64_t blocks = 0;
  if (captured || now_.on_device) {
    constexpr int64_t kWarps = kShortConvThreads / 32;
    blocks = std::clamp<int64_t>((int64_t(options_.limits.max_num_tokens) * grid.tiles + kWarps - 1) / kWarps, 1, grid.resident);
  } else {
    blocks = grid.blocks_for(counts_of(step));
  }
  entry.kernel.launch(
      {.grid_x = unsigned(std::min<int64_t>(blocks, INT32_MAX)), .threads = kShortConvThreads, .programmatic = device_.sm >= 90}, cu, p);
  if (!captured) return;
  captured_slots_ = std::min(captured_slots_, in.state.size(0));
}

class ShortConvCudaBackend final : public BackendOf<ShortConvFamily> {
 public:
  std::string_view name() const override { return kName; }
  std::string_view description() const override { return "16 bytes of a row a lane, on every NVIDIA GPU since Ampere"; }
  std::vector<Reason> unsupported(const ShortConvSpec&, const DeviceInfo& device) const override {
    if (device.device.type != DeviceType::cuda) return {{"device.type", "cuda", to_string(device.device.type)}};
    if (device.sm < kLeastSm) return {{"device.sm", fmt::format("{} or more", kLeastSm), fmt::format("{}", device.sm)}};
    return {};
  }
  std::unique_ptr<ShortConvPlan> plan(const ShortConvSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options);
    return std::make_unique<ShortConvCudaPlan>(spec, device, options);
  }
  std::vector<KernelChoice> kernel_choices(const ShortConvSpec& spec, const DeviceInfo& device) const override {
    check_request(*this, spec.str(), unsupported(spec, device), device, {});
    const ShortConvTuning tuning = short_conv_tuning(spec);
    const bool aligned = spec.dim * size_of(spec.dtype) % kShortConvLaneBytes == 0;
    return {{.requests = "all",
             .kernel = aligned ? "short_conv_aligned" : "short_conv_unaligned",
             .sizes = {{"tile_channels", 32 * kShortConvLaneBytes / size_of(spec.dtype)},
                       {"stages", tuning.stages},
                       {"threads", kShortConvThreads},
                       {"blocks", tuning.blocks}}}};
  }
};

}  // namespace
}  // namespace cuda

const BackendOf<ShortConvFamily>& cuda_sm80_short_conv() {
  static const cuda::ShortConvCudaBackend backend;
  return backend;
}

}  // namespace imbrex

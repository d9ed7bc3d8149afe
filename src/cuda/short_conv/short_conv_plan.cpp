// The backend of the short convolution for NVIDIA GPUs: its plan keeps the step's requests in device memory and launches one kernel a
// layer. Grids and addresses follow from the limits where a launch is captured, so that a graph replays any batch within them.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "cuda/driver/module.h"
#include "cuda/short_conv/short_conv.h"
#include "cuda/state/state_lists.h"
#include "family/begin_plan.h"
#include "short_conv/step.h"

namespace imbrex {
namespace cuda {
namespace {

constexpr const char* kName = "cuda_sm80";
constexpr int kLeastSm = 80;

class ShortConvCudaPlan final : public ShortConvPlan {
 public:
  ShortConvCudaPlan(const ShortConvSpec& spec, const DeviceInfo& device, const PlanOptions& options)
      : spec_(spec), device_(device), options_(options), arch_(arch_of(device)), context_(Context::of_device(device.device.index)) {
    const CurrentContext current(*context_);
    lists_ = std::make_unique<StateLists>(context_, device, options, arch_, StateDrafts(spec));
    if (!options.load_on_demand) load();
  }

  void update(const Batch& batch, Stream stream) override {
    const CurrentContext current(*context_);
    lists_->update(batch, stream);
  }
  void update_on_device(const DeviceBatch& batch, Stream stream) override {
    const CurrentContext current(*context_);
    lists_->update_on_device(batch, stream);
  }
  std::vector<Reason> device_problems(Stream stream) override { return lists_->device_problems(stream); }
  void run(const ShortConvInputs&, const ShortConvOutputs&, Stream) const override;
  bool capturable() const override { return !options_.load_on_demand; }
  std::string str() const override { return lists_->str(fmt::format("{} ({})", kName, arch_)); }

 private:
  struct Entry {
    Kernel kernel;
    ShortConvGrid grid;
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

  ShortConvSpec spec_;
  DeviceInfo device_;
  PlanOptions options_;
  std::string arch_;
  ContextPtr context_;
  std::unique_ptr<StateLists> lists_;

  // Made by the first run(), if they are to be loaded on demand.
  mutable std::shared_ptr<const Module> module_;
  mutable std::vector<Entry> entries_;  // short_conv_unaligned, short_conv_aligned
};

void ShortConvCudaPlan::run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream stream) const {
  lists_->check_has_step(str());
  const StateStep& step = lists_->step();
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
  p.requests = lists_->requests();
  p.counts = lists_->counts();
  p.parent_rows = lists_->parent_rows();
  p.broken = lists_->broken();
  p.chunks_at_once = grid.chunks_at_once;
  p.most_chunks = grid.most_chunks;
  p.lists_are_there = lists_->are_there();
  // Blocks take units in turn. A graph, and a step of which only the device knows how long it is, have no more of them than run at a time:
  // most steps have work for few.
  int64_t blocks = 0;
  if (captured || lists_->on_device()) {
    constexpr int64_t kWarps = kShortConvThreads / 32;
    blocks = std::clamp<int64_t>((int64_t(options_.limits.max_num_tokens) * grid.tiles + kWarps - 1) / kWarps, 1, grid.resident);
  } else {
    blocks = grid.blocks_for(StateLists::counts_of(step));
  }
  lists_->zero_padding(out.out, captured, cu);
  entry.kernel.launch(
      {.grid_x = unsigned(std::min<int64_t>(blocks, INT32_MAX)), .threads = kShortConvThreads, .programmatic = device_.sm >= 90}, cu, p);
  if (captured) lists_->captured(in.state.size(0));
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

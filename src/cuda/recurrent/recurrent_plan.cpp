// The backend of recurrent layers for NVIDIA GPUs: its plan keeps the step's requests in device memory and launches one kernel a layer.
// Grids and addresses follow from the limits where a launch is captured, so that a graph replays any batch within them.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "cuda/driver/module.h"
#include "cuda/recurrent/recurrent.h"
#include "cuda/state/state_lists.h"
#include "family/begin_plan.h"
#include "recurrent/step.h"

namespace imbrex {
namespace cuda {
namespace {

constexpr const char* kRecurrentBackend = "cuda_sm80";
constexpr int kRecurrentLeastSm = 80;

class RecurrentCudaPlan final : public RecurrentPlan {
 public:
  RecurrentCudaPlan(const RecurrentSpec& spec, const DeviceInfo& device, const PlanOptions& options)
      : spec_(spec),
        device_(device),
        options_(options),
        arch_(arch_of(device)),
        kernel_(recurrent_kernel(arch_, spec)),
        context_(Context::of_device(device.device.index)) {
    check(int64_t(options.limits.max_num_reqs) * kernel_.units <= INT32_MAX, "limits.max_num_reqs",
          "expected at most {} requests of {}, whose parts have numbers of 31 bits, got {}", INT32_MAX / kernel_.units, spec.str(),
          options.limits.max_num_reqs);
    const CurrentContext current(*context_);
    lists_ = std::make_unique<StateLists>(context_, device, options, arch_, spec.num_drafts);
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
  void run(const RecurrentInputs&, const RecurrentOutputs&, Stream) const override;
  bool capturable() const override { return !options_.load_on_demand; }
  std::string str() const override { return lists_->str(fmt::format("{} ({})", kRecurrentBackend, arch_)); }

 private:
  // All of it or, where the driver fails in the middle, nothing.
  void load() const {
    auto module = Module::load(context_, kernel_.key);
    std::array entries{module->kernel(kernel_.unaligned), module->kernel(kernel_.aligned)};
    module_ = std::move(module), entries_ = std::move(entries);  // a copy of a Kernel could fail
  }

  RecurrentSpec spec_;
  DeviceInfo device_;
  PlanOptions options_;
  std::string arch_;
  RecurrentKernel kernel_;
  ContextPtr context_;
  std::unique_ptr<StateLists> lists_;

  // Made by the first run(), if they are to be loaded on demand.
  mutable std::shared_ptr<const Module> module_;
  mutable std::array<Kernel, 2> entries_;  // for unaligned and for aligned tensors
};

void RecurrentCudaPlan::run(const RecurrentInputs& in, const RecurrentOutputs& out, Stream stream) const {
  lists_->check_has_step(str());
  const StateStep& step = lists_->step();
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  const bool captured = is_captured(cu);
  if (step.num_tokens == 0 && !captured) return;
  check_run(spec_, device_.device, in, out, step.num_tokens, step.num_slots);
  check(module_ != nullptr || !captured, "run.on_demand",
        "expected {} to be loaded before a capture: by plan(), unless load_on_demand, or by an earlier run()", kernel_.key.path);
  if (module_ == nullptr) load();
  RecurrentParams p = recurrent_params(spec_, in, out);
  p.requests = lists_->requests();
  p.counts = lists_->counts();
  p.broken = lists_->broken();
  p.lists_are_there = lists_->are_there();
  // Blocks take units in turn: where the host does not know how many requests there are, those of the limits would be too many.
  constexpr int64_t kMostBlocks = 1 << 15;
  const bool known = !captured && !lists_->on_device();
  const int64_t requests = known ? int64_t(step.requests.size()) : options_.limits.max_num_reqs;
  const int64_t blocks = std::clamp<int64_t>(requests * kernel_.units, 1, known ? INT32_MAX : kMostBlocks);
  entries_[are_aligned(spec_, in, out) ? 1 : 0].launch(
      {.grid_x = unsigned(blocks), .threads = unsigned(kernel_.threads), .programmatic = device_.sm >= 90}, cu, p);
  if (captured) lists_->captured(in.state.size(0));
}

class RecurrentCudaBackend final : public BackendOf<RecurrentFamily> {
 public:
  std::string_view name() const override { return kRecurrentBackend; }
  std::string_view description() const override { return "token by token, states in registers, on every NVIDIA GPU since Ampere"; }
  std::vector<Reason> unsupported(const RecurrentSpec&, const DeviceInfo& device) const override {
    if (device.device.type != DeviceType::cuda) return {{"device.type", "cuda", to_string(device.device.type)}};
    if (device.sm < kRecurrentLeastSm) return {{"device.sm", fmt::format("{} or more", kRecurrentLeastSm), fmt::format("{}", device.sm)}};
    return {};
  }
  std::unique_ptr<RecurrentPlan> plan(const RecurrentSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options);
    return std::make_unique<RecurrentCudaPlan>(spec, device, options);
  }
  std::vector<KernelChoice> kernel_choices(const RecurrentSpec& spec, const DeviceInfo& device) const override {
    check_request(*this, spec.str(), unsupported(spec, device), device, {});
    const RecurrentKernel kernel = recurrent_kernel(arch_of(device), spec);
    const bool narrow = kernel.key.path == "recurrent_narrow.cu";
    return {{.requests = "all",
             .kernel = kernel.aligned,
             .sizes = {{narrow ? "tile_heads" : "tile_values", kernel.tile}, {"threads", kernel.threads}}}};
  }
};

}  // namespace
}  // namespace cuda

const BackendOf<RecurrentFamily>& cuda_sm80_recurrent() {
  static const cuda::RecurrentCudaBackend backend;
  return backend;
}

}  // namespace imbrex

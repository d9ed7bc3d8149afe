// The backend of recurrent layers for NVIDIA GPUs: its plan keeps the step's requests in device memory. A layer is one launch, of a kernel
// that computes token by token, and where there are prompts two more in front of it for each round of their chunks. Grids and addresses
// follow from the limits where a launch is captured, so that a graph replays any batch within them.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/check.h"
#include "cuda/driver/module.h"
#include "cuda/driver/open_device.h"
#include "cuda/recurrent/recurrent.h"
#include "cuda/state/state_lists.h"
#include "family/begin_plan.h"
#include "gpu/device_workspace.h"
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
    lists_ = std::make_unique<StateLists>(context_, device, options, arch_, StateDrafts(spec));
    if (chunks_ = chunk_kernels(arch_, spec, device); chunks_ && may_have_chunks(options.limits)) {
      rounds_.emplace(*chunks_, options.limits);
      const auto workspace = gpu::workspace_for(std::make_shared<ContextDevice>(context_), context_->id(), options.workspace);
      workspace->reserve(rounds_->bytes);
      scratch_ = workspace->memory();
    }
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
  static bool may_have_chunks(const PlanLimits& limits) {
    return limits.max_num_tokens >= kLeastChunked && (limits.max_query_len == 0 || limits.max_query_len >= kLeastChunked);
  }
  void run(const RecurrentInputs&, const RecurrentOutputs&, Stream) const override;
  bool capturable() const override { return !options_.load_on_demand; }
  int step_tokens() const override { return rounds_ ? kRecurrentChunk : 1; }
  bool rounded_products() const override { return rounds_.has_value(); }
  std::string str() const override { return lists_->str(fmt::format("{} ({})", kRecurrentBackend, arch_)); }

 private:
  // All of it or, where the driver fails in the middle, nothing.
  void load() const {
    auto module = Module::load(context_, kernel_.key);
    std::array entries{module->kernel(kernel_.unaligned), module->kernel(kernel_.aligned)};
    if (rounds_) {
      std::array modules{Module::load(context_, chunks_->weights), Module::load(context_, chunks_->chunks)};
      std::array kernels{modules[0]->kernel(chunks_->weights_entry), modules[1]->kernel("recurrent_chunks")};
      chunk_modules_ = std::move(modules), chunk_entries_ = std::move(kernels);
    }
    module_ = std::move(module), entries_ = std::move(entries);  // a copy of a Kernel could fail
  }
  void launch_chunks(const RecurrentParams&, const ChunkMaps&, int64_t num_tokens, int64_t num_reqs, CUstream) const;

  RecurrentSpec spec_;
  DeviceInfo device_;
  PlanOptions options_;
  std::string arch_;
  RecurrentKernel kernel_;
  ContextPtr context_;
  std::unique_ptr<StateLists> lists_;
  std::optional<ChunkKernels> chunks_;
  std::optional<ChunkRounds> rounds_;  // none: no request within the limits has chunks
  std::shared_ptr<const gpu::ScratchMemory> scratch_;

  // Made by the first run(), if they are to be loaded on demand.
  mutable std::shared_ptr<const Module> module_;
  mutable std::array<Kernel, 2> entries_;  // for unaligned and for aligned tensors
  mutable std::array<std::shared_ptr<const Module>, 2> chunk_modules_;
  mutable std::array<Kernel, 2> chunk_entries_;  // recurrent_weights, recurrent_chunks
};

// For a step of at most so many tokens and requests.
void RecurrentCudaPlan::launch_chunks(const RecurrentParams& params, const ChunkMaps& maps, int64_t num_tokens, int64_t num_reqs,
                                      CUstream cu) const {
  const int64_t numbers = std::max<int64_t>(ChunkRounds::numbers(num_tokens, num_reqs), 1);
  const int64_t blocks = std::min<int64_t>(num_reqs * chunks_->units, int64_t(std::max(device_.num_workers, 1)) * chunks_->blocks_together);
  RecurrentParams p = params;
  p.weights = static_cast<char*>(scratch_->data.get());
  const auto carried = [&](int64_t round) {
    return reinterpret_cast<float*>(p.weights + rounds_->carried + round % 2 * chunks_->carried_bytes);
  };
  for (int64_t first = 0, round = 0; first < numbers; first += rounds_->each, ++round) {
    p.first_chunk = int(first), p.end_chunk = int(std::min(first + rounds_->each, numbers));
    p.carried_in = carried(round), p.carried_out = carried(round + 1);
    const int64_t weights_blocks = int64_t(p.end_chunk - p.first_chunk) * chunks_->weights_units;
    chunk_entries_[0].launch(
        {.grid_x = unsigned(weights_blocks), .threads = unsigned(chunks_->weights_threads), .programmatic = device_.sm >= 90}, cu, p);
    const LaunchShape shape{.grid_x = unsigned(blocks), .threads = unsigned(chunks_->threads), .programmatic = device_.sm >= 90};
    chunks_->maps ? chunk_entries_[1].launch(shape, cu, p, maps.q, maps.k, maps.v) : chunk_entries_[1].launch(shape, cu, p);
  }
}

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
  p.parent_rows = lists_->parent_rows();
  p.broken = lists_->broken();
  p.lists_are_there = lists_->are_there();
  const bool known = !captured && !lists_->on_device();
  const int64_t requests = known ? int64_t(step.requests.size()) : options_.limits.max_num_reqs;
  bool has_tokens = true;  // that do not come in chunks
  if (rounds_ && has_aligned_rows(in, out)) {
    p.least_chunked = kLeastChunked;
    const auto in_chunks = [&](const imbrex::StateRequest& r) { return chunked_tokens(p, r.end - r.begin, r.drafts); };
    const bool has_chunks = !known || std::ranges::any_of(step.requests, [&](const auto& r) { return in_chunks(r) > 0; });
    ChunkMaps maps;
    if (has_chunks && chunks_->maps && !encode_chunk_maps(maps, in)) {
      p.least_chunked = 0;
    } else if (has_chunks) {
      has_tokens = !known || std::ranges::any_of(step.requests, [&](const auto& r) { return in_chunks(r) < r.end - r.begin; });
      launch_chunks(p, maps, known ? step.num_tokens : options_.limits.max_num_tokens, requests, cu);
    }
  }
  if (has_tokens) {
    // Blocks take units in turn: where the host does not know how many requests there are, those of the limits would be too many.
    constexpr int64_t kMostBlocks = 1 << 15;
    const int64_t blocks = std::clamp<int64_t>(requests * kernel_.units, 1, known ? INT32_MAX : kMostBlocks);
    entries_[are_aligned(in, out) ? 1 : 0].launch(
        {.grid_x = unsigned(blocks), .threads = unsigned(kernel_.threads), .programmatic = device_.sm >= 90}, cu, p);
  }
  if (captured) lists_->captured(in.state.size(0));
}

class RecurrentCudaBackend final : public BackendOf<RecurrentFamily> {
 public:
  std::string_view name() const override { return kRecurrentBackend; }
  std::string_view description() const override {
    return "decode token by token, prompts in chunks of 64 tokens, on every NVIDIA GPU since Ampere";
  }
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
    std::vector<KernelChoice> choices;
    const auto chunks = chunk_kernels(arch_of(device), spec, device);
    if (chunks)
      choices.push_back({.requests = "prompts",
                         .kernel = "recurrent_chunks",
                         .sizes = {{"chunk", kRecurrentChunk}, {"tile_values", chunks->tile}, {"threads", chunks->threads}}});
    choices.push_back({.requests = chunks ? "others" : "all",
                       .kernel = kernel.aligned,
                       .sizes = {{narrow ? "tile_heads" : "tile_values", kernel.tile}, {"threads", kernel.threads}}});
    return choices;
  }
  int64_t workspace_bytes(const RecurrentSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    check_request(*this, spec.str(), unsupported(spec, device), device, options);
    const auto chunks = chunk_kernels(arch_of(device), spec, device);
    return chunks && RecurrentCudaPlan::may_have_chunks(options.limits) ? ChunkRounds(*chunks, options.limits).bytes : 0;
  }
};

}  // namespace
}  // namespace cuda

const BackendOf<RecurrentFamily>& cuda_sm80_recurrent() {
  static const cuda::RecurrentCudaBackend backend;
  return backend;
}

}  // namespace imbrex

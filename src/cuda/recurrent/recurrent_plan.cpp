// The backend of recurrent layers for NVIDIA GPUs: its plan keeps the step's requests in device memory. A layer is one launch, of a kernel
// that computes token by token, and where there are prompts two more in front of it for each round of their chunks; a gate and a norm of
// outputs are one more behind it, unless there is nothing but tokens that the first one finishes itself. Grids and addresses follow from
// the limits where a launch is captured, so that a graph replays any batch within them.
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
#include "recurrent/conv_plan.h"
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
        stream_kernel_(stream_kernel(arch_, spec, device)),
        prompt_kernel_(may_have_chunks(options.limits) ? narrow_prompt_kernel(arch_, spec) : std::nullopt),
        output_kernel_(output_kernel(arch_, spec)),
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
  int step_tokens() const override { return !rounds_ ? 1 : rounds_->most_segments > 1 ? 0 : kRecurrentChunk; }
  bool rounded_products() const override { return rounds_.has_value(); }
  std::string str() const override { return lists_->str(fmt::format("{} ({})", kRecurrentBackend, arch_)); }

 private:
  // All of it or, where the driver fails in the middle, nothing.
  void load() const {
    auto module = Module::load(context_, kernel_.key);
    std::array entries{module->kernel(kernel_.unaligned), module->kernel(kernel_.aligned)};
    if (rounds_) {
      std::vector<std::shared_ptr<const Module>> modules;
      std::vector<Kernel> kernels;
      const auto add = [&](const KernelKey& key, const char* entry) {
        modules.push_back(Module::load(context_, key));
        kernels.push_back(modules.back()->kernel(entry));
      };
      add(chunks_->weights, chunks_->weights_entry), add(chunks_->chunks, "recurrent_chunks");
      if (rounds_->most_segments > 1) add(chunks_->ends, "recurrent_chunks"), add(chunks_->segments, "recurrent_segments");
      chunk_modules_ = std::move(modules), chunk_entries_ = std::move(kernels);
    }
    std::shared_ptr<const Module> stream;
    Kernel stream_entry;
    if (may_stream()) stream = Module::load(context_, stream_kernel_->key), stream_entry = stream->kernel("recurrent_stream");
    if (output_kernel_) {
      auto outputs = Module::load(context_, output_kernel_->key);
      std::array kernels{outputs->kernel("recurrent_outputs_unaligned"), outputs->kernel("recurrent_outputs_aligned")};
      output_module_ = std::move(outputs), output_entries_ = std::move(kernels);
    }
    std::shared_ptr<const Module> prompts;
    Kernel prompt_entry;
    if (prompt_kernel_) prompts = Module::load(context_, prompt_kernel_->key), prompt_entry = prompts->kernel("recurrent_narrow_prompts");
    prompt_module_ = std::move(prompts), prompt_entry_ = std::move(prompt_entry);
    stream_module_ = std::move(stream), stream_entry_ = std::move(stream_entry);
    module_ = std::move(module), entries_ = std::move(entries);  // a copy of a Kernel could fail
  }
  // Blocks of the streaming kernel, which stay, and whether the limits allow of more units.
  int64_t stream_blocks() const {
    return std::min(int64_t(std::max(device_.num_workers, 1)) * stream_kernel_->blocks_together, most_stream_blocks);
  }
  bool may_stream() const { return stream_kernel_ && options_.limits.max_num_reqs * int64_t(kernel_.units) > stream_blocks(); }
  bool is_narrow() const { return kernel_.key.path == "recurrent_narrow.cu"; }
  int64_t narrow_blocks(int64_t num_reqs) const;
  void launch_prompts(const RecurrentParams&, int64_t num_reqs, CUstream) const;
  void launch_tokens(const RecurrentParams&, bool aligned, int64_t num_reqs, bool known, CUstream) const;
  int segments_of_step(const RecurrentParams&, bool known) const;
  void launch_outputs(const RecurrentOutputParams&, bool aligned, int64_t num_tokens, CUstream) const;
  void launch_chunks(const RecurrentParams&, const ChunkMaps&, int64_t num_tokens, int64_t num_reqs, int64_t in_chunks, CUstream) const;

  RecurrentSpec spec_;
  DeviceInfo device_;
  PlanOptions options_;
  std::string arch_;
  RecurrentKernel kernel_;
  std::optional<StreamKernel> stream_kernel_;
  std::optional<NarrowPromptKernel> prompt_kernel_;  // none where no request within the limits is one
  std::optional<OutputKernel> output_kernel_;
  ContextPtr context_;
  std::unique_ptr<StateLists> lists_;
  std::optional<ChunkKernels> chunks_;
  std::optional<ChunkRounds> rounds_;  // none: no request within the limits has chunks
  std::shared_ptr<const gpu::ScratchMemory> scratch_;

  // Made by the first run(), if they are to be loaded on demand.
  mutable std::shared_ptr<const Module> module_;
  mutable std::array<Kernel, 2> entries_;  // for unaligned and for aligned tensors
  mutable std::shared_ptr<const Module> stream_module_;
  mutable Kernel stream_entry_;
  mutable std::shared_ptr<const Module> prompt_module_;
  mutable Kernel prompt_entry_;
  mutable std::vector<std::shared_ptr<const Module>> chunk_modules_;
  mutable std::vector<Kernel> chunk_entries_;  // of ChunkKernels: weights, chunks, ends, segments
  mutable std::shared_ptr<const Module> output_module_;
  mutable std::array<Kernel, 2> output_entries_;  // for unaligned and for aligned tensors
};

// How many segments a request may have: fewer than the plan allows where a balanced step has other requests for the multiprocessors, and
// none where the host knows that no request is long.
int RecurrentCudaPlan::segments_of_step(const RecurrentParams& p, bool known) const {
  if (rounds_->most_segments == 1 || !known) return rounds_->most_segments;
  RecurrentParams of_plan = p;
  of_plan.most_segments = rounds_->most_segments, of_plan.least_segment = chunks_->least_segment;
  int64_t in_chunks = 0;
  bool is_long = false;
  for (const imbrex::StateRequest& r : lists_->step().requests) {
    const int tokens = chunked_tokens(p.least_chunked, r.end - r.begin, r.drafts),
              chunks = (tokens + kRecurrentChunk - 1) / kRecurrentChunk;
    in_chunks += tokens > 0, is_long = is_long || segment_chunks(of_plan, chunks) < chunks;
  }
  if (!is_long) return 1;
  if (!options_.balanced) return rounds_->most_segments;
  const int64_t most = std::max(device_.num_workers, 1) / (in_chunks * chunks_->units);
  return most < kLeastSegments ? 1 : int(std::min<int64_t>(most, rounds_->most_segments));
}

// For a step of at most so many tokens.
void RecurrentCudaPlan::launch_outputs(const RecurrentOutputParams& p, bool aligned, int64_t num_tokens, CUstream cu) const {
  constexpr int kBlocksTogether = 8;  // of a multiprocessor, which take groups in turn
  const int64_t each = output_kernel_->groups_together, blocks = (num_tokens * output_kernel_->groups + each - 1) / each;
  const int64_t grid = std::clamp<int64_t>(blocks, 1, int64_t(std::max(device_.num_workers, 1)) * kBlocksTogether);
  output_entries_[aligned ? 1 : 0].launch(
      {.grid_x = unsigned(grid), .threads = unsigned(kRecurrentOutputThreads), .programmatic = device_.sm >= 90}, cu, p);
}

// Blocks of recurrent_narrow.cu: as many for each of the parts of a request, which take its requests in turn.
int64_t RecurrentCudaPlan::narrow_blocks(int64_t num_reqs) const {
  const int64_t together = int64_t(std::max(device_.num_workers, 1)) * recurrent_narrow_blocks(spec_.head_dim_k);
  const int64_t each = std::min(together, most_stream_blocks) / kernel_.units;
  return kernel_.units * std::clamp<int64_t>(each, 1, std::max<int64_t>(num_reqs, 1));
}

// For a step of at most so many requests.
void RecurrentCudaPlan::launch_prompts(const RecurrentParams& p, int64_t num_reqs, CUstream cu) const {
  const int64_t most = int64_t(std::max(device_.num_workers, 1)) * kRecurrentNarrowPromptBlocks;
  const int64_t blocks = std::clamp<int64_t>(num_reqs * prompt_kernel_->units, 1, most);
  prompt_entry_.launch({.grid_x = unsigned(blocks), .threads = unsigned(kRecurrentNarrowPromptThreads), .programmatic = device_.sm >= 90},
                       cu, p);
}

// For a step of at most so many requests. Where blocks take units in turn and the host does not know how many requests there are, those of
// the limits would be too many.
void RecurrentCudaPlan::launch_tokens(const RecurrentParams& p, bool aligned, int64_t num_reqs, bool known, CUstream cu) const {
  constexpr int64_t kMostBlocks = 1 << 15;
  const int64_t units = std::max<int64_t>(num_reqs * kernel_.units, 1);
  const bool streams = aligned && stream_module_ != nullptr && units > stream_blocks();
  const Kernel& kernel = streams ? stream_entry_ : entries_[aligned ? 1 : 0];
  const int64_t blocks = is_narrow() ? narrow_blocks(num_reqs) : streams ? stream_blocks() : known ? units : std::min(units, kMostBlocks);
  kernel.launch({.grid_x = unsigned(blocks), .threads = unsigned(kernel_.threads), .programmatic = device_.sm >= 90}, cu, p);
}

// For a step of at most so many tokens and requests, of which all that come in chunks are `in_chunks` neighbours.
void RecurrentCudaPlan::launch_chunks(const RecurrentParams& params, const ChunkMaps& maps, int64_t num_tokens, int64_t num_reqs,
                                      int64_t in_chunks, CUstream cu) const {
  const int64_t numbers = std::max<int64_t>(ChunkRounds::numbers(num_tokens, num_reqs), 1);
  const int64_t workers = std::max(device_.num_workers, 1);
  // On Hopper blocks have more chunks in shared memory where there is a multiprocessor for each that has something to do. `units`: of a
  // segment.
  const auto blocks_together = [&](int64_t units, int stage_bytes) {
    return stage_bytes > 0 && in_chunks * units * params.most_segments <= workers ? 1 : chunks_->blocks_together;
  };
  const auto launch = [&](const Kernel& kernel, int64_t units, unsigned cluster, int stage_bytes, RecurrentParams p) {
    const int together = blocks_together(units, stage_bytes);
    units *= p.most_segments;
    const int64_t blocks = std::max<int64_t>(std::min(num_reqs * units, workers * together) / cluster, 1) * cluster;
    LaunchShape shape{
        .grid_x = unsigned(blocks), .threads = unsigned(chunks_->threads), .cluster = cluster, .programmatic = device_.sm >= 90};
    if (stage_bytes > 0) {
      p.chunk_stages = recurrent_chunk_sm90_stages(stage_bytes, together);
      shape.smem_bytes = unsigned(p.chunk_stages * stage_bytes);
    }
    chunks_->maps ? kernel.launch(shape, cu, p, maps.q, maps.k, maps.v, maps.out) : kernel.launch(shape, cu, p);
  };
  RecurrentParams p = params;
  p.weights = static_cast<char*>(scratch_->data.get());
  p.lone_chunks = blocks_together(chunks_->units, chunks_->stage_bytes) == 1;
  const auto carried = [&](int64_t round) {
    return reinterpret_cast<float*>(p.weights + rounds_->carried + round % 2 * chunks_->carried_bytes);
  };
  const int64_t each = rounds_->each_of(numbers);
  for (int64_t first = 0, round = 0; first < numbers; first += each, ++round) {
    p.first_chunk = int(first), p.end_chunk = int(std::min(first + each, numbers));
    p.carried_in = carried(round), p.carried_out = carried(round + 1);
    const int64_t weights_blocks = int64_t(p.end_chunk - p.first_chunk) * chunks_->weights_units;
    chunk_entries_[0].launch(
        {.grid_x = unsigned(weights_blocks), .threads = unsigned(chunks_->weights_threads), .programmatic = device_.sm >= 90}, cu, p);
    if (p.most_segments > 1) {
      p.segments = carried(0);
      launch(chunk_entries_[2], chunks_->ends_units, 1, chunks_->ends_stage_bytes, p);
      chunk_entries_[3].launch({.grid_x = unsigned(std::min(num_reqs * chunks_->segments_units, workers * chunks_->blocks_together)),
                                .threads = unsigned(kRecurrentJoinThreads),
                                .programmatic = device_.sm >= 90},
                               cu, p);
    }
    launch(chunk_entries_[1], chunks_->units, chunks_->cluster, chunks_->stage_bytes, p);
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
  p.most_requests = options_.limits.max_num_reqs;
  p.counts = lists_->counts();
  p.taken = lists_->taken();
  p.parent_rows = lists_->parent_rows();
  p.broken = lists_->broken();
  p.lists_are_there = lists_->are_there();
  const bool known = !captured && !lists_->on_device();
  const int64_t requests = known ? lists_->num_requests() : options_.limits.max_num_reqs;
  lists_->zero_padding(out.out, captured, cu);  // in front of what changes states, so that a run() may be made again if this fails
  bool has_tokens = true, has_chunks = false;   // tokens that do not come in chunks, and those that do
  if (rounds_ && has_aligned_rows(in, out)) {
    p.least_chunked = kLeastChunked;
    const auto in_chunks = [&](const imbrex::StateRequest& r) { return chunked_tokens(p.least_chunked, r.end - r.begin, r.drafts); };
    const auto has_any = [&](const imbrex::StateRequest& r) { return in_chunks(r) > 0; };
    const auto first = std::ranges::find_if(step.requests, has_any);
    has_chunks = !known || first != step.requests.end();
    // From the first of these requests to the last one.
    int64_t range = requests;
    if (known && has_chunks && step.padding.empty())
      range = std::find_if(step.requests.rbegin(), step.requests.rend(), has_any).base() - first;
    ChunkMaps maps;
    if (has_chunks && chunks_->maps && !encode_chunk_maps(maps, in, out)) {
      p.least_chunked = 0, has_chunks = false;
    } else if (has_chunks) {
      has_tokens = !known || std::ranges::any_of(step.requests, [&](const auto& r) { return in_chunks(r) < r.end - r.begin; });
      p.most_segments = segments_of_step(p, known), p.least_segment = chunks_->least_segment;
      launch_chunks(p, maps, known ? step.num_tokens : options_.limits.max_num_tokens, requests, range, cu);
    }
  }
  const bool aligned_outputs = have_aligned_outputs(spec_, in, out);
  const bool aligned = is_narrow() ? has_aligned_quads(spec_, in, out) : are_aligned(in, out) && (aligned_outputs || !kernel_.finishes);
  const bool finishes = aligned && kernel_.finishes;
  if (prompt_kernel_ && aligned) {
    p.least_chunked = kLeastNarrowPrompt;
    const auto is_prompt = [&](const imbrex::StateRequest& r) { return is_narrow_prompt(p, r.end - r.begin, r.drafts); };
    if (!known || std::ranges::any_of(step.requests, is_prompt)) launch_prompts(p, requests, cu);
    has_tokens = !known || !std::ranges::all_of(step.requests, is_prompt);
  }
  if (has_tokens) launch_tokens(p, aligned, requests, known, cu);
  if (output_kernel_ && (has_chunks || !finishes)) {
    RecurrentOutputParams of_outputs = output_params(spec_, *output_kernel_, in, out, p);
    of_outputs.least_chunked = finishes ? p.least_chunked : 0;
    launch_outputs(of_outputs, aligned_outputs, known ? step.num_tokens : options_.limits.max_num_tokens, cu);
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
    if (spec.conv != RecurrentConv::none) {
      // The recurrence's scratch is in front of what is convolved, in one workspace.
      const ContextPtr context = Context::of_device(device.device.index);
      const CurrentContext current(*context);
      PlanOptions parts = options;
      const auto workspace = gpu::workspace_for(std::make_shared<ContextDevice>(context), context->id(), options.workspace);
      workspace->reserve(workspace_bytes(spec, device, options));
      parts.workspace = workspace;
      const std::shared_ptr<const gpu::ScratchMemory> memory = workspace->memory();
      char* const rows = static_cast<char*>(memory->data.get()) + bytes_in_front(spec, device, options);
      return make_conv_plan(*this, spec, device, parts, std::shared_ptr<void>(memory, rows));
    }
    return std::make_unique<RecurrentCudaPlan>(spec, device, options);
  }
  std::vector<KernelChoice> kernel_choices(const RecurrentSpec& spec, const DeviceInfo& device) const override {
    check_request(*this, spec.str(), unsupported(spec, device), device, {});
    const RecurrentKernel kernel = recurrent_kernel(arch_of(device), spec);
    const bool narrow = kernel.key.path == "recurrent_narrow.cu";
    const auto prompts = narrow_prompt_kernel(arch_of(device), spec);
    std::vector<KernelChoice> choices;
    const auto chunks = chunk_kernels(arch_of(device), spec, device);
    if (chunks)
      choices.push_back({.requests = "prompts",
                         .kernel = "recurrent_chunks",
                         .sizes = {{"chunk", kRecurrentChunk}, {"tile_values", chunks->tile}, {"threads", chunks->threads}}});
    if (prompts)
      choices.push_back({.requests = "prompts",
                         .kernel = "recurrent_narrow_prompts",
                         .sizes = {{"tile_heads", prompts->tile}, {"threads", kRecurrentNarrowPromptThreads}}});
    choices.push_back({.requests = chunks || prompts ? "others" : "all",
                       .kernel = kernel.aligned,
                       .sizes = {{narrow ? "tile_heads" : "tile_values", kernel.tile}, {"threads", kernel.threads}}});
    if (const auto stream = stream_kernel(arch_of(device), spec, device))
      choices.push_back({.requests = "many others",
                         .kernel = "recurrent_stream",
                         .sizes = {{"tile_values", kernel.tile}, {"threads", kernel.threads}, {"blocks", stream->blocks_together}}});
    if (const auto outputs = output_kernel(arch_of(device), spec))
      choices.push_back({.requests = "outputs",
                         .kernel = "recurrent_outputs_aligned",
                         .sizes = {{"tile_values", outputs->group_numbers}, {"threads", kRecurrentOutputThreads}}});
    add_conv_choices(name(), spec, device, choices);
    return choices;
  }
  int64_t workspace_bytes(const RecurrentSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    check_request(*this, spec.str(), unsupported(spec, device), device, options);
    if (spec.conv != RecurrentConv::none) return bytes_in_front(spec, device, options) + conv_row_bytes(spec, options.limits);
    const auto chunks = chunk_kernels(arch_of(device), spec, device);
    return chunks && RecurrentCudaPlan::may_have_chunks(options.limits) ? ChunkRounds(*chunks, options.limits).bytes : 0;
  }

 private:
  int64_t bytes_in_front(const RecurrentSpec& spec, const DeviceInfo& device, const PlanOptions& options) const {
    constexpr int64_t kAlignment = 256;
    return (workspace_bytes(without_conv(spec), device, options) + kAlignment - 1) / kAlignment * kAlignment;
  }
};

}  // namespace
}  // namespace cuda

const BackendOf<RecurrentFamily>& cuda_sm80_recurrent() {
  static const cuda::RecurrentCudaBackend backend;
  return backend;
}

}  // namespace imbrex

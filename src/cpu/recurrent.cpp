// Recurrent layers on CPUs: one plan, and a table of kernels for each instruction set.
#include "imbrex/recurrent.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/cpu_features.h"
#include "core/run_parallel.h"
#include "core/scratch_of_plans.h"
#include "core/tensor_layout.h"
#include "cpu/recurrent_params.h"
#include "family/begin_plan.h"
#include "recurrent/conv_plan.h"
#include "recurrent/step.h"

namespace imbrex {
namespace cpu {

extern const RecurrentKernels recurrent_generic, recurrent_avx2, recurrent_avx512, recurrent_avx512_bf16, recurrent_amx_emulated,
    recurrent_amx;

namespace {

RecurrentParams params_of(const RecurrentSpec& spec, const RecurrentInputs& in, const RecurrentOutputs& out) {
  const auto inner = [](const TensorView& t, int dim) { return t.rank > dim ? byte_stride(t, dim) : 0; };
  const float no_limit = std::numeric_limits<float>::infinity();
  return {.q = in.q.as<const char>(),
          .k = in.k.as<const char>(),
          .v = in.v.as<const char>(),
          .gate = in.gate.as<const char>(),
          .beta = in.beta.as<const char>(),
          .rates = in.rates.as<const float>(),
          .gate_bias = in.gate_bias.as<const float>(),
          .skip = in.skip.as<const float>(),
          .state = in.state.as<char>(),
          .out = out.out.as<char>(),
          .q_token_stride = byte_stride(in.q, 0),
          .q_head_stride = byte_stride(in.q, 1),
          .k_token_stride = byte_stride(in.k, 0),
          .k_head_stride = byte_stride(in.k, 1),
          .v_token_stride = byte_stride(in.v, 0),
          .v_head_stride = byte_stride(in.v, 1),
          .out_token_stride = byte_stride(out.out, 0),
          .out_head_stride = byte_stride(out.out, 1),
          .gate_token_stride = inner(in.gate, 0),
          .gate_head_stride = inner(in.gate, 1),
          .beta_token_stride = inner(in.beta, 0),
          .rates_stride = in.rates.rank > 0 ? in.rates.stride(0) : 0,
          .bias_stride = in.gate_bias.rank > 0 ? in.gate_bias.stride(0) : 0,
          .state_slot_stride = byte_stride(in.state, 0),
          .state_row_stride = byte_stride(in.state, 1),
          .state_head_stride = byte_stride(in.state, 2),
          .type = int(spec.dtype),
          .gate_type = int(in.gate.empty() ? DType::f32 : in.gate.dtype),
          .beta_type = int(in.beta.empty() ? DType::f32 : in.beta.dtype),
          .state_type = int(spec.state_dtype),
          .dim_k = spec.head_dim_k,
          .dim_v = spec.head_dim_v,
          .group = spec.num_v_heads / spec.num_k_heads,
          .gate_kind = int(spec.gate),
          .gate_min = spec.gate_min,
          .gate_max = spec.gate == RecurrentGate::softplus && spec.gate_max == 0 ? no_limit : spec.gate_max,
          .scale = spec.query_scale(),
          .beta_scale = spec.beta_scale,
          .channel_gate = spec.channel_gate,
          .channel_rates = spec.channel_rates,
          .k_first = spec.layout == StateLayout::k_first,
          .delta = spec.delta,
          .sigmoid_beta = spec.sigmoid_beta,
          .scaled_values = spec.scaled_values,
          .qk_norm = spec.qk_norm,
          .z = in.z.as<const char>(),
          .norm_weight = in.norm_weight.as<const char>(),
          .z_token_stride = inner(in.z, 0),
          .z_head_stride = inner(in.z, 1),
          .weight_stride = in.norm_weight.rank > 1 ? byte_stride(in.norm_weight, 0) : 0,
          .weight_type = int(in.norm_weight.empty() ? DType::f32 : in.norm_weight.dtype),
          .out_gate = int(spec.out_gate),
          .out_norm = int(spec.out_norm),
          .norm_heads = spec.norm_heads(),
          .norm_eps = spec.norm_eps};
}

// Heads with values of one dimension, whose states are too small to be tasks of their own (Mamba1).
bool is_narrow(const RecurrentSpec& spec) { return spec.head_dim_v == 1 && !spec.delta && !spec.channel_gate; }

// What a task of narrow heads has: heads, and requests one after another.
struct NarrowTask {
  int heads, items;
  static constexpr int kMostItems = 16;
  int64_t parts(const RecurrentSpec& spec) const { return (spec.num_v_heads + heads - 1) / heads; }

  // Fewer heads where threads would not have four tasks each; several requests where each has few tokens.
  static NarrowTask of(const RecurrentSpec& spec, const StateStep& step, int workers) {
    constexpr int kLeastHeads = 32, kFewTokens = 4, kTasks = 8;
    const auto requests = int64_t(step.requests.size());
    NarrowTask task{narrow_heads(spec.head_dim_k), 1};
    while (task.heads > kLeastHeads && requests * task.parts(spec) < kTasks / 2 * int64_t(workers)) task.heads /= 2;
    const auto is_short = [](const StateRequest& r) { return r.end - r.begin <= kFewTokens; };
    if (std::ranges::all_of(step.requests, is_short))
      task.items = int(std::clamp<int64_t>(requests * task.parts(spec) / (kTasks * int64_t(workers)), 1, kMostItems));
    return task;
  }
};

// Prompts come in chunks where these are products of matrices that are not small.
bool has_chunks(const RecurrentSpec& spec) {
  constexpr int kLeastDim = 16;
  return spec.head_dim_k >= kLeastDim && spec.head_dim_v >= kLeastDim;
}
bool has_channel_decays(const RecurrentSpec& spec) { return spec.channel_gate || spec.channel_rates; }
bool may_have_chunks(const PlanLimits& limits) {
  return limits.max_num_tokens >= kLeastChunked && (limits.max_query_len == 0 || limits.max_query_len >= kLeastChunked);
}

// What a task of chunks has: value heads of a key head, for which products of keys are made once, and of their values.
struct ChunkTask {
  int heads, values;
  static ChunkTask largest(const RecurrentSpec& spec) {
    constexpr int kMostHeads = 4;  // whose states stay in the second-level cache
    return {has_channel_decays(spec) ? 1 : std::min(spec.num_v_heads / spec.num_k_heads, kMostHeads), spec.head_dim_v};
  }
  int64_t shares(const RecurrentSpec& spec) const { return (spec.num_v_heads / spec.num_k_heads + heads - 1) / heads; }
  int64_t tiles(const RecurrentSpec& spec) const { return (spec.head_dim_v + values - 1) / values; }
  int64_t tasks(const RecurrentSpec& spec) const { return spec.num_k_heads * shares(spec) * tiles(spec); }

  // Smaller ones where all threads would not have two.
  static ChunkTask of(const RecurrentSpec& spec, int64_t requests, int workers) {
    ChunkTask task = largest(spec);
    const auto are_few = [&] { return requests * task.tasks(spec) < 2 * int64_t(workers); };
    while (task.heads > 1 && are_few()) task.heads = (task.heads + 1) / 2;
    while (task.values > kRecurrentValues && are_few())
      task.values = std::max(kRecurrentValues, task.values / 2 / kRecurrentValues * kRecurrentValues);
    return task;
  }
};

RecurrentItem item_of(const RecurrentSpec& spec, const StateStep& step, const StateRequest& r) {
  return {r.begin,
          r.end,
          r.slot,
          r.source,
          r.first_row,
          r.drafts,
          r.fresh,
          spec.tree_drafts,
          step.parent_rows.empty() ? nullptr : step.parent_rows.data()};
}

class RecurrentCpuPlan final : public RecurrentPlan {
 public:
  RecurrentCpuPlan(std::string_view backend, const RecurrentKernels& kernels, const RecurrentSpec& spec, const PlanOptions& options)
      : backend_(backend), kernels_(kernels), spec_(spec), options_(options) {
    if (!has_chunks(spec) || !may_have_chunks(options.limits)) return;
    const ChunkTask task = ChunkTask::largest(spec);
    scratch_bytes_ = (kernels.scratch_bytes(spec.head_dim_k, task.values, task.heads) + kLine - 1) / kLine * kLine;
    scratch_ = std::dynamic_pointer_cast<SharedScratch>(options.workspace);
    if (scratch_ == nullptr) scratch_ = std::make_shared<SharedScratch>();
    scratch_->reserve(scratch_bytes_ * std::max(options.threads.num_workers, 1) + kLine);
  }

  void update(const Batch& batch, Stream) override {
    read_batch(StateDrafts(spec_), options_.limits, batch, options_.validate, spare_);
    // Chunks first, and the longest requests first, so that threads end at about the same time.
    std::ranges::stable_sort(spare_.requests, std::greater(),
                             [&](const StateRequest& r) { return std::pair(is_in_chunks(r), r.end - r.begin); });
    std::swap(now_, spare_);
    in_chunks_ = std::ranges::count_if(now_.requests, [&](const StateRequest& r) { return is_in_chunks(r); });
    in_place_ = std::ranges::all_of(now_.requests, [&](const StateRequest& r) {
      return is_in_place(spec_.layout == StateLayout::k_first, int(spec_.state_dtype), spec_.head_dim_k, item_of(spec_, now_, r));
    });
  }

  void run(const RecurrentInputs& in, const RecurrentOutputs& out, Stream) const override {
    if (now_.requests.empty() && now_.padding.empty()) return;
    check_run(spec_, {}, in, out, now_.num_tokens, now_.num_slots);
    zero_padding(now_, out.out);
    if (now_.requests.empty()) return;
    RecurrentParams params = params_of(spec_, in, out);
    const bool narrow = is_narrow(spec_);
    // Of states that are computed where they lie nothing has to stay in a cache: then gates are computed once for a head.
    const int most = in_place_ ? spec_.head_dim_v : kRecurrentValues;
    const int64_t tiles = (spec_.head_dim_v + most - 1) / most, each = tiles * spec_.num_v_heads;
    const NarrowTask narrow_task = NarrowTask::of(spec_, now_, std::max(options_.threads.num_workers, 1));
    const ChunkTask chunks = ChunkTask::of(spec_, in_chunks_, options_.threads.num_workers);
    // Tasks finish the outputs of their heads, unless the heads are parts of a group of the norm, or a task has a part of a head.
    params.finish = spec_.has_output_stage() && (spec_.out_norm == OutputNorm::none || (spec_.norm_heads() == 1 && !narrow)) &&
                    (in_chunks_ == 0 || chunks.values == spec_.head_dim_v) &&
                    (in_chunks_ == int64_t(now_.requests.size()) || narrow || most >= spec_.head_dim_v);
    const int64_t each_in_chunks = chunks.tasks(spec_), first = in_chunks_ * each_in_chunks,
                  others = int64_t(now_.requests.size()) - in_chunks_,
                  tasks = narrow ? (others + narrow_task.items - 1) / narrow_task.items * narrow_task.parts(spec_) : first + others * each;
    const auto run_task = [&](int64_t task, int worker) {
      if (task < first) {
        run_chunks(params, item_of(spec_, now_, now_.requests[size_t(task / each_in_chunks)]), chunks, task % each_in_chunks, worker);
        return;
      }
      if (narrow) {
        run_narrow(params, narrow_task, task);
        return;
      }
      task -= first;
      const RecurrentItem item = item_of(spec_, now_, now_.requests[size_t(in_chunks_ + task / each)]);
      const int part = int(task % each);
      const int v = int(part % tiles) * most;
      kernels_.run(params, item, int(part / tiles), v, std::min(v + most, spec_.head_dim_v));
    };
    // States that only pass through are taken many at a time: a thread's next ones are fetched ahead, which slows down a neighbour that has
    // them.
    const int64_t together = in_place_ ? std::max<int64_t>(tasks / (kShares * std::max(options_.threads.num_workers, 1)), 1) : 1;
    std::atomic<int64_t> next{0};
    const auto work = [&](int worker) {
      for (int64_t task; (task = next.fetch_add(together, std::memory_order_relaxed)) < tasks;)
        for (const int64_t end = std::min(task + together, tasks); task < end; ++task) run_task(task, worker);
    };
    run_parallel(tasks > 1 ? options_.threads : ParallelFor{}, work);
    if (spec_.has_output_stage() && !params.finish) finish_outputs(params);
  }

  int step_tokens() const override { return scratch_ ? kRecurrentChunk : 1; }
  bool rounded_products() const override { return scratch_ && kernels_.rounded; }
  std::string str() const override { return fmt::format("{} ({}): {} requests", backend_, kernels_.isa, now_.requests.size()); }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int kShares = 8;  // of a worker, where tasks are taken together

  // The gate and the norm of all outputs of the step, some tokens of a request at a time.
  void finish_outputs(const RecurrentParams& params) const {
    constexpr int kTokens = 16;
    const auto blocks = [](const StateRequest& r) { return (r.end - r.begin + kTokens - 1) / kTokens; };
    int64_t tasks = 0;
    for (const StateRequest& r : now_.requests) tasks += blocks(r);
    std::atomic<int64_t> next{0};
    const auto work = [&](int) {
      auto request = now_.requests.begin();
      int64_t first = 0;  // task of the request; tasks that a worker takes only grow
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        while (task >= first + blocks(*request)) first += blocks(*request++);
        const int begin = request->begin + int(task - first) * kTokens;
        kernels_.finish(params, begin, std::min(begin + kTokens, request->end), 0, spec_.num_v_heads);
      }
    };
    run_parallel(tasks > 1 ? options_.threads : ParallelFor{}, work);
  }

  void run_narrow(const RecurrentParams& params, const NarrowTask& task, int64_t number) const {
    const int64_t parts = task.parts(spec_), first = number / parts * task.items;
    const int head = int(number % parts) * task.heads;
    RecurrentItem items[NarrowTask::kMostItems];
    const int count = int(std::min<int64_t>(task.items, int64_t(now_.requests.size()) - first));
    for (int i = 0; i < count; ++i) items[i] = item_of(spec_, now_, now_.requests[size_t(first + i)]);
    kernels_.run_narrow(params, items, count, head, std::min(head + task.heads, spec_.num_v_heads));
  }
  bool is_in_chunks(const StateRequest& r) const { return scratch_ && chunked_tokens(int(spec_.state_dtype), item_of(spec_, now_, r)) > 0; }
  void run_chunks(const RecurrentParams& params, const RecurrentItem& item, const ChunkTask& task, int64_t number, int worker) const {
    const int64_t tiles = task.tiles(spec_), shares = task.shares(spec_);
    const int group = spec_.num_v_heads / spec_.num_k_heads, v = int(number % tiles) * task.values, key_head = int(number / tiles / shares),
              head = key_head * group + int(number / tiles % shares) * task.heads;
    char* const memory = scratch_->data();
    char* const aligned = memory + (kLine - int64_t(reinterpret_cast<uintptr_t>(memory) % kLine)) % kLine;
    kernels_.run_chunks(params, item, head, std::min(head + task.heads, (key_head + 1) * group), v,
                        std::min(v + task.values, spec_.head_dim_v), aligned + worker * scratch_bytes_);
  }

  std::string_view backend_;
  const RecurrentKernels& kernels_;
  RecurrentSpec spec_;
  PlanOptions options_;
  StateStep now_, spare_;
  bool in_place_ = false;                   // all states of the step
  int64_t in_chunks_ = 0;                   // requests that have chunks
  int64_t scratch_bytes_ = 0;               // of a worker
  std::shared_ptr<SharedScratch> scratch_;  // null: no request within the limits has chunks
};

class RecurrentCpuBackend final : public BackendOf<RecurrentFamily> {
 public:
  RecurrentCpuBackend(std::string_view name, std::string_view description, CpuIsa needs)
      : name_(name), description_(description), needs_(needs) {}
  std::string_view name() const override { return name_; }
  std::string_view description() const override { return description_; }
  std::vector<Reason> unsupported(const RecurrentSpec&, const DeviceInfo& device) const override {
    if (device.device.type != DeviceType::cpu) return {{"device.type", "cpu", to_string(device.device.type)}};
    if (device.isa < needs_) return {{"device.isa", to_string(needs_), to_string(device.isa)}};
    return {};
  }
  std::unique_ptr<RecurrentPlan> plan(const RecurrentSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options, kernels(spec, device.isa).isa);
    check(kX86 || needs_ == CpuIsa::generic, "device.cpu_isa.absent", "expected a device of this build, which is not for x86-64, got {}",
          device.str());
    if (spec.conv != RecurrentConv::none) return make_conv_plan(*this, spec, device, options, conv_rows_of_host(spec, options.limits));
    return std::make_unique<RecurrentCpuPlan>(name_, kernels(spec, device.isa), spec, options);
  }

  std::vector<KernelChoice> kernel_choices(const RecurrentSpec& spec, const DeviceInfo& device) const override {
    check_request(*this, spec.str(), unsupported(spec, device), device, {});
    const char* const kernel = kernels(spec, device.isa).isa;
    std::vector<KernelChoice> choices;
    if (has_chunks(spec)) {
      const ChunkTask task = ChunkTask::largest(spec);
      choices.push_back({.requests = "prompts",
                         .kernel = kernel,
                         .sizes = {{"chunk", kRecurrentChunk}, {"tile_heads", task.heads}, {"tile_values", task.values}}});
    }
    choices.push_back(
        {.requests = has_chunks(spec) ? "others" : "all",
         .kernel = kernel,
         .sizes = {is_narrow(spec) ? KernelChoice::Size{"tile_heads", std::min(narrow_heads(spec.head_dim_k), spec.num_v_heads)}
                                   : KernelChoice::Size{"tile_values", std::min(kRecurrentValues, spec.head_dim_v)}}});
    add_conv_choices(name(), spec, device, choices);
    return choices;
  }

 private:
  const RecurrentKernels& kernels(const RecurrentSpec& spec, CpuIsa isa) const {
    if constexpr (kX86) {
      if (needs_ == CpuIsa::avx512 && spec.dtype == DType::bf16 && has_chunks(spec)) {
        if (isa >= CpuIsa::amx_emulated) return isa >= CpuIsa::amx ? recurrent_amx : recurrent_amx_emulated;
        if (isa >= CpuIsa::avx512_bf16 && !has_channel_decays(spec)) return recurrent_avx512_bf16;
      }
      if (needs_ == CpuIsa::avx512) return recurrent_avx512;
      if (isa >= CpuIsa::avx2) return recurrent_avx2;
    }
    return recurrent_generic;
  }

  std::string_view name_, description_;
  CpuIsa needs_;
};

}  // namespace
}  // namespace cpu

const BackendOf<RecurrentFamily>& cpu_avx512_recurrent() {
  static const cpu::RecurrentCpuBackend backend(
      "cpu_avx512", "decode token by token, prompts in chunks of 64 tokens, vectors of 16 (AVX-512), tiles of bf16 where there are (AMX)",
      CpuIsa::avx512);
  return backend;
}
const BackendOf<RecurrentFamily>& cpu_generic_recurrent() {
  static const cpu::RecurrentCpuBackend backend(
      "cpu_generic", "decode token by token, prompts in chunks of 64 tokens, portable C++, also compiled for AVX2", CpuIsa::generic);
  return backend;
}

}  // namespace imbrex

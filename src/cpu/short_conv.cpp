// The short convolution on CPUs: one plan, and a table of kernels for each instruction set.
#include "imbrex/short_conv.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/cpu_features.h"
#include "core/run_parallel.h"
#include "core/scratch_of_plans.h"
#include "core/tensor_layout.h"
#include "cpu/short_conv_params.h"
#include "family/begin_plan.h"
#include "short_conv/step.h"

namespace imbrex {
namespace cpu {

extern const ShortConvKernels short_conv_generic, short_conv_avx2, short_conv_avx512;

namespace {

// Outputs of a step that are more than this leave the caches before they are read, and the lines that they take are better not read first.
constexpr int64_t kPastCaches = 16 << 20, kLineBytes = 64;
// Of a task: weights are read once a task, and rows of memory are best read whole, so a task has all channels where there are tokens for so
// many tasks of each worker, and as many tokens as leave that many.
constexpr int kLeastTaskTokens = 64, kMostTaskTokens = 512, kTasksOfWorker = 4, kLeastTaskChannels = 1024, kChannelsOfLine = 64;

class ShortConvCpuPlan final : public ShortConvPlan {
 public:
  ShortConvCpuPlan(std::string_view backend, const ShortConvKernels& kernels, const ShortConvSpec& spec, const PlanOptions& options)
      : backend_(backend), kernels_(kernels), spec_(spec), options_(options) {
    scratch_bytes_ = (kernels.scratch_bytes(spec.dim, spec.width) + kLineBytes - 1) / kLineBytes * kLineBytes;
    scratch_ = std::dynamic_pointer_cast<SharedScratch>(options.workspace);
    if (scratch_ == nullptr) scratch_ = std::make_shared<SharedScratch>();
    scratch_->reserve(scratch_bytes_ * workers() + kLineBytes);
  }

  void update(const Batch& batch, Stream) override {
    read_batch(StateDrafts(spec_), options_.limits, batch, options_.validate, spare_.step);
    cut(spare_);
    std::swap(now_, spare_);
  }

  void run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream) const override {
    if (now_.items.empty() && now_.step.padding.empty()) return;
    check_run(spec_, {}, in, out, now_.step.num_tokens, now_.step.num_slots);
    zero_padding(now_.step, out.out);
    if (now_.items.empty()) return;
    const int64_t out_stride = byte_stride(out.out, 0);
    const bool whole_lines = reinterpret_cast<uintptr_t>(out.out.data) % kLineBytes == 0 && out_stride % kLineBytes == 0;
    const ShortConvParams params{
        .input = in.input.as<const char>(),
        .weight = in.weight.as<const char>(),
        .bias = in.bias.as<const char>(),
        .state = in.state.as<char>(),
        .out = out.out.as<char>(),
        .input_stride = byte_stride(in.input, 0),
        .weight_dim_stride = in.weight.stride(0) * size_of(spec_.dtype),
        .weight_tap_stride = byte_stride(in.weight, 1),
        .state_slot_stride = byte_stride(in.state, 0),
        .state_row_stride = byte_stride(in.state, 1),
        .out_stride = out_stride,
        .type = int(spec_.dtype),
        .dim = spec_.dim,
        .width = spec_.width,
        .gated = spec_.form == ShortConvForm::gated,
        .silu = spec_.activation == ShortConvActivation::silu,
        .past_caches = whole_lines && int64_t(now_.step.num_tokens) * spec_.dim * size_of(spec_.dtype) >= kPastCaches,
        .tree = spec_.tree_drafts,
        .parent_rows = now_.step.parent_rows.empty() ? nullptr : now_.step.parent_rows.data()};
    const int64_t tiles = (spec_.dim + now_.channels - 1) / now_.channels, tasks = int64_t(now_.first_item.size() - 1) * tiles;
    char* const memory = scratch_->data();
    char* const scratch = memory + (kLineBytes - int64_t(reinterpret_cast<uintptr_t>(memory) % kLineBytes)) % kLineBytes;
    std::atomic<int64_t> next{0};
    const auto work = [&](int worker) {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        const size_t group = size_t(task / tiles);
        const int dim = int(task % tiles) * now_.channels, first = now_.first_item[group];
        kernels_.run(params, now_.items.data() + first, now_.first_item[group + 1] - first, dim, std::min(dim + now_.channels, spec_.dim),
                     scratch + worker * scratch_bytes_);
      }
    };
    run_parallel(tasks > 1 ? options_.threads : ParallelFor{}, work);
  }

  std::string str() const override {
    return fmt::format("{} ({}): {} items of {} requests", backend_, kernels_.isa, now_.items.size(), now_.step.requests.size());
  }

 private:
  struct Cut {
    StateStep step;
    std::vector<ShortConvItem> items;
    std::vector<int> first_item{0};  // of each group of tasks, which share tokens, and the end
    int channels = 1;                // of a task
  };

  int workers() const { return std::max(options_.threads.num_workers, 1); }

  void cut(Cut& c) const {
    c.items.clear();
    c.first_item.assign(1, 0);
    const bool tree = spec_.tree_drafts;
    const int wanted = kTasksOfWorker * workers(), most = std::clamp(c.step.num_tokens / wanted, kLeastTaskTokens, kMostTaskTokens);
    int tokens = 0;
    for (const StateRequest& r : c.step.requests) {
      const int request_end = tree ? r.end - r.drafts : r.end;
      for (int begin = r.begin; begin == r.begin || begin < request_end; begin += most) {
        const int end = std::min(begin + most, request_end);
        c.items.push_back({begin, end, r.begin, request_end, r.slot, r.source, r.first_row, r.drafts, r.fresh});
        tokens += end - begin + (tree && begin == r.begin ? r.drafts : 0);
        if (tokens < most) continue;
        c.first_item.push_back(int(c.items.size()));
        tokens = 0;
      }
    }
    if (c.first_item.back() != int(c.items.size())) c.first_item.push_back(int(c.items.size()));
    const int groups = std::max(int(c.first_item.size()) - 1, 1);
    const int tiles = std::clamp((wanted + groups - 1) / groups, 1, (spec_.dim + kLeastTaskChannels - 1) / kLeastTaskChannels);
    c.channels = workers() == 1 ? spec_.dim : ((spec_.dim + tiles - 1) / tiles + kChannelsOfLine - 1) / kChannelsOfLine * kChannelsOfLine;
  }

  std::string_view backend_;
  const ShortConvKernels& kernels_;
  ShortConvSpec spec_;
  PlanOptions options_;
  Cut now_, spare_;
  int64_t scratch_bytes_ = 0;  // of a worker
  std::shared_ptr<SharedScratch> scratch_;
};

class ShortConvCpuBackend final : public BackendOf<ShortConvFamily> {
 public:
  ShortConvCpuBackend(std::string_view name, std::string_view description, CpuIsa needs)
      : name_(name), description_(description), needs_(needs) {}
  std::string_view name() const override { return name_; }
  std::string_view description() const override { return description_; }
  std::vector<Reason> unsupported(const ShortConvSpec&, const DeviceInfo& device) const override {
    if (device.device.type != DeviceType::cpu) return {{"device.type", "cpu", to_string(device.device.type)}};
    if (device.isa < needs_) return {{"device.isa", to_string(needs_), to_string(device.isa)}};
    return {};
  }
  std::unique_ptr<ShortConvPlan> plan(const ShortConvSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options, kernels(device.isa).isa);
    check(kX86 || needs_ == CpuIsa::generic, "device.cpu_isa.absent", "expected a device of this build, which is not for x86-64, got {}",
          device.str());
    return std::make_unique<ShortConvCpuPlan>(name_, kernels(device.isa), spec, options);
  }

  std::vector<KernelChoice> kernel_choices(const ShortConvSpec& spec, const DeviceInfo& device) const override {
    check_request(*this, spec.str(), unsupported(spec, device), device, {});
    return {
        {.requests = "all", .kernel = kernels(device.isa).isa, .sizes = {{"tile_channels", spec.dim}, {"tile_tokens", kMostTaskTokens}}}};
  }

 private:
  const ShortConvKernels& kernels(CpuIsa isa) const {
    if constexpr (kX86) {
      if (needs_ == CpuIsa::avx512) return short_conv_avx512;
      if (isa >= CpuIsa::avx2) return short_conv_avx2;
    }
    return short_conv_generic;
  }

  std::string_view name_, description_;
  CpuIsa needs_;
};

}  // namespace
}  // namespace cpu

const BackendOf<ShortConvFamily>& cpu_avx512_short_conv() {
  static const cpu::ShortConvCpuBackend backend("cpu_avx512", "vectors of 16 channels (AVX-512)", CpuIsa::avx512);
  return backend;
}
const BackendOf<ShortConvFamily>& cpu_generic_short_conv() {
  static const cpu::ShortConvCpuBackend backend("cpu_generic", "portable C++, also compiled for AVX2", CpuIsa::generic);
  return backend;
}

}  // namespace imbrex

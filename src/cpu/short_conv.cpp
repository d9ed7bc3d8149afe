// The short convolution on CPUs: one plan, and a table of kernels for each instruction set.
#include "imbrex/short_conv.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/cpu_features.h"
#include "core/run_parallel.h"
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
constexpr int kTaskTokens = 64;  // of a task at least, where there are as many: weights are read once a task

class ShortConvCpuPlan final : public ShortConvPlan {
 public:
  ShortConvCpuPlan(std::string_view backend, const ShortConvKernels& kernels, const ShortConvSpec& spec, const PlanOptions& options)
      : backend_(backend), kernels_(kernels), spec_(spec), options_(options) {}

  void update(const Batch& batch, Stream) override {
    read_batch(StateDrafts(spec_), options_.limits, batch, options_.validate, spare_.step);
    cut(spec_.tree_drafts, spare_);
    std::swap(now_, spare_);
  }

  void run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream) const override {
    if (now_.items.empty()) return;
    check_run(spec_, {}, in, out, now_.step.num_tokens, now_.step.num_slots);
    const int64_t out_stride = byte_stride(out.out, 0);
    const bool aligned = reinterpret_cast<uintptr_t>(out.out.data) % kLineBytes == 0 && out_stride % kLineBytes == 0;
    const ShortConvParams params{.input = in.input.as<const char>(),
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
                                 .past_caches = aligned && int64_t(now_.step.num_tokens) * spec_.dim * size_of(spec_.dtype) >= kPastCaches,
                                 .tree = spec_.tree_drafts,
                                 .parent_rows = now_.step.parent_rows.empty() ? nullptr : now_.step.parent_rows.data()};
    const int64_t tiles = (spec_.dim + kShortConvDims - 1) / kShortConvDims, tasks = int64_t(now_.first_item.size() - 1) * tiles;
    std::atomic<int64_t> next{0};
    const auto work = [&](int) {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        const size_t group = size_t(task / tiles);
        const int dim = int(task % tiles) * kShortConvDims, first = now_.first_item[group];
        kernels_.run(params, now_.items.data() + first, now_.first_item[group + 1] - first, dim, std::min(dim + kShortConvDims, spec_.dim));
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
    std::vector<int> first_item{0};  // of each task, and the end
  };

  static void cut(bool tree, Cut& c) {
    c.items.clear();
    c.first_item.assign(1, 0);
    int tokens = 0;
    for (const StateRequest& r : c.step.requests) {
      const int request_end = tree ? r.end - r.drafts : r.end;
      for (int begin = r.begin; begin == r.begin || begin < request_end; begin += kShortConvTokens) {
        const int end = std::min(begin + kShortConvTokens, request_end);
        c.items.push_back({begin, end, r.begin, request_end, r.slot, r.source, r.first_row, r.drafts, r.fresh});
        tokens += end - begin + (tree && begin == r.begin ? r.drafts : 0);
        if (tokens < kTaskTokens) continue;
        c.first_item.push_back(int(c.items.size()));
        tokens = 0;
      }
    }
    if (c.first_item.back() != int(c.items.size())) c.first_item.push_back(int(c.items.size()));
  }

  std::string_view backend_;
  const ShortConvKernels& kernels_;
  ShortConvSpec spec_;
  PlanOptions options_;
  Cut now_, spare_;
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
    return {{.requests = "all",
             .kernel = kernels(device.isa).isa,
             .sizes = {{"tile_channels", std::min(kShortConvDims, spec.dim)}, {"tile_tokens", kShortConvTokens}}}};
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

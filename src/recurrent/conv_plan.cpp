// See conv_plan.h.
#include "recurrent/conv_plan.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/stream_capture.h"
#include "family/batch_checks.h"
#include "family/state_step.h"
#include "recurrent/step.h"

namespace imbrex {
namespace {

// A step that can be made again: the host's lists, or views of the device's.
struct KeptStep {
  std::vector<int32_t> starts, lens, slots, drafts, accepted, sources, parents;
  std::optional<int32_t> pad_slot;
  std::optional<DeviceBatch> on_device;
  int num_tokens = 0;
  int64_t num_slots = 0;

  void keep(const Batch& b) {
    const auto copy = [](std::vector<int32_t>& to, auto from) { to.assign(from.begin(), from.end()); };
    copy(starts, b.query_start_loc), copy(lens, b.seq_lens), copy(slots, b.state_slots);
    copy(drafts, b.num_drafts), copy(accepted, b.accepted_drafts);
    copy(sources, b.source_slots), copy(parents, b.draft_parents);
    pad_slot = b.pad_slot;
    on_device.reset();
  }
  void make(ShortConvPlan& plan, Stream stream) const {
    if (on_device) return plan.update_on_device(*on_device, stream);
    Batch b;
    b.query_start_loc = starts, b.seq_lens = lens, b.state_slots = slots, b.num_drafts = drafts, b.accepted_drafts = accepted;
    b.source_slots = sources, b.draft_parents = parents, b.pad_slot = pad_slot;
    plan.update(b, stream);
  }
};

class ConvRecurrentPlan final : public RecurrentPlan {
 public:
  ConvRecurrentPlan(const RecurrentSpec& spec, const DeviceInfo& device, const PlanOptions& options, std::shared_ptr<void> rows,
                    std::unique_ptr<ShortConvPlan> conv, std::unique_ptr<RecurrentPlan> recurrence)
      : spec_(spec),
        device_(device.device),
        options_(options),
        rows_(std::move(rows)),
        conv_(std::move(conv)),
        recurrence_(std::move(recurrence)) {}

  void update(const Batch& batch, Stream stream) override {
    StateStep step;
    read_batch(StateDrafts(spec_), options_.limits, batch, options_.validate, step);
    check(step.num_tokens <= options_.limits.max_num_tokens, "update.limits", "expected at most {} tokens, got {}",
          options_.limits.max_num_tokens, step.num_tokens);
    KeptStep next;
    next.keep(batch);
    next.num_tokens = step.num_tokens, next.num_slots = step.num_slots;
    update_both(std::move(next), stream, [&](BasicPlan& plan) { plan.update(batch, stream); });
  }
  void update_on_device(const DeviceBatch& batch, Stream stream) override {
    KeptStep next;
    next.on_device = batch;
    update_both(std::move(next), stream, [&](BasicPlan& plan) { plan.update_on_device(batch, stream); });
    now_.num_tokens = max_tokens(batch, options_.limits);
  }
  std::vector<Reason> device_problems(Stream stream) override {
    std::vector<Reason> all = recurrence_->device_problems(stream);
    for (Reason& reason : conv_->device_problems(stream))
      if (std::ranges::find(all, reason) == all.end()) all.push_back(std::move(reason));
    return all;
  }

  void run(const RecurrentInputs& in, const RecurrentOutputs& out, Stream stream) const override {
    check(has_step_, "plan.no_step", "expected a step to compute: the last update of {} failed, and the step before could not be kept",
          str());
    if (now_.num_tokens == 0 && !is_captured(device_, stream)) return;
    check_run(spec_, device_, in, out, now_.num_tokens, now_.num_slots);
    const int64_t tokens = options_.limits.max_num_tokens, channels = spec_.conv_channels();
    const TensorView rows = TensorView::contiguous(rows_.get(), spec_.dtype, {tokens, channels}, device_);
    conv_->run({.input = in.input, .weight = in.conv_weight, .bias = in.conv_bias, .state = in.conv_state}, {.out = rows}, stream);
    RecurrentInputs convolved = in;
    convolved.input = convolved.conv_weight = convolved.conv_bias = convolved.conv_state = {};
    int64_t first = 0;
    const auto take = [&](TensorView& t, int64_t heads, int64_t dim) {
      t = TensorView::contiguous(rows.as<char>() + first * size_of(spec_.dtype), spec_.dtype, {tokens, heads, dim}, device_);
      t.strides[0] = channels;
      first += heads * dim;
    };
    const bool values_first = spec_.conv == RecurrentConv::vkq;
    if (values_first) take(convolved.v, spec_.num_v_heads, spec_.head_dim_v);
    if (values_first) take(convolved.k, spec_.num_k_heads, spec_.head_dim_k);
    take(convolved.q, spec_.num_k_heads, spec_.head_dim_k);
    if (!values_first) take(convolved.k, spec_.num_k_heads, spec_.head_dim_k);
    if (!values_first) take(convolved.v, spec_.num_v_heads, spec_.head_dim_v);
    recurrence_->run(convolved, out, stream);
  }

  bool capturable() const override { return conv_->capturable() && recurrence_->capturable(); }
  int step_tokens() const override { return recurrence_->step_tokens(); }
  bool rounded_products() const override { return recurrence_->rounded_products(); }
  std::string str() const override { return recurrence_->str() + ", convolved by " + conv_->str(); }

 private:
  // Where the second part fails, the first one goes back to the step before.
  void update_both(KeptStep next, Stream stream, const auto& update) {
    update(*conv_);
    try {
      update(*recurrence_);
    } catch (...) {
      try {
        now_.make(*conv_, stream);
      } catch (...) {
        has_step_ = false;
      }
      throw;
    }
    now_ = std::move(next);
    has_step_ = true;
  }

  RecurrentSpec spec_;
  Device device_;
  PlanOptions options_;
  std::shared_ptr<void> rows_;
  std::unique_ptr<ShortConvPlan> conv_;
  std::unique_ptr<RecurrentPlan> recurrence_;
  KeptStep now_;
  bool has_step_ = true;
};

}  // namespace

ShortConvSpec conv_of(const RecurrentSpec& spec) {
  return {.dim = int(spec.conv_channels()),
          .width = spec.conv_width,
          .bias = spec.conv_bias,
          .dtype = spec.dtype,
          .num_drafts = spec.num_drafts,
          .form = ShortConvForm::plain,
          .activation = spec.conv_silu ? ShortConvActivation::silu : ShortConvActivation::none,
          .tree_drafts = spec.tree_drafts};
}

RecurrentSpec without_conv(const RecurrentSpec& spec) {
  const RecurrentSpec usual;
  RecurrentSpec part = spec;
  part.conv = usual.conv, part.conv_width = usual.conv_width, part.conv_bias = usual.conv_bias, part.conv_silu = usual.conv_silu;
  return part;
}

void add_conv_choices(std::string_view backend, const RecurrentSpec& spec, const DeviceInfo& device, std::vector<KernelChoice>& choices) {
  const BackendOf<ShortConvFamily>* const conv = find_backend<ShortConvFamily>(backend);
  if (spec.conv == RecurrentConv::none || conv == nullptr) return;
  for (KernelChoice& choice : conv->kernel_choices(conv_of(spec), device)) {
    choice.requests = "convolution";
    choices.push_back(std::move(choice));
  }
}

int64_t conv_row_bytes(const RecurrentSpec& spec, const PlanLimits& limits) {
  return limits.max_num_tokens * spec.conv_channels() * size_of(spec.dtype);
}

std::shared_ptr<void> conv_rows_of_host(const RecurrentSpec& spec, const PlanLimits& limits) {
  const std::shared_ptr<char[]> rows(new char[size_t(conv_row_bytes(spec, limits))]);  // pages that are never touched cost nothing
  return {rows, rows.get()};
}

std::unique_ptr<RecurrentPlan> make_conv_plan(const BackendOf<RecurrentFamily>& backend, const RecurrentSpec& spec,
                                              const DeviceInfo& device, const PlanOptions& options, std::shared_ptr<void> rows) {
  const BackendOf<ShortConvFamily>* const conv = find_backend<ShortConvFamily>(backend.name());
  check(conv != nullptr, "recurrent.conv.backend", "expected a backend {} of short convolutions too", backend.name());
  return std::make_unique<ConvRecurrentPlan>(spec, device, options, std::move(rows), conv->plan(conv_of(spec), device, options),
                                             backend.plan(without_conv(spec), device, options));
}

}  // namespace imbrex

// Backends of the short convolution from outside of the library.
#include "api/outside.h"
#include "short_conv/spec_fields.h"
#include "short_conv/step.h"

namespace imbrex::api {
namespace {

class OutsideShortConvPlan final : public OutsidePlan<ShortConvFamily> {
 public:
  using OutsidePlan::OutsidePlan;

  void update(const Batch& batch, Stream stream) override {
    read_batch(spec_.num_drafts, limits_, batch, validate_, spare_);
    const auto list = [](std::span<const int32_t> of) { return of.empty() ? nullptr : of.data(); };
    const imbrex_batch b{.struct_size = sizeof b,
                         .num_reqs = batch.num_reqs(),
                         .query_start_loc = batch.query_start_loc.data(),
                         .seq_lens = batch.seq_lens.data(),
                         .state_slots = list(batch.state_slots),
                         .num_drafts = list(batch.num_drafts),
                         .accepted_drafts = list(batch.accepted_drafts)};
    functions_->must(functions_->update(plan_, &b, stream), "update");
    std::swap(now_, spare_);
  }

  void run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream stream) const override {
    if (now_.num_tokens == 0 && device_.type == DeviceType::cpu) return;  // elsewhere a graph may want the call for later steps
    check_run(spec_, device_, in, out, now_.num_tokens, now_.num_slots);
    const CTensor input(in.input), weight(in.weight), bias(in.bias), state(in.state), to(out.out);
    const imbrex_short_conv_inputs inputs{
        .struct_size = sizeof inputs, .bcx = input.get(), .weight = weight.get(), .bias = bias.get(), .state = state.get()};
    const imbrex_short_conv_outputs outputs{.struct_size = sizeof outputs, .out = to.get()};
    functions_->must(functions_->run(plan_, &inputs, &outputs, stream), "run");
  }

 private:
  StateStep now_, spare_;
};

}  // namespace
}  // namespace imbrex::api

using namespace imbrex;
using namespace imbrex::api;

imbrex_status imbrex_register_short_conv_backend(const imbrex_short_conv_backend* given) {
  return guarded([&] {
    const imbrex_short_conv_backend b = read(given, "backend");
    register_outside<OutsideShortConvPlan>(b, b.run != nullptr);
  });
}

imbrex_status imbrex_unregister_short_conv_backend(const char* name) {
  return guarded([&] { unregister_outside<OutsideShortConvPlan>(name); });
}

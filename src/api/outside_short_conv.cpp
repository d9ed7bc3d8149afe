// Backends of the short convolution from outside of the library.
#include "api/outside_state.h"
#include "short_conv/spec_fields.h"
#include "short_conv/step.h"

namespace imbrex::api {
namespace {

class OutsideShortConvPlan final : public OutsideStatePlan<ShortConvFamily> {
 public:
  using OutsideStatePlan::OutsideStatePlan;

  void run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream stream) const override {
    if (is_idle()) return;
    check_run(spec_, device_, in, out, step().num_tokens, step().num_slots);
    const CTensor input(in.input), weight(in.weight), bias(in.bias), state(in.state), to(out.out);
    const imbrex_short_conv_inputs inputs{
        .struct_size = sizeof inputs, .bcx = input.get(), .weight = weight.get(), .bias = bias.get(), .state = state.get()};
    const imbrex_short_conv_outputs outputs{.struct_size = sizeof outputs, .out = to.get()};
    functions_->must(functions_->run(plan_, &inputs, &outputs, stream), "run");
  }
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

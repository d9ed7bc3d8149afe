// Backends of recurrent layers from outside of the library.
#include "api/outside_state.h"
#include "recurrent/spec_fields.h"
#include "recurrent/step.h"

namespace imbrex::api {
namespace {

class OutsideRecurrentPlan final : public OutsideStatePlan<RecurrentFamily> {
 public:
  using OutsideStatePlan::OutsideStatePlan;

  int step_tokens() const override { return 0; }  // nothing is known of how a cut changes bits

  void run(const RecurrentInputs& in, const RecurrentOutputs& out, Stream stream) const override {
    if (is_idle()) return;
    check_run(spec_, device_, in, out, step().num_tokens, step().num_slots);
    const CTensor q(in.q), k(in.k), v(in.v), gate(in.gate), beta(in.beta), rates(in.rates), gate_bias(in.gate_bias), skip(in.skip),
        state(in.state), z(in.z), norm_weight(in.norm_weight), input(in.input), conv_weight(in.conv_weight), conv_bias(in.conv_bias),
        conv_state(in.conv_state), to(out.out);
    const imbrex_recurrent_inputs inputs{.struct_size = sizeof inputs,
                                         .q = q.get(),
                                         .k = k.get(),
                                         .v = v.get(),
                                         .gate = gate.get(),
                                         .beta = beta.get(),
                                         .rates = rates.get(),
                                         .gate_bias = gate_bias.get(),
                                         .skip = skip.get(),
                                         .state = state.get(),
                                         .z = z.get(),
                                         .norm_weight = norm_weight.get(),
                                         .input = input.get(),
                                         .conv_weight = conv_weight.get(),
                                         .conv_bias = conv_bias.get(),
                                         .conv_state = conv_state.get()};
    const imbrex_recurrent_outputs outputs{.struct_size = sizeof outputs, .out = to.get()};
    functions_->must(functions_->run(plan_, &inputs, &outputs, stream), "run");
  }
};

}  // namespace
}  // namespace imbrex::api

using namespace imbrex;
using namespace imbrex::api;

imbrex_status imbrex_register_recurrent_backend(const imbrex_recurrent_backend* given) {
  return guarded([&] {
    const imbrex_recurrent_backend b = read(given, "backend");
    register_outside<OutsideRecurrentPlan>(b, b.run != nullptr);
  });
}

imbrex_status imbrex_unregister_recurrent_backend(const char* name) {
  return guarded([&] { unregister_outside<OutsideRecurrentPlan>(name); });
}

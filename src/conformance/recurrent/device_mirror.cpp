// See device_mirror.h.
#include "conformance/recurrent/device_mirror.h"

#include <vector>

namespace imbrex {
namespace {

struct RecurrentMirrorMemory {
  std::unique_ptr<DeviceStream> stream;
  Mirrored q, k, v, gate, beta, rates, gate_bias, skip, state, z, norm_weight, input, conv_weight, conv_bias, conv_state, out;

  explicit RecurrentMirrorMemory(const DeviceInfo& device) : stream(open_stream(device)) {}
};

class RecurrentMirrorPlan final : public StateMirrorPlan<RecurrentFamily, RecurrentMirrorMemory> {
 public:
  using StateMirrorPlan::StateMirrorPlan;

  void run(const RecurrentInputs& in, const RecurrentOutputs& out, Stream) const override {
    Memory& m = *memory_;
    const DeviceStream& stream = *m.stream;
    const RecurrentInputs inputs{.q = m.q.take(in.q, stream),
                                 .k = m.k.take(in.k, stream),
                                 .v = m.v.take(in.v, stream),
                                 .gate = m.gate.take(in.gate, stream),
                                 .beta = m.beta.take(in.beta, stream),
                                 .rates = m.rates.take(in.rates, stream),
                                 .gate_bias = m.gate_bias.take(in.gate_bias, stream),
                                 .skip = m.skip.take(in.skip, stream),
                                 .state = m.state.take(in.state, stream),
                                 .z = m.z.take(in.z, stream),
                                 .norm_weight = m.norm_weight.take(in.norm_weight, stream),
                                 .input = m.input.take(in.input, stream),
                                 .conv_weight = m.conv_weight.take(in.conv_weight, stream),
                                 .conv_bias = m.conv_bias.take(in.conv_bias, stream),
                                 .conv_state = m.conv_state.take(in.conv_state, stream)};
    const RecurrentOutputs outputs{.out = m.out.take(out.out, stream)};
    launch({inputs.q, inputs.k, inputs.v, inputs.gate, inputs.beta, inputs.rates, inputs.gate_bias, inputs.skip, inputs.state, inputs.z,
            inputs.norm_weight, inputs.input, inputs.conv_weight, inputs.conv_bias, inputs.conv_state, outputs.out},
           [&](Stream on) { plan_->run(inputs, outputs, on); });
    m.out.give_back(out.out, "out", stream);
    m.state.give_back(in.state, "state", stream);
    m.conv_state.give_back(in.conv_state, "conv_state", stream);
  }
  int step_tokens() const override { return plan_->step_tokens(); }
  bool rounded_products() const override { return plan_->rounded_products(); }
};

}  // namespace

std::unique_ptr<BackendOf<RecurrentFamily>> device_mirror(const BackendOf<RecurrentFamily>& backend, const StateMirrorOptions& options) {
  return std::make_unique<MirrorBackend<RecurrentFamily, RecurrentMirrorPlan, StateMirrorOptions>>(backend, options);
}

}  // namespace imbrex

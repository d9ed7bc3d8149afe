// See device_mirror.h.
#include "conformance/short_conv/device_mirror.h"

namespace imbrex {
namespace {

struct ConvMirrorMemory {
  std::unique_ptr<DeviceStream> stream;
  Mirrored input, weight, bias, state, out;

  explicit ConvMirrorMemory(const DeviceInfo& device) : stream(open_stream(device)) {}
};

class ConvMirrorPlan final : public StateMirrorPlan<ShortConvFamily, ConvMirrorMemory> {
 public:
  using StateMirrorPlan::StateMirrorPlan;

  void run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream) const override {
    Memory& m = *memory_;
    const DeviceStream& stream = *m.stream;
    const ShortConvInputs inputs{.input = m.input.take(in.input, stream),
                                 .weight = m.weight.take(in.weight, stream),
                                 .bias = m.bias.take(in.bias, stream),
                                 .state = m.state.take(in.state, stream)};
    const ShortConvOutputs outputs{.out = m.out.take(out.out, stream)};
    launch({inputs.input, inputs.weight, inputs.bias, inputs.state, outputs.out}, [&](Stream on) { plan_->run(inputs, outputs, on); });
    m.out.give_back(out.out, "out", stream);
    m.state.give_back(in.state, "state", stream);
  }
};

}  // namespace

std::unique_ptr<BackendOf<ShortConvFamily>> device_mirror(const BackendOf<ShortConvFamily>& backend, const StateMirrorOptions& options) {
  return std::make_unique<MirrorBackend<ShortConvFamily, ConvMirrorPlan, StateMirrorOptions>>(backend, options);
}

}  // namespace imbrex

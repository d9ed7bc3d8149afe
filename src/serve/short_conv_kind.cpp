// Layers of the short convolution in a replay (see layer_kind.h).
#include "imbrex/short_conv.h"
#include "serve/layer_kind.h"

namespace imbrex::serve {

namespace {

class ShortConvLayers final : public KindOf<ShortConvFamily> {
 public:
  ShortConvLayers(const ModelSpec::Kind& kind, const KindSetup& setup) : KindOf(kind, setup) {
    const int piece = Synthetic::piece(spec().dim);
    parts_ = {{Side::conv, spec().input_channels() / piece, piece}};
    out_rows_ = 1;
    out_length_ = spec().dim;
    for (const int layer : kind.layers) {
      Layer& made = layers_.emplace_back(Layer{.parameters = ShortConvParameters(spec(), setup.options.seed, layer), .inputs = {}});
      made.parameters.view(made.inputs);
      for (TensorView* t : {&made.inputs.weight, &made.inputs.bias}) {
        if (t->empty()) continue;
        made.owned.push_back(setup.stream.copy_of(*t));
        *t = made.owned.back().view;
      }
    }
    make_plans(setup);
  }

  void place_cache(size_t layer, const GroupCache& group, int layer_of_group) override {
    const TensorView slots = std::get<StateAllocation>(group).layer(layer_of_group);
    layers_[layer].inputs.state =
        TensorView::contiguous(slots.data, slots.dtype, {slots.size(0), spec().state_rows(), spec().dim}, slots.device);
  }

  bool write_cache(size_t, const StepTensors&) const override { return false; }  // run() reads and writes the states

  void run(size_t layer, const StepTensors& tensors) const override {
    ShortConvInputs inputs = layers_[layer].inputs;
    const TensorView& input = tensors.in[0];
    inputs.input = TensorView::contiguous(input.data, input.dtype, {input.size(0), spec().input_channels()}, input.device);
    plan().run(inputs, {.out = tensors.out}, stream());
  }

  LayerWork work(const StepPlan& step) const override { return layer_work(spec(), step); }

  VerifyTarget target(size_t layer, int) const override {
    return ShortConvTarget{.spec = &spec(), .parameters = &layers_[layer].parameters};
  }

  std::vector<TensorView> states_of(size_t layer, int, int slot, int row) const override {
    const int rows = spec().width - 1, first = row * (spec().tree_drafts ? rows : 1);
    return {layers_[layer].inputs.state.select(0, slot).slice(0, first, first + rows)};
  }

 private:
  struct Layer {
    ShortConvParameters parameters;
    ShortConvInputs inputs;           // state and parameters, where the device reads them
    std::vector<DeviceTensor> owned;  // parameters on the device
  };

  std::vector<Layer> layers_;
};

}  // namespace

std::unique_ptr<LayerKind> make_kind(const ShortConvSpec&, const ModelSpec::Kind& kind, const KindSetup& setup) {
  return std::make_unique<ShortConvLayers>(kind, setup);
}

}  // namespace imbrex::serve

// Recurrent layers in a replay (see layer_kind.h).
#include <tuple>

#include "core/check.h"
#include "imbrex/recurrent.h"
#include "serve/layer_kind.h"

namespace imbrex::serve {

namespace {

class RecurrentLayers final : public KindOf<RecurrentFamily> {
 public:
  RecurrentLayers(const ModelSpec::Kind& kind, const KindSetup& setup) : KindOf(kind, setup) {
    const RecurrentSpec& s = spec();
    check(
        s.gate != RecurrentGate::log && (!s.delta || (s.qk_norm && s.sigmoid_beta)), "replay.recurrent.growth",
        "expected a layer whose states stay bounded with random inputs: decays made by the layer, and keys of length 1 and a sigmoid beta "
        "with the delta rule, got {}",
        s.str());
    for (const RecurrentRow& row : recurrent_rows(s)) {
      const int piece = Synthetic::piece(row.numbers);
      parts_.push_back({row.side, row.numbers / piece, piece});
    }
    const int heads = RecurrentTarget::heads_of(s);
    out_rows_ = s.num_v_heads / heads;
    out_length_ = int64_t(heads) * s.head_dim_v;
    for (const int layer : kind.layers) {
      Layer& made = layers_.emplace_back(Layer{.parameters = RecurrentParameters(s, setup.options.seed, layer), .inputs = {}, .owned = {}});
      made.parameters.view(made.inputs, 0, s.num_v_heads);
      for (TensorView* t : {&made.inputs.rates, &made.inputs.gate_bias, &made.inputs.skip, &made.inputs.norm_weight,
                            &made.inputs.conv_weight, &made.inputs.conv_bias}) {
        if (t->empty()) continue;
        made.owned.push_back(setup.stream.copy_of(*t));
        *t = made.owned.back().view;
      }
    }
    make_plans(setup);
  }

  void place_cache(size_t layer, const GroupCache& group, int layer_of_group) override {
    const auto& states = std::get<StateAllocation>(group);
    const TensorView slots = states.layer(layer_of_group);
    const bool k_first = spec().layout == StateLayout::k_first;
    const int64_t dim_k = spec().head_dim_k, dim_v = spec().head_dim_v;
    layers_[layer].inputs.state = TensorView::contiguous(
        slots.data, slots.dtype, {slots.size(0), spec().state_rows(), spec().num_v_heads, k_first ? dim_k : dim_v, k_first ? dim_v : dim_k},
        slots.device);
    if (states.num_parts() == 1) return;
    const TensorView rows = states.layer(layer_of_group, 1);
    layers_[layer].inputs.conv_state =
        TensorView::contiguous(rows.data, rows.dtype, {rows.size(0), spec().conv_state_rows(), spec().conv_channels()}, rows.device);
  }

  int step_tokens() const override { return prompt_plan().step_tokens(); }

  bool write_cache(size_t, const StepTensors&) const override { return false; }  // run() reads and writes the states

  void run(size_t layer, const StepTensors& tensors) const override {
    const RecurrentSpec& s = spec();
    RecurrentInputs inputs = layers_[layer].inputs;
    const int64_t tokens = tensors.in[0].size(0);
    const auto shaped = [&](const TensorView& t, std::initializer_list<int64_t> sizes) {
      return TensorView::contiguous(t.data, t.dtype, sizes, t.device);
    };
    size_t next = 0;
    if (s.conv != RecurrentConv::none) {
      inputs.input = shaped(tensors.in[next++], {tokens, s.conv_channels()});
    } else {
      inputs.q = shaped(tensors.in[next++], {tokens, s.num_k_heads, s.head_dim_k});
      inputs.k = shaped(tensors.in[next++], {tokens, s.num_k_heads, s.head_dim_k});
      inputs.v = shaped(tensors.in[next++], {tokens, s.num_v_heads, s.head_dim_v});
    }
    if (s.gate != RecurrentGate::fixed) {
      const TensorView& gate = tensors.in[next++];
      inputs.gate = s.channel_gate ? shaped(gate, {tokens, s.num_v_heads, s.head_dim_k}) : shaped(gate, {tokens, s.num_v_heads});
    }
    if (s.delta) inputs.beta = shaped(tensors.in[next++], {tokens, s.num_v_heads});
    if (s.out_gate != OutputGate::none) inputs.z = shaped(tensors.in[next], {tokens, s.num_v_heads, s.head_dim_v});
    plan().run(inputs, {.out = shaped(tensors.out, {tokens, s.num_v_heads, s.head_dim_v})}, stream());
  }

  LayerWork work(const StepPlan& step) const override { return layer_work(spec(), step); }

  VerifyTarget target(size_t layer, int out_row) const override {
    return RecurrentTarget{.spec = &spec(),
                           .parameters = &layers_[layer].parameters,
                           .first_head = out_row * RecurrentTarget::heads_of(spec()),
                           .rounded_products = prompt_plan().rounded_products()};
  }

  // The heads' state, and of each row of the convolution the stretches of channels that make their q, k and v.
  std::vector<TensorView> states_of(size_t layer, int out_row, int slot, int row) const override {
    const auto& [state, conv] = std::tie(layers_[layer].inputs.state, layers_[layer].inputs.conv_state);
    const int heads = RecurrentTarget::heads_of(spec());
    std::vector<TensorView> parts{state.select(0, slot).select(0, row).slice(0, int64_t(out_row) * heads, int64_t(out_row + 1) * heads)};
    const int kept = spec().conv_width - 1, first = row * (spec().tree_drafts ? kept : 1);
    for (int of_conv = first; !conv.empty() && of_conv < first + kept; ++of_conv)
      for (const ConvStretch& stretch : conv_stretches(spec(), out_row * heads, heads))
        parts.push_back(conv.select(0, slot).select(0, of_conv).slice(0, stretch.first, stretch.first + stretch.count));
    return parts;
  }

 private:
  struct Layer {
    RecurrentParameters parameters;
    RecurrentInputs inputs;           // state and parameters, where the device reads them
    std::vector<DeviceTensor> owned;  // parameters on the device
  };

  std::vector<Layer> layers_;
};

}  // namespace

std::unique_ptr<LayerKind> make_kind(const RecurrentSpec&, const ModelSpec::Kind& kind, const KindSetup& setup) {
  return std::make_unique<RecurrentLayers>(kind, setup);
}

}  // namespace imbrex::serve

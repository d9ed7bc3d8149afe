// Layers of softmax attention in a replay (see layer_kind.h).
#include "attention/kv_codec.h"
#include "core/check.h"
#include "imbrex/select.h"
#include "serve/layer_kind.h"

namespace imbrex::serve {

namespace {

class AttentionLayers final : public KindOf<AttentionFamily> {
 public:
  AttentionLayers(const ModelSpec::Kind& kind, const KindSetup& setup) : KindOf(kind, setup) {
    const AttentionSpec& s = spec();
    parts_ = {{Side::q, s.num_q_heads, s.head_dim_qk}, {Side::k, s.num_kv_heads, s.head_dim_qk}};
    if (!codec_of(s).values_in_keys) parts_.push_back({Side::v, s.num_kv_heads, s.head_dim_v});
    out_rows_ = s.num_kv_heads;  // with the q heads of each
    out_length_ = int64_t(s.group_size()) * s.head_dim_v;
    for (const int layer : kind.layers) add_layer(layer, setup);
    make_plans(setup);
  }

  void place_cache(size_t layer, const GroupCache& group, int layer_of_group) override {
    KvCache& cache = layers_[layer].inputs.kv;
    cache = std::get<KvAllocation>(group).layer(layer_of_group);
    if (!is_fp8(spec().kv_dtype)) return;
    cache.k_scale = TensorView::contiguous(&fp8_scale_, DType::f32, {1});
    if (!codec_of(spec()).values_in_keys) cache.v_scale = cache.k_scale;
    if (codec_of(spec()).layout(spec(), KvPart::k_rope)) cache.k_rope_scale = cache.k_scale;
  }

  bool write_cache(size_t layer, const StepTensors& tensors) const override {
    plan().write_kv(layers_[layer].inputs.kv, tensors.in[1], tensors.in[2], stream());
    return true;
  }

  void update_kept(const Batch& batch) override { kept_plan_->update(batch, stream()); }

  bool write_kept(size_t layer, const StepTensors& tensors) const override {
    kept_plan_->write_kv(layers_[layer].inputs.kv, tensors.in[1], tensors.in[2], stream());
    return true;
  }

  void run(size_t layer, const StepTensors& tensors) const override {
    AttentionInputs inputs = layers_[layer].inputs;
    inputs.q = tensors.in[0];
    const TensorView& out = tensors.out;
    const int64_t tokens = out.size(0) / out_rows_;
    plan().run(inputs,
               {.out = TensorView::contiguous(out.data, out.dtype, {tokens, spec().num_q_heads, spec().head_dim_v}, out.device), .lse = {}},
               stream());
  }

  LayerWork work(const StepPlan& step) const override { return layer_work(spec(), step); }

  VerifyTarget target(size_t layer, int out_row) const override {
    return AttentionTarget{.spec = &spec(), .parameters = &layers_[layer].parameters, .kv_head = out_row};
  }

 private:
  struct Layer {
    LayerParameters parameters;
    AttentionInputs inputs;           // cache and parameters, where the device reads them
    std::vector<DeviceTensor> owned;  // parameters on the device
  };

  void add_layer(int layer, const KindSetup& setup) {
    Layer& made = layers_.emplace_back(Layer{.parameters = LayerParameters(spec(), setup.options.seed, layer), .inputs = {}, .owned = {}});
    AttentionInputs& in = made.inputs;
    made.parameters.view(in, 0, made.parameters.num_q_heads);
    for (TensorView* t : {&in.sinks, &in.alibi_slopes, &in.head_scales, &in.relative_bias}) {
      if (t->empty()) continue;
      made.owned.push_back(setup.stream.copy_of(*t));
      *t = made.owned.back().view;
    }
  }

  void make_plans(const KindSetup& setup) {
    SelectOptions select_options = setup.options.select;
    select_options.phase = Phase::prefill;
    const Selection prefill = select(spec(), setup.device, select_options);
    select_options.phase = Phase::decode;
    const Selection decode = select(spec(), setup.device, select_options);
    check(prefill.backend != nullptr && decode.backend != nullptr, "replay.backend.none", "no backend runs {}:\n{}", spec().str(),
          prefill.str());
    const bool same = prefill.backend == decode.backend;
    plan_ = same ? prefill.backend->plan(spec(), setup.device, setup.plan)
                 : plan_by_phase(*prefill.backend, *decode.backend, spec(), setup.device, setup.plan);
    if (setup.has_decode_plan) decode_plan_ = decode.backend->plan(spec(), setup.device, setup.decode_plan);
    if (spec().mask.tree) {
      PlanOptions writes = setup.plan;
      writes.load_on_demand = true;  // its run() is never called
      kept_plan_ = prefill.backend->plan(spec(), setup.device, writes);
    }
    report_.backend = same ? std::string(prefill.backend->name()) : fmt::format("{} + {}", prefill.backend->name(), decode.backend->name());
    report_.rule = same ? prefill.rule : fmt::format("prefill: {}; decode: {}", prefill.rule, decode.rule);
    report_.selection = prefill.str();
  }

  std::unique_ptr<AttentionPlan> kept_plan_;  // with trees of drafts: for write_kept()
  std::vector<Layer> layers_;
  float fp8_scale_ = kFp8Scale;
};

}  // namespace

std::unique_ptr<LayerKind> make_kind(const AttentionSpec&, const ModelSpec::Kind& kind, const KindSetup& setup) {
  return std::make_unique<AttentionLayers>(kind, setup);
}

}  // namespace imbrex::serve

// Layers of latent attention in a replay (see layer_kind.h).
#include "core/check.h"
#include "imbrex/mla.h"
#include "serve/layer_kind.h"

namespace imbrex::serve {

namespace {

class MlaLayers final : public KindOf<MlaFamily> {
 public:
  MlaLayers(const ModelSpec::Kind& kind, const KindSetup& setup) : KindOf(kind, setup) {
    const MlaSpec& s = spec();
    check(!s.absorbed, "replay.mla.absorbed", "expected layers with the weight of kv_b_proj, got {}", s.str());
    parts_ = {{Side::q, s.num_heads, s.qk_dim()}, {Side::k, 1, s.latent_dim()}};
    out_rows_ = s.num_heads;
    out_length_ = s.v_dim;
    for (const int layer : kind.layers) {
      Layer& made = layers_.emplace_back(Layer{.parameters = MlaParameters(s, setup.options.seed, layer), .inputs = {}, .owned = {}});
      made.parameters.view(made.inputs);
      for (TensorView* t : {&made.inputs.kv_b, &made.inputs.sinks}) {
        if (t->empty()) continue;
        made.owned.push_back(setup.stream.copy_of(*t));
        *t = made.owned.back().view;
      }
    }
    make_plans(setup);
    if (!s.mask.tree) return;
    MlaSpec writes = s;
    writes.absorbed = true;  // so that a plan whose run() is never called has no memory to compute in
    PlanOptions options = setup.plan;
    options.load_on_demand = true, options.out_dtype.reset();
    kept_plan_ = find_backend<MlaFamily>(report_.backend)->plan(writes, setup.device, options);
  }

  void place_cache(size_t layer, const GroupCache& group, int layer_of_group) override {
    KvCache& cache = layers_[layer].inputs.kv;
    cache = std::get<KvAllocation>(group).layer(layer_of_group);
    if (is_fp8(spec().kv_dtype)) cache.k_scale = TensorView::contiguous(&fp8_scale_, DType::f32, {1});
  }

  // A request is computed by one of two ways, which depends on how many of its tokens a step has.
  int step_tokens() const override { return 0; }

  bool write_cache(size_t layer, const StepTensors& tensors) const override { return write(plan(), layer, tensors); }

  void update_kept(const Batch& batch) override { kept_plan_->update(batch, stream()); }

  bool write_kept(size_t layer, const StepTensors& tensors) const override { return write(*kept_plan_, layer, tensors); }

  void run(size_t layer, const StepTensors& tensors) const override {
    MlaInputs inputs = layers_[layer].inputs;
    inputs.q = tensors.in[0];
    const TensorView& out = tensors.out;
    plan().run(
        inputs,
        {.out = TensorView::contiguous(out.data, out.dtype, {out.size(0) / out_rows_, out_rows_, spec().v_dim}, out.device), .lse = {}},
        stream());
  }

  LayerWork work(const StepPlan& step) const override { return layer_work(spec(), step, plan()); }

  VerifyTarget target(size_t layer, int out_row) const override {
    return MlaTarget{.spec = &spec(), .parameters = &layers_[layer].parameters, .head = out_row};
  }

 private:
  struct Layer {
    MlaParameters parameters;
    MlaInputs inputs;                 // cache and parameters, where the device reads them
    std::vector<DeviceTensor> owned;  // parameters on the device
  };

  bool write(const MlaPlan& plan, size_t layer, const StepTensors& tensors) const {
    const TensorView row = tensors.in[1].select(1, 0);
    const int rank = spec().kv_lora_rank;
    const TensorView rope = spec().qk_rope_dim > 0 ? row.slice(1, rank, spec().latent_dim()) : TensorView{};
    plan.write_kv(layers_[layer].inputs.kv, row.slice(1, 0, rank), rope, stream());
    return true;
  }

  std::unique_ptr<MlaPlan> kept_plan_;  // with trees of drafts: for write_kept()
  std::vector<Layer> layers_;
  float fp8_scale_ = kFp8Scale;
};

}  // namespace

std::unique_ptr<LayerKind> make_kind(const MlaSpec&, const ModelSpec::Kind& kind, const KindSetup& setup) {
  return std::make_unique<MlaLayers>(kind, setup);
}

}  // namespace imbrex::serve

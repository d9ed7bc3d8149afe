// The replay of models with latent attention: every output is checked, prefixes are shared, and mistakes are noticed.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "serve/replay.h"
#include "serve/report.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

ModelSpec tiny_mla_model(const MlaSpec& spec, int layers) {
  ModelSpec model;
  model.name = model.family = "tiny mla";
  model.hidden_size = 64;
  for (int i = 0; i < layers; ++i) {
    ModelLayer& layer = model.layers.emplace_back();
    layer.name = "decoder." + std::to_string(i);
    layer.number = model.num_layers++;
    layer.spec = spec;
  }
  return model.with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16);
}

constexpr MlaSpec kTinyMla{.num_heads = 3, .kv_lora_rank = 64, .qk_nope_dim = 32, .qk_rope_dim = 16, .v_dim = 24};

TEST(MlaReplay, RunsATraceToItsEndAndChecksEveryOutput) {
  const Trace trace = tree_trace(10, 16, 90, 9, 1);
  MlaSpec other = kTinyMla;
  other.qk_rope_dim = 0;
  other.sinks = true;
  for (const auto& [spec, kv_dtype] : {std::pair{kTinyMla, DType::bf16}, {other, DType::fp8_e4m3}}) {
    ReplayOptions options = small_options();
    options.kv_dtype = kv_dtype;
    const ReplayResult r = replay(tiny_mla_model(spec, 2), trace, options);
    EXPECT_TRUE(r.complete);
    EXPECT_EQ(r.finished_requests, 10);
    EXPECT_EQ(r.verified_outputs, (r.prefill_tokens + r.decode_tokens) * 2);  // a head of each layer
    EXPECT_EQ(r.verified_values, (r.prefill_tokens + r.decode_tokens) * 2 * 24);
    EXPECT_LE(r.verify_max_ratio, 1);
    EXPECT_GT(r.prefix_hit_tokens, 0);
    ASSERT_EQ(r.kinds.size(), 1u);
    EXPECT_EQ(r.kinds[0].family, "mla");
    EXPECT_EQ(r.kv_format, "latent");
    EXPECT_GT(r.kinds[0].kv_write_s, 0);
    EXPECT_NE(report_text(r, {}).find("(same seed and steps, same bits: whatever the number of threads)"), std::string::npos);
  }
}

// A backend that uses the weights of heads in the wrong order.
struct WrongHeads final : BackendOf<MlaFamily> {
  struct WrongPlan final : MlaPlan {
    std::unique_ptr<MlaPlan> inner;
    void update(const Batch& batch, Stream stream) override { inner->update(batch, stream); }
    void write_kv(const KvCache& cache, const TensorView& latent, const TensorView& rope, Stream stream) const override {
      inner->write_kv(cache, latent, rope, stream);
    }
    void run(const MlaInputs& in, const MlaOutputs& out, Stream stream) const override {
      MlaInputs swapped = in;
      swapped.kv_b.data = in.kv_b.as<uint16_t>() + (in.kv_b.size(0) - 1) * in.kv_b.stride(0);
      swapped.kv_b.strides[0] = -in.kv_b.stride(0);
      inner->run(swapped, out, stream);
    }
    std::string str() const override { return inner->str(); }
  };
  std::string_view name() const override { return "wrong_heads"; }
  std::string_view description() const override { return "heads in the wrong order"; }
  std::vector<Reason> unsupported(const MlaSpec&, const DeviceInfo&) const override { return {}; }
  std::unique_ptr<MlaPlan> plan(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    auto made = std::make_unique<WrongPlan>();
    made->inner = find_backend<MlaFamily>("cpu_generic")->plan(spec, device, options);
    return made;
  }
};

TEST(MlaReplay, NoticesTheWeightOfAnotherHead) {
  register_backend<MlaFamily>(std::make_shared<WrongHeads>());
  const std::string code = test::error_code([] { replay(tiny_mla_model(kTinyMla, 1), tree_trace(3, 16, 20, 3, 1), small_options()); });
  unregister_backend<MlaFamily>("wrong_heads");
  EXPECT_EQ(code, "replay.verify");
}

TEST(MlaReplay, WeightsAreNeeded) {
  MlaSpec absorbed = kTinyMla;
  absorbed.absorbed = true;
  EXPECT_EQ(test::error_code([&] { replay(tiny_mla_model(absorbed, 1), tree_trace(1, 16, 20, 3, 1), small_options()); }),
            "replay.mla.absorbed");
}

}  // namespace
}  // namespace imbrex::serve

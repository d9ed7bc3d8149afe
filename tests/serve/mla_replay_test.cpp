// The replay of models with latent attention: every output is checked, prefixes are shared, and mistakes are noticed.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "serve/replay.h"
#include "serve/replay_account.h"
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

// A plan that computes nothing: it only says which requests it expands.
struct ToldWays final : MlaPlan {
  std::vector<bool> of;
  explicit ToldWays(std::vector<bool> ways) : of(std::move(ways)) {}
  void update(const Batch&, Stream) override {}
  void write_kv(const KvCache&, const TensorView&, const TensorView&, Stream) const override {}
  void run(const MlaInputs&, const MlaOutputs&, Stream) const override {}
  bool expands(int request) const override { return of[size_t(request)]; }
  std::string str() const override { return "told"; }
};

// Operations of a token at position p, and of those that a request has once, counted one by one.
TEST(MlaReplay, CountsOperationsOfTheWayThatEachRequestTakes) {
  StepPlan step;  // a prompt's tokens 3 to 8, and one of decode behind 20
  step.query_start_loc = {0, 6, 7};
  step.first_positions = {3, 20};
  step.seq_lens = {9, 21};
  const double heads = 3, latent_pair = 2 * (64 + 16 + 64), expanded_pair = 2 * (32 + 16 + 24), product = 2 * 64 * (32 + 24);
  for (const int window : {-1, 4}) {
    MlaSpec spec = kTinyMla;
    spec.mask.window_left = window;
    const auto seen = [&](int p) { return window < 0 ? p + 1 : std::min(p, window) + 1; };
    double prompt_pairs = 0;
    for (int p = 3; p < 9; ++p) prompt_pairs += seen(p);
    const double decode = heads * (seen(20) * latent_pair + product);
    const double prompt_keys = 9;  // the window of its first query reaches the first key
    for (const bool expand : {false, true}) {
      const double prompt =
          heads * (expand ? prompt_pairs * expanded_pair + prompt_keys * product : prompt_pairs * latent_pair + 6 * product);
      const LayerWork work = layer_work(spec, step, ToldWays({expand, false}));
      EXPECT_DOUBLE_EQ(work.flops, prompt + decode) << spec.str() << expand;
      EXPECT_DOUBLE_EQ(work.bytes, (9. + seen(20)) * 2 * (64 + 16));  // latents in bf16, whichever way
      EXPECT_DOUBLE_EQ(work.kv_written_bytes, 7. * 2 * (64 + 16));
    }
  }
}

// A prompt of 256 tokens is expanded and one of 2 is not, so that what a replay reports is more than the one and less than the other count.
TEST(MlaReplay, ReportsOperationsOfExpandedPrompts) {
  ReplayOptions options = small_options();
  options.max_num_batched_tokens = 512;
  options.verify_fraction = 0;
  for (const auto& [tokens, expands] : {std::pair(256., true), {2., false}}) {
    Trace trace;
    trace.format = "lengths";
    trace.requests.push_back({.input_length = int(tokens), .output_length = 1});
    const ReplayResult r = replay(tiny_mla_model(kTinyMla, 2), trace, options);
    ASSERT_EQ(r.kinds.size(), 1u);
    EXPECT_EQ(r.kinds[0].plan.find("with expanded keys") != std::string::npos, expands) << r.kinds[0].plan;
    const double pair = expands ? 32 + 16 + 24 : 64 + 16 + 64;
    EXPECT_DOUBLE_EQ(r.kinds[0].flops, 2 * 3 * 2 * (tokens * (tokens + 1) / 2 * pair + tokens * 64 * (32 + 24)));
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

// Trees are computed as chains.
struct ChainsForTrees final : BackendOf<MlaFamily> {
  struct ChainPlan final : MlaPlan {
    std::unique_ptr<MlaPlan> inner;
    void update(const Batch& batch, Stream stream) override {
      Batch chains = batch;
      chains.draft_parents = {};
      inner->update(chains, stream);
    }
    void write_kv(const KvCache& kv, const TensorView& latent, const TensorView& rope, Stream stream) const override {
      inner->write_kv(kv, latent, rope, stream);
    }
    void run(const MlaInputs& in, const MlaOutputs& out, Stream stream) const override { inner->run(in, out, stream); }
    std::string str() const override { return inner->str(); }
  };
  std::string_view name() const override { return "chains_for_trees"; }
  std::string_view description() const override { return "no trees"; }
  std::vector<Reason> unsupported(const MlaSpec&, const DeviceInfo&) const override { return {}; }
  std::unique_ptr<MlaPlan> plan(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    auto made = std::make_unique<ChainPlan>();
    made->inner = find_backend<MlaFamily>("cpu_generic")->plan(spec, device, options);
    return made;
  }
};

TEST(MlaReplay, NoticesTreesThatAreComputedAsChains) {
  ReplayOptions options = small_options();
  options.drafts = {.tokens = 4, .tree = true};
  const auto code = [&] { return test::error_code([&] { replay(tiny_mla_model(kTinyMla, 1), tree_trace(4, 16, 20, 12, 1), options); }); };
  EXPECT_EQ(code(), "nothing thrown");
  register_backend<MlaFamily>(std::make_shared<ChainsForTrees>());
  EXPECT_EQ(code(), "replay.verify");
  unregister_backend<MlaFamily>("chains_for_trees");
}

TEST(MlaReplay, WeightsAreNeeded) {
  MlaSpec absorbed = kTinyMla;
  absorbed.absorbed = true;
  EXPECT_EQ(test::error_code([&] { replay(tiny_mla_model(absorbed, 1), tree_trace(1, 16, 20, 3, 1), small_options()); }),
            "replay.mla.absorbed");
}

}  // namespace
}  // namespace imbrex::serve

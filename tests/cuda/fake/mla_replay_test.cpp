// The replay on a GPU of a model with latent attention: prompts by the plan of all steps, steps of decode from graphs. On the fake driver.
#include <gtest/gtest.h>

#include "cuda/fake/mla_texts.h"
#include "serve/replay.h"
#include "serve/tiny_model.h"

namespace imbrex::serve {
namespace {

namespace fake = cuda::fake;

ModelSpec tiny_mla() {
  const MlaSpec spec{.num_heads = 3, .kv_lora_rank = 64, .qk_nope_dim = 32, .qk_rope_dim = 16, .v_dim = 24};
  ModelSpec model;
  model.name = model.family = "tiny mla";
  model.hidden_size = 64;
  for (const char* name : {"decoder.0", "decoder.1"}) {
    ModelLayer& layer = model.layers.emplace_back();
    layer.name = name;
    layer.number = model.num_layers++;
    layer.spec = spec;
  }
  return model.with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16);
}

TEST(GpuMlaReplay, EveryOutputIsWithinItsBound) {
  if (!fake::has_mla_texts()) GTEST_SKIP() << "builds with sanitizers have no libraries of kernels for the host";
  const ModelSpec model = tiny_mla();
  fake::use_mla_texts(std::get<MlaSpec>(model.layers[0].spec));
  ReplayOptions options = small_options();
  options.device = "cuda:0";
  const ReplayResult r = replay(model, tree_trace(6, 16, 60, 12, 1), options);
  fake::forget_texts();
  EXPECT_TRUE(r.complete);
  EXPECT_GT(r.decode_steps.steps, 0);
  EXPECT_EQ(r.kinds[0].backend, "cuda_sm90");
  EXPECT_EQ(r.verified_outputs, (r.prefill_tokens + r.decode_tokens) * 2);
  EXPECT_LE(r.verify_max_ratio, 1);
}

// Verification of trees of drafts: from graphs, and the keys of kept paths are written once more behind them.
TEST(GpuMlaReplay, TreesOfDrafts) {
  if (!fake::has_mla_texts()) GTEST_SKIP() << "builds with sanitizers have no libraries of kernels for the host";
  const ModelSpec model = tiny_mla();
  MlaSpec spec = std::get<MlaSpec>(model.layers[0].spec);
  spec.mask.tree = true;
  fake::use_mla_texts(spec);
  ReplayOptions options = small_options();
  options.device = "cuda:0";
  options.drafts = {.tokens = 5, .tree = true};
  const ReplayResult r = replay(model, tree_trace(6, 16, 60, 20, 1), options);
  fake::forget_texts();
  EXPECT_TRUE(r.complete);
  EXPECT_GT(r.kept_drafts, 0);
  EXPECT_GT(r.decode_steps.steps, 0);
  EXPECT_GT(r.verified_outputs, (r.prefill_tokens + r.decode_tokens) * 2) << "of drafts that are not kept, too";
  EXPECT_LE(r.verify_max_ratio, 1);
}

}  // namespace
}  // namespace imbrex::serve

// Laws of requests that begin with the same blocks, in plans whose results may depend on that.
#include <gtest/gtest.h>

#include "matrix.h"

namespace imbrex::test {
namespace {

class PrefixLaws : public testing::TestWithParam<Target> {
 protected:
  // Runs a case in a balanced list of requests that share blocks. False: the backend does not run its layer.
  bool expect_within_bounds(Case& c) {
    c.out_dtype = c.spec.out_dtypes().front();
    RunOptions options;
    if (!runs(c, GetParam()) || !options_for(c, GetParam(), options)) return false;
    options.balanced = options.share_blocks = true, options.check_cache = false;
    const CaseInputs inputs = make_inputs(c);
    const Judgement judgement = judge(expect(inputs), run_case(*GetParam().backend, GetParam().device, inputs, options));
    EXPECT_TRUE(judgement.pass()) << c.spec.str() << ": " << judgement.failure;
    return true;
  }
};

// Balanced lists may read the keys that neighbours have in common in items of other tiles: of a prompt of all, of one that some of these go
// on with, and of requests that have little of their own.
TEST_P(PrefixLaws, BalancedListsAreWithinTheBounds) {
  int ran = 0;
  for (const int group : {1, 4, 6, 12, 16, 40}) {
    if (group != 4 && !GetParam().on_gpu()) continue;  // one kernel for all of them
    for (const bool plain : {true, false}) {
      Case c;
      c.name = "prefix", c.seed = uint64_t(group);
      c.spec = {.num_q_heads = 2 * group, .num_kv_heads = 2, .head_dim_qk = 128, .head_dim_v = 128, .block_size = 16};
      if (!plain) c.spec.kv_dtype = DType::fp8_e4m3, c.spec.score.sinks = true, c.spec.score.soft_cap = 30.f;
      c.requests = {{1, 2100, 0}, {1, 2110, 0}, {2, 2105, 0}, {1, 1900, 0}, {0, 0, 2}, {1, 2100, 0}, {1, 700, 1}, {1, 900, 1}, {1, 30, 3}};
      ran += expect_within_bounds(c);
    }
  }
  if (ran == 0) GTEST_SKIP() << "it runs none of these layers";
}

// Likewise of latents, whose tiles for this are those of prompts: of bf16 beside a scale of logits alone, which has another kernel than
// other logits and small pages, and of bytes.
TEST_P(PrefixLaws, BalancedListsOfLatentsAreWithinTheBounds) {
  struct Layer {
    int group, block_size;
    DType kv = DType::bf16;
    float soft_cap = 0;
    KvFormat format = KvFormat::latent;
  };
  int ran = 0;
  for (const Layer& layer : {Layer{16, 64},
                             {8, 16},
                             {32, 16},
                             {20, 8},
                             {64, 16},
                             {16, 1},
                             {12, 16, DType::bf16, 25.f},
                             {16, 64, DType::fp8_e4m3},
                             {8, 1, DType::fp8_e4m3},
                             {16, 64, DType::fp8_e4m3, 0.f, KvFormat::fp8_ds_mla}}) {
    if (ran > 0 && !GetParam().on_gpu()) break;
    Case c;
    c.name = "latent_prefix", c.seed = uint64_t(layer.group);
    c.spec = {.num_q_heads = layer.group,
              .num_kv_heads = 1,
              .head_dim_qk = 576,
              .head_dim_v = 512,
              .kv_dtype = layer.kv,
              .block_size = layer.block_size};
    c.spec.kv_format = layer.format, c.spec.score.soft_cap = layer.soft_cap, c.spec.score.sinks = layer.soft_cap > 0;
    c.requests = {{1, 2100, 0}, {1, 2110, 0}, {1, 2105, 0}, {1, 1900, 0}, {0, 0, 2},   {2, 2100, 0}, {1, 2090, 0},
                  {1, 2100, 0}, {1, 900, 1},  {1, 901, 1},  {1, 30, 3},   {41, 90, 4}, {1, 900, 1}};
    ran += expect_within_bounds(c);
  }
  if (ran == 0) GTEST_SKIP() << "it runs none of these layers";
}

// Drafts, chains and trees, of so few tokens that a tile has rows for several requests' tokens. Beside them requests of one token, and one
// of so many that it is in another list.
TEST_P(PrefixLaws, BalancedListsOfDraftsAreWithinTheBounds) {
  struct Layer {
    int group, dims, tokens;
    bool latent = false;
    TreePattern tree = TreePattern::none;
    DType kv = DType::bf16;
  };
  using enum TreePattern;
  int ran = 0;
  for (const Layer& layer : {Layer{4, 128, 8},
                             {16, 128, 3},
                             {16, 64, 2},
                             {8, 128, 6},
                             {5, 256, 5},
                             {4, 128, 7, false, none, DType::fp8_e4m3},
                             {4, 128, 8, false, random},
                             {8, 128, 6, false, binary},
                             {12, 64, 2, false, forest},
                             {16, 512, 2, true},
                             {8, 512, 4, true},
                             {16, 512, 2, true, random},
                             {8, 512, 3, true, binary}}) {
    if (ran > 0 && !GetParam().on_gpu()) break;
    Case c;
    c.name = "draft_prefix", c.seed = uint64_t(layer.group), c.tree = layer.tree;
    c.spec = {.num_q_heads = 2 * layer.group, .num_kv_heads = 2, .head_dim_qk = layer.dims, .head_dim_v = layer.dims, .kv_dtype = layer.kv};
    c.spec.block_size = 16, c.spec.mask.tree = layer.tree != none;
    if (layer.latent)
      c.spec.num_q_heads = layer.group, c.spec.num_kv_heads = 1, c.spec.head_dim_qk = 576, c.spec.kv_format = KvFormat::latent;
    const int q = layer.tokens, n = GetParam().on_gpu() ? 2600 : 400;
    c.requests = {{q, n, 0},  {q, n + 10, 0}, {2, n + 5, 0},   {q, n, 0},       {1, n - 10, 0},  {0, 0, 2},       {q, n + 40, 0}, {q, n, 0},
                  {1, 30, 3}, {90, 190, 4},   {q, n + 100, 1}, {q, n + 110, 1}, {q, n + 100, 1}, {1, n + 105, 1}, {q, n + 105, 1}};
    ran += expect_within_bounds(c);
  }
  if (ran == 0) GTEST_SKIP() << "it runs none of these layers";
}

INSTANTIATE_TEST_SUITE_P(All, PrefixLaws, testing::ValuesIn(targets()), [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace imbrex::test

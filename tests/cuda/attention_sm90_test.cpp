// What the kernels of prefill are asked for where they cannot run: nothing; and where they run, the one that stands in for them can take
// their items.
#include "cuda/attention/attention_sm90_fp8.h"
#include "cuda/attention/attention_sm90_latent.h"
#include "cuda/attention/attention_sm90_latent_decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "cuda/driver/tensor_map.h"
#include "cuda/plan/plan.h"
#include "imbrex/device.h"

namespace imbrex::cuda {
namespace {

constexpr const char* kArch = "sm_90a";

AttentionSpec spec_of(DType q, DType kv, int dim_qk, int dim_v, int group, int page) {
  return {.num_q_heads = 2 * group,
          .num_kv_heads = 2,
          .head_dim_qk = dim_qk,
          .head_dim_v = dim_v,
          .q_dtype = q,
          .kv_dtype = kv,
          .block_size = page};
}

// For all specs that the kernel with maps runs, items of its tiles are no larger than those of the kernel without maps, and begin where the
// tiles of that kernel do.
TEST(AttentionSm90, TheKernelWithoutMapsTakesTheSameItems) {
  int count = 0, bytes = 0;
  for (const DType q : {DType::bf16, DType::f16, DType::f32, DType::fp8_e4m3})
    for (const DType kv : {DType::bf16, DType::f16, DType::f32, DType::fp8_e4m3, DType::fp8_e5m2})
      for (int dim_qk = 8; dim_qk <= 576; dim_qk += 8)
        for (const int dim_v : {64, 96, 128, dim_qk})
          for (const int group : {1, 3, 4, 8, 64, 128}) {
            const AttentionSpec spec = spec_of(q, kv, dim_qk, dim_v, group, 128);
            const bool runs = attention_sm90_refusals(spec).empty() || attention_sm90_fp8_refusals(spec).empty();
            const auto kernel_of = [&](const AttentionKernels& kernels) { return kernels.kernel(kArch, spec, kPrefill); };
            const RegimeKernel mapped = kernel_of(kernels_sm90);
            ASSERT_EQ(mapped.maps != nullptr, runs) << spec.str();
            if (!runs) continue;
            ++(q == DType::fp8_e4m3 ? bytes : count);
            const RegimeKernel unmapped = kernel_of(*kernels_sm90.without_maps);
            EXPECT_GE(unmapped.tile.rows, mapped.tile.rows) << spec.str();
            EXPECT_EQ(mapped.tile.keys % unmapped.tile.keys, 0) << spec.str();
          }
  EXPECT_GT(count, 10);
  EXPECT_GT(bytes, 5);
}

TEST(AttentionSm90, Fp8QueriesHaveTheirPrefillForEveryOutput) {
  const AttentionSpec spec = spec_of(DType::fp8_e4m3, DType::fp8_e4m3, 128, 128, 4, 16);
  const std::vector<KernelKey> keys = plan_kernels(kernels_sm90, kArch, spec);
  const auto count = [&](const char* path) {
    return std::count_if(keys.begin(), keys.end(), [&](const KernelKey& k) { return k.path == path; });
  };
  EXPECT_EQ(count("attention_sm90_fp8.cu"), 3);
  EXPECT_EQ(count("attention_sm90_decode.cu"), 18);  // with and without maps; of decode, with and without shared items
  EXPECT_EQ(count("attention_sm80.cu"), 3);          // prefill without maps
  EXPECT_EQ(count("attention_sm90.cu"), 0);
}

// Pages need not divide a tile of 192 keys, nor the other way round: their common divisor is what is loaded at a time, or rows where that
// is too little.
TEST(AttentionSm90, Fp8PagesMayHaveAnySize) {
  for (const int page : {0, 1, 4, 8, 12, 16, 24, 64, 100, 128, 256, 544})
    EXPECT_TRUE(attention_sm90_fp8_refusals(spec_of(DType::fp8_e4m3, DType::fp8_e4m3, 128, 128, 4, page)).empty()) << page;
}

// `imbrex compile` ships what a plan may load: three regimes, those without maps, those that share items, the merge, with and without parts
// of shared prefixes, for two types of output; and the tables.
TEST(AttentionSm90, EveryKernelOfAPlanIsListed) {
  const AttentionSpec spec = spec_of(DType::bf16, DType::bf16, 128, 128, 4, 16);
  const std::vector<KernelKey> keys = plan_kernels(kernels_sm90, kArch, spec);
  const auto count = [&](const char* path) {
    return std::count_if(keys.begin(), keys.end(), [&](const KernelKey& k) { return k.path == path; });
  };
  EXPECT_EQ(count("attention_sm90.cu"), 2);
  EXPECT_EQ(count("attention_sm90_decode.cu"), 8);
  EXPECT_EQ(count("attention_sm90_verify.cu"), 4);
  EXPECT_EQ(count("attention_sm80.cu"), 2);
  EXPECT_EQ(count("merge.cu"), 4);
  EXPECT_EQ(count("plan_tables.cu") + count("plan_batch.cu"), 2);
  EXPECT_EQ(keys.size(), 22u);
  EXPECT_TRUE(plan_kernels(kernels_sm90, "sm_100a", spec).empty());
}

// Items that requests share have two tokens or more: tiles of 32 rows where 16 have too few. Requests are cut as in plans without them,
// since results must not depend on that.
TEST(AttentionSm90, TokensOfManyHeadsShareLargerTiles) {
  const DeviceInfo device = describe_device("h200");
  for (const int group : {1, 4, 8, 9, 12, 16, 17, 32})
    for (const DType kv : {DType::bf16, DType::fp8_e4m3})
      for (const int dim : {64, 128, 256}) {
        const AttentionSpec spec = spec_of(DType::bf16, kv, dim, dim, group, 16);
        PlanOptions options{.limits = {.max_num_reqs = 64, .max_num_tokens = 64}};
        const PlanOutline apart = outline(kernels_sm90, spec, device, options);
        options.limits.shared_prompts = true;
        const PlanOutline shared = outline(kernels_sm90, spec, device, options);
        EXPECT_FALSE(apart.may_share);
        EXPECT_EQ(shared.may_share, group <= 16) << spec.str();
        EXPECT_EQ(shared.regimes[kDecode].kernel.tile.rows, group > 16 ? apart.regimes[kDecode].kernel.tile.rows : group > 8 ? 32 : 16);
        for (const Regime regime : kRegimes) {
          const SchedulePolicy &a = apart.regimes[regime].policy, &b = shared.regimes[regime].policy;
          const auto cuts = [](const SchedulePolicy& p) {
            return std::tuple(p.tile_q, p.tile_kv, p.split_kv, p.split_kv_each, p.max_splits, p.max_split_rows, p.share_splits,
                              p.longest_kv, p.min_q, p.max_q);
          };
          EXPECT_EQ(cuts(a), cuts(b)) << spec.str();
        }
      }
}

// Prefixes are shared where a tile has rows of twice as many tokens as one of decode, and not where a token fills it; of latents in the
// tiles of long verify, of the list of verify. Other plans have the kernels that they always had.
TEST(AttentionSm90, PrefixesOfLatentsAreSharedWhereATileHasRowsOfSeveralTokens) {
  const DeviceInfo device = describe_device("h200");
  const auto outline_of = [&](const AttentionSpec& spec, bool balanced, bool shared) {
    PlanOptions options{
        .limits = {.max_num_reqs = 64, .max_num_tokens = 64, .max_seq_len = 9000, .max_query_len = 1, .shared_prompts = shared}};
    options.balanced = balanced;
    return outline(kernels_sm90, spec, device, options);
  };
  AttentionSpec spec = spec_of(DType::bf16, DType::bf16, 576, 512, 16, 64);
  spec.num_kv_heads = 1, spec.kv_format = KvFormat::latent;
  // Rows of the tile for shared items; 0: none are shared.
  const auto expect_rows = [&](DType kv, std::initializer_list<std::pair<int, int>> by_heads) {
    spec.kv_dtype = kv;
    for (const auto& [heads, rows] : by_heads) {
      spec.num_q_heads = heads;
      EXPECT_EQ(may_share_prefixes(kernels_sm90, kArch, spec), rows > 0) << spec.str();
      const PlanOutline shared = outline_of(spec, true, true);
      EXPECT_EQ(shared.shares_prefixes, rows > 0) << spec.str();
      const RegimeKernel own = kernels_sm90.kernel(kArch, spec, kVerify);
      for (const auto& [balanced, prompts] : {std::pair{false, true}, {true, false}, {false, false}})
        EXPECT_EQ(outline_of(spec, balanced, prompts).regimes[kVerify].kernel.tile.rows, own.tile.rows) << spec.str();
      if (rows == 0) continue;
      const PlanOutline::OfRegime& verify = shared.regimes[kVerify];
      EXPECT_EQ(verify.kernel_of, kLongVerify);
      EXPECT_EQ(verify.kernel.tile.rows, rows) << spec.str();
      EXPECT_EQ(verify.policy.tile_q, rows / heads) << spec.str();
      EXPECT_GE(verify.bounds.num_work, 4 * 64) << "though no request within the limits is of verify";
    }
  };
  expect_rows(DType::bf16, {{8, 64}, {16, 64}, {20, 64}, {32, 64}, {33, 0}, {64, 0}, {128, 0}});
  expect_rows(DType::fp8_e4m3, {{8, 32}, {16, 32}, {17, 0}, {32, 0}, {128, 0}});
  spec.num_q_heads = 16, spec.kv_dtype = DType::bf16;
  EXPECT_FALSE(may_share_prefixes(kernels_sm80, "sm_80", spec));
  spec.mask.window_left = 100;
  EXPECT_FALSE(may_share_prefixes(kernels_sm90, kArch, spec));
}

// Latents of many dims have kernels of their own, by the rows of a request; those of few dims have the kernels of other caches.
TEST(AttentionSm90, LatentsOfManyDimsHaveKernelsOfTheirOwn) {
  AttentionSpec spec = spec_of(DType::bf16, DType::bf16, 576, 512, 16, 64);
  spec.num_q_heads = 128, spec.num_kv_heads = 1, spec.kv_format = KvFormat::latent;
  const auto count = [&](const char* path) {
    const std::vector<KernelKey> keys = plan_kernels(kernels_sm90, kArch, spec);
    return std::count_if(keys.begin(), keys.end(), [&](const KernelKey& k) { return k.path == path; });
  };
  const auto expect_tiles = [&](std::initializer_list<int> rows) {
    for (const Regime regime : kRegimes) {
      const int expected = rows.begin()[regime];
      const RegimeKernel kernel = kernels_sm90.kernel(kArch, spec, regime);
      const bool pair = spec.num_q_heads <= 64;
      EXPECT_STREQ(kernel.entry, expected <= 32           ? "attention_sm90_latent_decode"
                                 : pair && expected <= 64 ? "attention_sm90_latent_pair"
                                                          : "attention_sm90_latent")
          << spec.str();
      EXPECT_EQ(kernel.cluster, expected > 32 ? 2u : 1u) << spec.str();
      EXPECT_EQ(kernel.tile.rows, expected) << spec.str();
    }
  };
  EXPECT_EQ(count("attention_sm90_latent.cu"), 4);         // with and without maps, for two types of output
  EXPECT_EQ(count("attention_sm90_latent_spread.cu"), 4);  // for few tasks and for the fewest
  const auto few_tasks = [&](size_t i) { return kernels_sm90.few_tasks.at(i)->kernel(kArch, spec, kDecode); };
  const auto expect_few_tasks = [&] {
    EXPECT_EQ(few_tasks(0).cluster, 2u);
    EXPECT_EQ(few_tasks(1).cluster, 4u);
    EXPECT_LT(few_tasks(1).most_tasks, few_tasks(0).most_tasks);
  };
  expect_few_tasks();
  EXPECT_EQ(count("attention_sm80.cu"), 0);
  expect_tiles({64, 64, 64, 64});
  const auto cluster = [&] { return kernels_sm90.kernel(kArch, spec, kDecode).cluster; };
  spec.num_q_heads = 192;  // rows of a token for three tasks: a cluster has two
  EXPECT_EQ(cluster(), 1u);
  spec.num_q_heads = 96;
  for (const int block_size : {1, 16}) {  // lanes copy keys of the first
    spec.block_size = block_size;
    EXPECT_EQ(cluster(), 2u);
    expect_few_tasks();
  }
  spec.num_q_heads = 16, spec.block_size = 64;
  const auto expect_no_few_tasks = [&] {
    for (const size_t i : {0, 1}) EXPECT_STREQ(few_tasks(i).entry, nullptr);
  };
  const auto expect_few_rows_and_tasks = [&] {
    expect_few_tasks();
    for (const size_t i : {0, 1}) EXPECT_STREQ(few_tasks(i).entry, "attention_sm90_latent_decode_spread");
  };
  expect_few_rows_and_tasks();
  spec.kv_dtype = DType::fp8_e4m3;  // whose tiles no thread blocks share
  expect_no_few_tasks();
  spec.kv_dtype = DType::bf16, spec.mask.window_left = 127;
  expect_no_few_tasks();
  spec.mask.window_left = -1, spec.num_q_heads = 64;
  EXPECT_STREQ(few_tasks(0).entry, nullptr);  // pairs of thread blocks take them
  EXPECT_EQ(few_tasks(1).cluster, 4u);
  spec.block_size = 1;
  expect_few_tasks();
  spec.num_q_heads = 32;
  expect_few_rows_and_tasks();
  spec.head_dim_qk = 320, spec.head_dim_v = 256;  // one form, of two thread blocks
  EXPECT_STREQ(few_tasks(0).entry, nullptr);
  EXPECT_EQ(few_tasks(1).cluster, 2u);
  spec.head_dim_qk = 576, spec.head_dim_v = 512;
  spec.num_q_heads = 16, spec.block_size = 64;
  expect_tiles({16, 32, 64, 128});
  spec.num_q_heads = 20;
  expect_tiles({32, 64, 64, 120});
  spec.mask.window_left = 127;  // which pairs of thread blocks do not take
  EXPECT_STREQ(kernels_sm90.kernel(kArch, spec, kPrefill).entry, "attention_sm90_latent");
  spec.mask.window_left = -1;
  spec.mask.custom = true;  // which no kernel for many rows takes
  expect_tiles({32, 32, 32, 32});
  spec.mask.custom = false, spec.num_q_heads = 128, spec.kv_dtype = DType::fp8_e4m3;
  expect_tiles({32, 32, 32, 32});
  spec.kv_format = KvFormat::fp8_ds_mla;
  expect_tiles({32, 32, 32, 32});
  EXPECT_TRUE(reads(kernels_sm90, spec));
  spec.kv_format = KvFormat::latent_rope;
  EXPECT_FALSE(reads(kernels_sm90, spec));
  spec.kv_format = KvFormat::latent, spec.kv_dtype = DType::bf16;
  for (const auto& [qk, v] : {std::pair{320, 256}, {256 + 16, 256}, {448, 384}, {512, 512}}) {
    spec.head_dim_qk = qk, spec.head_dim_v = v;
    EXPECT_TRUE(attention_sm90_latent_tiles(kArch, spec, kDecode)) << qk;
    EXPECT_GE(attention_sm90_latent_tiles(kArch, spec, kDecode)->stages, 5) << qk;
    EXPECT_EQ(few_tasks(0).cluster, v == 384 ? 3u : 2u) << qk;
    EXPECT_EQ(few_tasks(1).entry != nullptr, v == 512) << qk;
  }
  for (const auto& [qk, v] : {std::pair{128, 64}, {256, 256}, {576, 448}, {576, 384}, {328, 264}}) {
    spec.head_dim_qk = qk, spec.head_dim_v = v;
    EXPECT_FALSE(attention_sm90_latent_tiles(kArch, spec, kDecode)) << qk;
    EXPECT_FALSE(attention_sm90_latent_decode_tiles(kArch, spec, kDecode)) << qk;
  }
}

// A layer of trees has the kernels and tiles of the causal layer. Where distances count, these go by depth, as the kernel of few rows has
// them.
TEST(AttentionSm90, LatentsOfTreesHaveTheKernelsOfCausalOnes) {
  for (const KvFormat format : {KvFormat::latent, KvFormat::fp8_ds_mla})
    for (const DType kv : {DType::bf16, DType::fp8_e4m3})
      for (const int heads : {5, 16, 20, 64, 100, 128})
        for (const int window : {-1, 127}) {
          if (format == KvFormat::fp8_ds_mla && kv != DType::fp8_e4m3) continue;
          AttentionSpec spec = spec_of(DType::bf16, kv, 576, 512, 16, 64);
          spec.num_q_heads = heads, spec.num_kv_heads = 1, spec.kv_format = format, spec.mask.window_left = window;
          AttentionSpec tree = spec;
          tree.mask.tree = true;
          for (const Regime regime : kRegimes) {
            const RegimeKernel causal = kernels_sm90.kernel(kArch, spec, regime), of_tree = kernels_sm90.kernel(kArch, tree, regime);
            EXPECT_STREQ(of_tree.entry, causal.entry) << tree.str();
            EXPECT_EQ(of_tree.tile.rows, causal.tile.rows) << tree.str();
            for (const AttentionKernels* few : kernels_sm90.few_tasks)
              EXPECT_STREQ(few->kernel(kArch, tree, regime).entry, few->kernel(kArch, spec, regime).entry);
            tree.score.alibi = true;
            EXPECT_STREQ(kernels_sm90.kernel(kArch, tree, regime).entry, "attention_sm90_latent_decode");
            tree.score.alibi = false;
          }
        }
}

// Rows of small pages are copied 16 bytes at a time.
TEST(AttentionSm90, SmallPagesNeedAlignedRows) {
  for (const int page : {1, 4, 12, 100}) EXPECT_TRUE(has_small_pages(spec_of(DType::bf16, DType::bf16, 128, 128, 4, page))) << page;
  for (const int page : {0, 8, 24, 128}) EXPECT_FALSE(has_small_pages(spec_of(DType::bf16, DType::bf16, 128, 128, 4, page))) << page;
  alignas(16) char data[64];
  TensorView rows = TensorView::contiguous(data, DType::bf16, {9, 1, 2, 64});
  EXPECT_TRUE(has_aligned_rows(rows));
  rows.data = data + 8;
  EXPECT_FALSE(has_aligned_rows(rows));
  rows.data = data;
  for (int d = 0; d < 4; ++d) {
    TensorView odd = rows;
    odd.strides[d] += 1;
    EXPECT_FALSE(has_aligned_rows(odd)) << d;
  }
}

TEST(AttentionSm90, EveryReasonIsGiven) {
  AttentionSpec spec = spec_of(DType::f32, DType::bf16, 80, 64, 65, 20);
  spec.mask.custom = spec.mask.positions = true;
  spec.score.relative_buckets = 32;
  const auto codes = [](const std::vector<Reason>& reasons) {
    std::vector<std::string> all;
    for (const Reason& reason : reasons) all.push_back(reason.code);
    return all;
  };
  std::vector<std::string> all{"spec.q_dtype",     "spec.kv_dtype",       "spec.head_dim_qk",
                               "spec.num_q_heads", "spec.mask.positions", "spec.score.relative_buckets"};
  EXPECT_EQ(codes(attention_sm90_refusals(spec)), all);
  all.insert(all.begin() + 4, "spec.mask.custom");
  EXPECT_EQ(codes(attention_sm90_fp8_refusals(spec)), all);
}

}  // namespace
}  // namespace imbrex::cuda

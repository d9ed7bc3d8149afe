// KV groups, distinct specs, deployed variants and the printed summary.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "imbrex/kv_cache.h"
#include "imbrex/model.h"

namespace imbrex {
namespace {

TEST(Groups, FollowTheWindow) {
  const ModelSpec model = load_model("gpt-oss-20b");
  ASSERT_EQ(model.cache_groups.size(), 2u);
  EXPECT_EQ(model.cache_groups[0].name, "window 128");
  EXPECT_EQ(model.cache_groups[0].layers, (std::vector<int>{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22}));
  EXPECT_EQ(model.cache_groups[0].bytes_per_token, 24576);
  EXPECT_EQ(model.cache_groups[1].name, "full");
  EXPECT_EQ(model.layers[3].cache_group, 1);
}

TEST(Groups, ChunksAndCrossAttentionAreGroups) {
  const ModelSpec llama4 = load_model("llama-4-scout");
  ASSERT_EQ(llama4.cache_groups.size(), 2u);
  EXPECT_EQ(llama4.cache_groups[0].name, "chunk 8192");
  EXPECT_EQ(llama4.cache_groups[1].bytes_per_token, 49152);

  const ModelSpec whisper = load_model("whisper-tiny");
  ASSERT_EQ(whisper.cache_groups.size(), 2u);
  EXPECT_EQ(whisper.layers[0].cache_group, -1);
  EXPECT_EQ(whisper.layers[4].cache_group, 0);
  EXPECT_EQ(whisper.cache_groups[0].name, "full");
  EXPECT_EQ(whisper.layers[5].cache_group, 1);
  EXPECT_EQ(whisper.cache_groups[1].name, "cross");
  EXPECT_EQ(whisper.cache_groups[1].layers.size(), 4u);
}

TEST(Groups, EncodersHaveNone) {
  const ModelSpec model = load_model("bert-base");
  EXPECT_TRUE(model.cache_groups.empty());
  for (const ModelLayer& layer : model.layers) EXPECT_EQ(layer.cache_group, -1);
  EXPECT_EQ(model.layers[0].attention().block_size, 0);
}

TEST(Groups, OfOneWindowAndTwoShapesHaveTwoNames) {
  // No window at all, so that local and global layers differ only in shape.
  const ModelSpec model = parse_model_config(R"({"model_type": "gemma4", "text_config": {"sliding_window": -1}})");
  ASSERT_EQ(model.cache_groups.size(), 2u);
  EXPECT_EQ(model.cache_groups[0].name, "full kv4 d256");
  EXPECT_EQ(model.cache_groups[1].name, "full kv4 d512");
}

TEST(Kinds, AreTheDistinctSpecsInOrder) {
  const auto gemma = load_model("gemma-3-12b").kinds();
  ASSERT_EQ(gemma.size(), 2u);
  EXPECT_EQ(std::get<AttentionSpec>(gemma[0].spec).mask.window_left, 1023);
  EXPECT_EQ(gemma[0].layers.size(), 40u);
  EXPECT_EQ(gemma[1].layers, (std::vector<int>{5, 11, 17, 23, 29, 35, 41, 47}));
  const auto t5 = load_model("t5-small").kinds();
  ASSERT_EQ(t5.size(), 3u);
  EXPECT_EQ(std::get<AttentionSpec>(t5[2].spec).kind, AttentionKind::encoder_decoder);
  EXPECT_EQ(t5[2].layers, (std::vector<int>{7, 9, 11, 13, 15, 17}));
}

TEST(WithKv, SetsCachedLayersAndTheirBytes) {
  const ModelSpec model = load_model("llama-3.1-8b").with_kv(DType::bf16, DType::fp8_e4m3, KvFormat::strided, 64);
  EXPECT_EQ(model.layers[31].attention().kv_dtype, DType::fp8_e4m3);
  EXPECT_EQ(model.layers[31].attention().block_size, 64);
  EXPECT_EQ(model.cache_groups[0].bytes_per_token, 65536);
}

TEST(WithKv, LeavesLayersWithoutCacheAlone) {
  const ModelSpec model = load_model("whisper-tiny").with_kv(DType::f16, DType::fp8_e4m3, KvFormat::strided, 32);
  EXPECT_EQ(model.layers[0].attention().q_dtype, DType::f16);
  EXPECT_EQ(model.layers[0].attention().kv_dtype, DType::f16);
  EXPECT_EQ(model.layers[0].attention().block_size, 0);
  EXPECT_EQ(model.layers[5].attention().kv_dtype, DType::fp8_e4m3);
  EXPECT_EQ(model.layers[5].attention().block_size, 32);
}

TEST(WithKv, CountsThePaddingOfPackedFormats) {
  const ModelSpec model = load_model("phi-2").with_kv(DType::bf16, DType::bf16, KvFormat::amx_packed, 32);  // head dim 80
  const int64_t head_block = packed_block_bytes(32, 80, DType::bf16);
  EXPECT_EQ(model.cache_groups[0].bytes_per_token, 32 * 32 * 2 * head_block / 32);
  EXPECT_GT(model.cache_groups[0].bytes_per_token, 327680);
}

TEST(WithKv, RefusesWhatNoBackendCouldRun) {
  EXPECT_EQ(test::error_code([] { load_model("llama-2-7b").with_kv(DType::bf16, DType::bf16, KvFormat::amx_packed, 8); }),
            "spec.block_size.packed");
}

TEST(Str, IsAnAlignedSummary) {
  EXPECT_EQ(load_model("llama-3.1-8b").str(),
            "llama-3.1-8b (llama): 32 attention layers, hidden 4096, KV 131072 B/token\n"
            "    32 x decoder q32/kv8 d128 bf16 block16 causal\n"
            "  KV group full    32 layers    131072 B/token");
  EXPECT_EQ(load_model("whisper-tiny").with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16).str(),
            "whisper-tiny (whisper): 12 attention layers, hidden 384, KV 6144 B/token\n"
            "     4 x encoder q6/kv6 d64 bf16 ragged full\n"
            "     4 x decoder q6/kv6 d64 bf16 block16 causal\n"
            "     4 x encoder_decoder q6/kv6 d64 bf16 block16 full\n"
            "  KV group full      4 layers      6144 B/token\n"
            "  KV group cross     4 layers      6144 B/encoder token\n"
            "  note: the encoder, and so every cross attention, has 1500 tokens\n"
            "  note: the decoder has at most 448 tokens");
  const std::string text = load_model("falcon-rw-1b").str();
  EXPECT_NE(text.find("\n  note: Falcon scales the ALiBi bias"), std::string::npos) << text;
}

}  // namespace
}  // namespace imbrex

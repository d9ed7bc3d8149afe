// Models whose layers are of several families: how LFM2's config.json is read, and what its caches are.
#include <gtest/gtest.h>

#include "expect_error.h"
#include "imbrex/model.h"

namespace imbrex {
namespace {

std::string lfm2(std::string_view more, std::string_view type = "lfm2") {
  return R"({"torch_dtype": "bfloat16", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
             "conv_L_cache": 3, "model_type": ")" +
         std::string(type) + "\"" + (more.empty() ? "" : ", ") + std::string(more) + "}";
}

// "c" for a convolution, "a" for attention.
std::string pattern_of(const ModelSpec& model) {
  std::string text;
  for (const ModelLayer& layer : model.layers) text += std::holds_alternative<ShortConvSpec>(layer.spec) ? 'c' : 'a';
  return text;
}
std::string pattern_of(std::string_view more) { return pattern_of(parse_model_config(lfm2(more))); }

const ShortConvSpec& conv_of(const ModelSpec& model) { return std::get<ShortConvSpec>(model.layers[0].spec); }

std::string refusal_of(std::string_view more) {
  return test::error_code([&] { parse_model_config(lfm2(more)); });
}

bool is_noted(const ModelSpec& model, std::string_view text) {
  for (const std::string& note : model.notes)
    if (note.find(text) != std::string::npos) return true;
  return false;
}

TEST(Lfm2, LayersAreNamedOrListed) {
  EXPECT_EQ(pattern_of(R"("full_attn_idxs": [1, 3])"), "caca");
  EXPECT_EQ(pattern_of(R"("full_attn_idxs": [3, 1], "layer_types": null)"), "caca");
  EXPECT_EQ(pattern_of(R"("full_attn_idxs": [])"), "cccc");
  EXPECT_EQ(pattern_of(R"("layer_types": ["conv", "conv", "full_attention", "conv"])"), "ccac");
  EXPECT_EQ(pattern_of(R"("layer_types": ["conv", "conv", "full_attention", "conv"], "full_attn_idxs": [2])"), "ccac");
  const ModelSpec silent = parse_model_config(lfm2(""));
  EXPECT_EQ(pattern_of(silent), "aaaa");
  EXPECT_TRUE(is_noted(silent, "every layer attends, the class default"));
}

TEST(Lfm2, ConvolutionsAreAsWideAsTheModel) {
  const ModelSpec model = parse_model_config(lfm2(R"("full_attn_idxs": [1], "conv_bias": true, "conv_dim": 512)"));
  EXPECT_EQ(conv_of(model), (ShortConvSpec{.dim = 512, .width = 3, .bias = true, .dtype = DType::bf16}));
  EXPECT_EQ(model.layers[1].attention().head_dim_qk, 64);
  const ModelSpec absent = parse_model_config(R"({"model_type": "lfm2", "hidden_size": 64, "num_hidden_layers": 1,
      "num_attention_heads": 1, "num_key_value_heads": 1, "full_attn_idxs": [], "dtype": "float32"})");
  EXPECT_EQ(conv_of(absent), (ShortConvSpec{.dim = 64, .width = 3, .bias = false, .dtype = DType::f32}));
  EXPECT_TRUE(is_noted(absent, "conv_L_cache absent: the class default 3"));
}

TEST(Lfm2, MoeAndVisionModelsAreRead) {
  EXPECT_EQ(pattern_of(parse_model_config(lfm2(R"("layer_types": ["conv", "conv", "full_attention", "conv"])", "lfm2_moe"))), "ccac");
  const ModelSpec vision = parse_model_config(R"({"model_type": "lfm2_vl", "dtype": "bfloat16", "text_config": {"model_type": "lfm2",
      "num_hidden_layers": 2, "hidden_size": 2048, "layer_types": ["conv", "full_attention"]}})");
  EXPECT_EQ(pattern_of(vision), "ca");
  EXPECT_EQ(conv_of(vision).dim, 2048);
  EXPECT_EQ(vision.layers[1].attention().num_q_heads, 32) << "the class default";
  EXPECT_TRUE(is_noted(vision, "vision encoder are left out"));
  EXPECT_EQ(parse_model_config(R"({"model_type": "lfm2_vl", "text_config": {"full_attn_idxs": [2]}})").layers.size(), 32u);
}

TEST(Lfm2, WhatIsWrongIsRefused) {
  EXPECT_EQ(refusal_of(R"("layer_types": ["conv"])"), "model.field.layer_types.length");
  EXPECT_EQ(refusal_of(R"("layer_types": ["conv", "conv", "mamba", "conv"])"), "model.field.layer_types.unknown");
  EXPECT_EQ(refusal_of(R"("layer_types": ["conv", "conv", "sliding_attention", "conv"])"), "model.field.layer_types.unknown");
  EXPECT_EQ(refusal_of(R"("layer_types": "conv")"), "model.field.type");
  EXPECT_EQ(refusal_of(R"("full_attn_idxs": [4])"), "model.field.full_attn_idxs");
  EXPECT_EQ(refusal_of(R"("full_attn_idxs": [-1])"), "model.field.full_attn_idxs");
  EXPECT_EQ(refusal_of(R"("full_attn_idxs": [1, 1])"), "model.field.full_attn_idxs");
  EXPECT_EQ(refusal_of(R"("full_attn_idxs": [1.5])"), "model.field.integer");
  EXPECT_EQ(refusal_of(R"("full_attn_idxs": [1], "layer_types": ["conv", "conv", "full_attention", "conv"])"), "model.field.conflict");
  EXPECT_EQ(refusal_of(R"("full_attn_idxs": [1], "conv_dim": 256)"), "model.field.conflict");
  EXPECT_EQ(refusal_of(R"("full_attn_idxs": [1], "conv_bias": 1)"), "model.field.type");
  const auto width = [](const char* value) {
    return test::error_code([&] {
      parse_model_config(std::string(R"({"model_type": "lfm2", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
          "num_key_value_heads": 1, "full_attn_idxs": [], "conv_L_cache": )") +
                         value + "}");
    });
  };
  EXPECT_EQ(width("8"), "nothing thrown");
  for (const char* wrong : {"1", "0", "-3", "9", "9223372036854775807"}) EXPECT_EQ(width(wrong), "model.field.conv_width") << wrong;
  EXPECT_EQ(width("3.5"), "model.field.integer");
  EXPECT_EQ(width("\"3\""), "model.field.type");
}

TEST(Hybrid, StatesAreAGroupOfTheirOwn) {
  const ModelSpec model = load_model("lfm2-1.2b");
  ASSERT_EQ(model.cache_groups.size(), 2u);
  const CacheGroup &states = model.cache_groups[0], &pages = model.cache_groups[1];
  EXPECT_EQ(states.name, "short_conv");
  EXPECT_TRUE(states.holds_states());
  EXPECT_EQ(states.layers, (std::vector<int>{0, 1, 3, 4, 6, 7, 9, 11, 13, 15}));
  EXPECT_EQ(states.bytes_per_slot, 10 * 2 * 2048 * 2);
  EXPECT_EQ(states.bytes_per_token, 0);
  EXPECT_EQ(pages.name, "full");
  EXPECT_FALSE(pages.holds_states());
  EXPECT_EQ(pages.bytes_per_token, 6 * 8 * (64 + 64) * 2);
  EXPECT_EQ(pages.bytes_per_slot, 0);
  EXPECT_EQ(model.layers[0].cache_group, 0);
  EXPECT_EQ(model.layers[2].cache_group, 1);
  EXPECT_EQ(model.str(),
            "lfm2-1.2b (lfm2): 16 layers (10 short_conv, 6 attention), hidden 2048, KV 12288 B/token, states 81920 B/request\n"
            "    10 x short_conv d2048 w3 bf16\n"
            "     6 x decoder q32/kv8 d64 bf16 block16 causal\n"
            "  state group short_conv    10 layers     81920 B/request\n"
            "  KV group full           6 layers     12288 B/token");
}

TEST(Hybrid, KindsAreOfEitherFamily) {
  const auto kinds = load_model("lfm2-350m").kinds();
  ASSERT_EQ(kinds.size(), 2u);
  EXPECT_EQ(family_name(kinds[0].spec), "short_conv");
  EXPECT_EQ(to_string(kinds[0].spec), "short_conv d1024 w3 bf16");
  EXPECT_EQ(family_name(kinds[1].spec), "attention");
  EXPECT_EQ(kinds[1].layers, (std::vector<int>{2, 5, 8, 10, 12, 14}));
}

TEST(Hybrid, StatesFollowTheActivations) {
  const ModelSpec half = load_model("lfm2-350m").with_kv(DType::f16, DType::fp8_e4m3, KvFormat::strided, 64);
  EXPECT_EQ(conv_of(half).dtype, DType::f16);
  EXPECT_EQ(half.layers[2].attention().kv_dtype, DType::fp8_e4m3);
  const ModelSpec bytes = load_model("lfm2-350m").with_kv(DType::fp8_e4m3, DType::fp8_e4m3, KvFormat::strided, 64);
  EXPECT_EQ(conv_of(bytes).dtype, DType::bf16) << "queries are bytes, activations are not";
  EXPECT_EQ(bytes.layers[2].attention().q_dtype, DType::fp8_e4m3);
}

// Slots of a state are of one size in a group: layers that differ in nothing but their bias share one, others do not.
TEST(Hybrid, OnlyStatesOfOneShapeAreAGroup) {
  ModelSpec model = load_model("lfm2-350m");
  std::get<ShortConvSpec>(model.layers[0].spec).bias = true;
  std::get<ShortConvSpec>(model.layers[1].spec).width = 4;
  model = model.with_kv(DType::bf16, DType::bf16, KvFormat::strided, 16);
  ASSERT_EQ(model.cache_groups.size(), 3u);
  EXPECT_EQ(model.cache_groups[0].name, "short_conv d1024 rows2");
  EXPECT_EQ(model.cache_groups[0].layers.size(), 9u);
  EXPECT_EQ(model.cache_groups[1].name, "short_conv d1024 rows3");
  EXPECT_EQ(model.cache_groups[1].bytes_per_slot, 3 * 1024 * 2);
  EXPECT_EQ(model.kinds().size(), 4u);
}

}  // namespace
}  // namespace imbrex

// Models with latent attention: how their config.json is read.
#include <gtest/gtest.h>

#include <cmath>

#include "expect_error.h"
#include "imbrex/model.h"

namespace imbrex {
namespace {

std::string mla_config(std::string_view more, std::string_view type = "deepseek_v3") {
  return R"({"torch_dtype": "bfloat16", "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "head_dim": 64,
             "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "model_type": ")" +
         std::string(type) + "\"" + (more.empty() ? "" : ", ") + std::string(more) + "}";
}

MlaSpec first_of(std::string_view more, std::string_view type = "deepseek_v3") {
  return std::get<MlaSpec>(parse_model_config(mla_config(more, type)).layers[0].spec);
}

std::string refusal(std::string_view more, std::string_view type = "deepseek_v3") {
  return test::error_code([&] { parse_model_config(mla_config(more, type)); });
}

TEST(MlaFamilies, DimensionsAreTheirOwn) {
  const MlaSpec spec = first_of(R"("v_head_dim": 48, "q_lora_rank": null, "num_key_value_heads": 8)");
  EXPECT_EQ(spec, (MlaSpec{.num_heads = 8, .kv_lora_rank = 256, .qk_nope_dim = 64, .qk_rope_dim = 32, .v_dim = 48}));
  EXPECT_EQ(first_of("").v_dim, 128) << "the class default";
  EXPECT_EQ(first_of("", "glm4_moe_lite").v_dim, 256);
  EXPECT_EQ(first_of("", "minicpm3").v_dim, 64) << "hidden / heads";
  EXPECT_EQ(parse_model_config(mla_config("", "kimi_k2")).layers.size(), 3u);
}

TEST(MlaFamilies, EachLongcatLayerHasTwo) {
  const ModelSpec model = parse_model_config(mla_config(R"("num_layers": 5, "v_head_dim": 64)", "longcat_flash"));
  ASSERT_EQ(model.layers.size(), 10u);
  EXPECT_EQ(model.layers[3].name, "decoder.1.1");
  EXPECT_EQ(model.cache_groups.size(), 1u);
  EXPECT_EQ(model.cache_groups[0].bytes_per_token, 10 * 288 * 2);
}

// A query that its mask shows no more keys than the indexer picks attends to all of them: then the dense model is the model.
TEST(MlaFamilies, IndexersAreLeftOutAndSaidToBe) {
  for (const char* type : {"deepseek_v32", "glm_moe_dsa"}) {
    const ModelSpec model = parse_model_config(mla_config(R"("v_head_dim": 64, "index_topk": 512)", type));
    EXPECT_EQ(model.layers.size(), 3u);
    EXPECT_EQ(std::get<MlaSpec>(model.layers[2].spec), first_of(R"("v_head_dim": 64)")) << type;
    EXPECT_NE(model.str().find("index_topk 512: the indexer is not run"), std::string::npos) << model.str();
    EXPECT_NE(parse_model_config(mla_config("", type)).str().find("index_topk 2048"), std::string::npos) << "the class default";
  }
  EXPECT_NE(parse_model_config(mla_config(R"("index_topk": 64)")).str().find("index_topk 64"), std::string::npos);
  EXPECT_EQ(refusal(R"("index_topk": 0)", "glm_moe_dsa"), "model.field.zero");
}

std::string kimi(std::string_view more) {
  return mla_config(R"("v_head_dim": 64, "mla_use_nope": true, )" + std::string(more), "kimi_linear");
}

// "m" for latent attention, "r" for a recurrent layer.
std::string mla_pattern(const ModelSpec& model) {
  std::string text;
  for (const ModelLayer& layer : model.layers)
    text += std::holds_alternative<MlaSpec>(layer.spec) ? 'm' : std::holds_alternative<RecurrentSpec>(layer.spec) ? 'r' : '?';
  return text;
}

TEST(MlaFamilies, KimiLinearHasKdaAmongLatentAttention) {
  const char* attends_all[] = {R"("linear_attn_config": {"full_attn_layers": [1, 2, 3]})",
                               R"("linear_attn_config": {"full_attn_layers": [3, 1, 2], "kda_layers": []})",
                               R"("linear_attn_config": {"kda_layers": []})",
                               R"("layer_types": ["full_attention", "full_attention", "full_attention"])"};
  for (const char* more : attends_all) {
    const ModelSpec model = parse_model_config(kimi(more));
    EXPECT_EQ(mla_pattern(model), "mmm") << more;
    EXPECT_EQ(std::get<MlaSpec>(model.layers[0].spec), first_of(R"("v_head_dim": 64)")) << "elements without a rotation stay in the keys";
  }
  for (const char* more : {R"("linear_attn_config": {"full_attn_layers": [2]})", R"("linear_attn_config": {"kda_layers": [1, 3]})",
                           R"("linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2]})",
                           R"("layer_types": ["linear_attention", "full_attention", "linear_attention"])"}) {
    const ModelSpec model = parse_model_config(kimi(more));
    EXPECT_EQ(mla_pattern(model), "rmr") << more;
    EXPECT_EQ(to_string(model.layers[0].spec),
              "recurrent q32 v32 k128 v128 softplus channel_gate delta sigmoid_beta qk_norm out_sigmoid norm_before_gate norm_eps=1e-05 "
              "conv_qkv bf16 state f32 v_first")
        << "the class defaults";
  }
  const ModelSpec named = parse_model_config(
      kimi(R"("linear_attn_config": {"kda_layers": [1, 3], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 3})"));
  EXPECT_EQ(std::get<RecurrentSpec>(named.layers[0].spec).num_v_heads, 4);
  EXPECT_EQ(std::get<RecurrentSpec>(named.layers[0].spec).head_dim_k, 16) << "not the head_dim outside";
  EXPECT_EQ(std::get<RecurrentSpec>(named.layers[0].spec).conv_width, 3);
  EXPECT_EQ(test::error_code([] { parse_model_config(kimi(R"("linear_attn_config": {"kda_layers": [1], "short_conv_kernel_size": 9})")); }),
            "model.field.conv_width");
  const auto code = [](std::string_view more) { return test::error_code([&] { parse_model_config(kimi(more)); }); };
  EXPECT_EQ(code(R"("linear_attn_config": {"full_attn_layers": [0]})"), "model.field.linear_attn_config") << "layers count from 1";
  EXPECT_EQ(code(R"("linear_attn_config": {"full_attn_layers": [1, 1]})"), "model.field.linear_attn_config");
  EXPECT_EQ(code(R"("linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1, 2, 3]})"), "model.field.linear_attn_config");
  EXPECT_EQ(code(R"("linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]})"), "model.field.linear_attn_config");
  EXPECT_EQ(code(R"("layer_types": ["full_attention"])"), "model.field.layer_types.length");
  EXPECT_EQ(code(R"("layer_types": ["full_attention", "full_attention", "mamba"])"), "model.field.layer_types.unknown");
  EXPECT_EQ(code(R"("linear_attn_config": {})"), "model.field.missing");
}

TEST(MlaFamilies, KeysMayHaveNoRotatedPart) {
  const ModelSpec model = parse_model_config(R"({"model_type": "deepseek_v3", "hidden_size": 512, "num_hidden_layers": 1,
      "num_attention_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "q_lora_rank": null})");
  EXPECT_EQ(std::get<MlaSpec>(model.layers[0].spec),
            (MlaSpec{.num_heads = 4, .kv_lora_rank = 512, .qk_nope_dim = 256, .qk_rope_dim = 0, .v_dim = 256}));
}

// The language models inside others, whose configs lack what is the default of their class.
TEST(MlaFamilies, NestedConfigs) {
  const auto first = [](const std::string& config) { return std::get<MlaSpec>(parse_model_config(config).layers[0].spec); };
  const MlaSpec kimi_k25 = first(R"({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "num_attention_heads": 64}})");
  EXPECT_EQ(kimi_k25, (MlaSpec{.num_heads = 64}));
  EXPECT_EQ(first(R"({"model_type": "kimi_vl", "text_config": {"num_attention_heads": 16}})"), (MlaSpec{.num_heads = 16}));
  const ModelSpec kimi_k3 = parse_model_config(R"({"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear",
      "num_hidden_layers": 4, "num_attention_heads": 96, "mla_use_output_gate": true, "linear_attn_config": {"kda_layers": [1, 2, 4],
      "full_attn_layers": [3], "num_heads": 96, "head_dim": 128, "gate_lower_bound": -5}}})");
  EXPECT_EQ(mla_pattern(kimi_k3), "rrmr");
  EXPECT_EQ(std::get<MlaSpec>(kimi_k3.layers[2].spec).num_heads, 96);
  EXPECT_EQ(to_string(kimi_k3.layers[1].spec),
            "recurrent q96 v96 k128 v128 sigmoid channel_gate gate_min=-5 delta sigmoid_beta qk_norm out_sigmoid norm_before_gate "
            "norm_eps=1e-05 conv_qkv bf16 state f32 v_first");
}

TEST(MlaFamilies, BailingHybridsHaveKdaOrLightningAttention) {
  const auto config = [](const std::string& more) {
    return parse_model_config(mla_config(R"("v_head_dim": 64, "layer_group_size": 3)" + more, "bailing_hybrid"));
  };
  const ModelSpec kda = config(R"(, "short_conv_kernel_size": 4, "kda_lower_bound": -4)");
  EXPECT_EQ(mla_pattern(kda), "rrm");
  EXPECT_EQ(std::get<RecurrentSpec>(kda.layers[0].spec).conv_width, 4);
  EXPECT_EQ(std::get<RecurrentSpec>(kda.layers[0].spec).norm_eps, 1e-6f);
  const auto& bounded = std::get<RecurrentSpec>(kda.layers[1].spec);
  EXPECT_EQ(bounded.gate, RecurrentGate::sigmoid);
  EXPECT_EQ(bounded.gate_min, -4.f);
  EXPECT_EQ(bounded.num_v_heads, 8);
  EXPECT_EQ(bounded.head_dim_v, 64);
  EXPECT_EQ(std::get<RecurrentSpec>(config(R"(, "kda_safe_gate": false)").layers[1].spec).gate, RecurrentGate::softplus);
  const ModelSpec lightning = config("");
  EXPECT_EQ(mla_pattern(lightning), "rrm");
  EXPECT_EQ(to_string(lightning.layers[0].spec),
            "recurrent q8 v8 k64 v64 fixed out_sigmoid norm_before_gate norm_groups=1 bf16 state f32 v_first");
  EXPECT_EQ(test::error_code([&] { config(R"(, "kda_lower_bound": 1)"); }), "model.field.range");
}

// YaRN multiplies the logits by the square of 1 + 0.1 mscale_all_dim ln(factor).
TEST(MlaFamilies, YarnScalesTheLogits) {
  const double usual = 1 / std::sqrt(96.);
  const auto scale = [](std::string_view rope) { return double(first_of(rope).logit_scale()); };
  EXPECT_EQ(first_of("").scale, 0.f);
  EXPECT_EQ(first_of(R"("rope_scaling": null)").scale, 0.f);
  EXPECT_EQ(first_of(R"("rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0})").scale, 0.f) << "mscale alone is of the rotation";
  EXPECT_EQ(first_of(R"("rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 0})").scale, 0.f);
  EXPECT_EQ(first_of(R"("rope_parameters": {"rope_type": "default", "factor": 40, "mscale_all_dim": 1})").scale, 0.f);
  EXPECT_EQ(first_of(R"("rope_scaling": {"type": "yarn", "factor": 1, "mscale_all_dim": 1})").scale, 0.f);
  const double m = 1 + 0.1 * 0.707 * std::log(40.);
  EXPECT_NEAR(scale(R"("rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707})"), usual * m * m, 1e-6);
  EXPECT_NEAR(scale(R"("rope_parameters": {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.707})"), usual * m * m, 1e-6);
}

TEST(MlaFamilies, WhatIsWrongIsRefused) {
  EXPECT_EQ(refusal(R"("v_head_dim": 60)"), "model.field.head_dim.multiple");
  EXPECT_EQ(refusal(R"("v_head_dim": 1024)"), "model.field.large");
  EXPECT_EQ(refusal(R"("qk_head_dim": 128)"), "model.field.conflict");
  EXPECT_EQ(refusal(R"("num_layers": 2, "index_topk": 2048)", "longcat_flash"), "model.family.later");
  EXPECT_EQ(refusal(R"("num_layers": 2, "attention_method": "LSA")", "longcat_flash"), "model.family.later");
  EXPECT_EQ(refusal("", "longcat_flash"), "model.field.missing");
  EXPECT_EQ(refusal("", "llama"), "model.family.later") << "a family that is not read as one of latent attention";
  EXPECT_EQ(test::error_code([] {
              parse_model_config(R"({"model_type": "deepseek_v3", "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8,
                                     "kv_lora_rank": 544, "qk_rope_head_dim": 64})");
            }),
            "model.field.kv_lora_rank.large");
  EXPECT_EQ(test::error_code([] { parse_model_config(R"({"model_type": "deepseek_v3", "hidden_size": 512, "num_attention_heads": 8})"); }),
            "model.field.missing");
}

}  // namespace
}  // namespace imbrex

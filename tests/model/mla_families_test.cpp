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
  EXPECT_EQ(refusal(R"("index_topk": 2048)"), "model.family.later");
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

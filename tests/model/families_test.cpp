// The traps in reading config.json files, one test each: fields that mean something else than they seem to.
#include <gtest/gtest.h>

#include <cmath>

#include "expect_error.h"
#include "imbrex/model.h"

namespace imbrex {
namespace {

std::string plain(std::string_view type, std::string_view more) {
  return R"({"torch_dtype": "bfloat16", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 2, "model_type": ")" +
         std::string(type) + "\"" + (more.empty() ? "" : ", ") + std::string(more) + "}";
}

// Windows as the config gives them, 0 for full layers: "0 128 0 128".
std::string windows(const ModelSpec& model) {
  std::string text;
  for (const ModelLayer& layer : model.layers) text += (text.empty() ? "" : " ") + std::to_string(layer.attention().mask.window_left + 1);
  return text;
}

std::string windows(std::string_view type, std::string_view more) { return windows(parse_model_config(plain(type, more))); }

bool has_note(const ModelSpec& model, std::string_view text) {
  for (const std::string& note : model.notes)
    if (note.find(text) != std::string::npos) return true;
  return false;
}

std::string code_of(std::string_view config) {
  return test::error_code([&] { parse_model_config(config); });
}

TEST(Families, HeadDimIsNotAlwaysHiddenByHeads) {
  EXPECT_EQ(parse_model_config(plain("llama", "")).layers[0].attention().head_dim_qk, 64);
  EXPECT_EQ(parse_model_config(plain("llama", R"("head_dim": null)")).layers[0].attention().head_dim_qk, 64);
  EXPECT_EQ(parse_model_config(plain("mistral", R"("head_dim": 128)")).layers[0].attention().head_dim_qk, 128);
  const ModelSpec qwen3 = parse_model_config(plain("qwen3", ""));
  EXPECT_EQ(qwen3.layers[0].attention().head_dim_qk, 128);
  EXPECT_TRUE(has_note(qwen3, "head_dim absent: the class default 128"));
}

TEST(Families, KvHeadsNullMeansOneForEveryQueryHead) {
  const auto kv_heads = [](std::string_view type, std::string_view field) {
    return parse_model_config(R"({"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "model_type": ")" +
                              std::string(type) + "\"" + std::string(field) + "}")
        .layers[0]
        .attention()
        .num_kv_heads;
  };
  EXPECT_EQ(kv_heads("llama", ""), 8);  // Llama 1 has no such field
  EXPECT_EQ(kv_heads("mistral", R"(, "num_key_value_heads": null)"), 8);
  EXPECT_EQ(test::error_code([&] { kv_heads("mistral", ""); }), "model.field.missing");  // the class default is not the heads
}

TEST(Families, WindowCountsTheQueryItself) {
  const ModelSpec model = parse_model_config(plain("mistral", R"("sliding_window": 128)"));
  EXPECT_EQ(model.layers[0].attention().mask.window_left, 127);
  EXPECT_TRUE(model.layers[0].attention().mask.causal);
  EXPECT_EQ(model.cache_groups[0].name, "window 128");
}

TEST(Families, WindowIsOffWhenNullOrNotPositive) {
  EXPECT_EQ(windows("mistral", R"("sliding_window": null)"), "0 0 0 0");
  EXPECT_EQ(windows("mistral", ""), "0 0 0 0");
  EXPECT_EQ(windows("mistral", R"("sliding_window": -1)"), "0 0 0 0");
  EXPECT_EQ(windows("mistral", R"("sliding_window": 0)"), "0 0 0 0");
  EXPECT_TRUE(has_note(parse_model_config(plain("mistral", R"("sliding_window": -1)")), "sliding_window -1 means no window"));
}

TEST(Families, WindowOfTheWholeContextIsNone) {
  EXPECT_EQ(windows("phi3", R"("sliding_window": 4096, "max_position_embeddings": 4096)"), "0 0 0 0");
  EXPECT_EQ(windows("phi3", R"("sliding_window": 2047, "max_position_embeddings": 4096)"), "2047 2047 2047 2047");
}

TEST(Families, LlamaIgnoresSlidingWindow) {
  const ModelSpec model = parse_model_config(plain("llama", R"("sliding_window": 128)"));
  EXPECT_EQ(windows(model), "0 0 0 0");
  EXPECT_TRUE(has_note(model, "sliding_window 128 is ignored"));
}

TEST(Families, QwenWindowNeedsTheSwitch) {
  const ModelSpec off = parse_model_config(plain("qwen2", R"("sliding_window": 128, "use_sliding_window": false)"));
  EXPECT_EQ(windows(off), "0 0 0 0");
  EXPECT_TRUE(has_note(off, "sliding_window 128 present but use_sliding_window is false"));
  EXPECT_EQ(windows("qwen2", R"("sliding_window": 128)"), "0 0 0 0");
  EXPECT_EQ(windows("qwen2", R"("sliding_window": 128, "use_sliding_window": true, "max_window_layers": 3)"), "0 0 0 128");
  EXPECT_EQ(windows("qwen3", R"("sliding_window": 128, "use_sliding_window": true, "max_window_layers": 1)"), "0 128 128 128");
  EXPECT_EQ(windows("qwen2", R"("sliding_window": 128, "use_sliding_window": true)"), "0 0 0 0");  // the class default is 28
  EXPECT_EQ(windows("qwen2_moe", R"("sliding_window": 128, "use_sliding_window": true, "max_window_layers": 3)"), "128 0 128 0");
  EXPECT_EQ(windows("qwen3_moe", R"("sliding_window": 128, "use_sliding_window": true)"), "128 128 128 128");
}

TEST(Families, LayerTypesComeBeforeEveryRule) {
  const std::string types = R"("sliding_window": 128, "layer_types": ["full_attention", "sliding_attention", "sliding_attention",
                               "full_attention"])";
  EXPECT_EQ(windows("gpt_oss", types), "0 128 128 0");
  EXPECT_EQ(windows("gemma2", types), "0 128 128 0");
  EXPECT_EQ(windows("qwen2", R"("use_sliding_window": true, )" + types), "0 128 128 0");
  EXPECT_EQ(windows("ministral", types), "0 128 128 0");
}

TEST(Families, AlternationStartsWithAWindow) {
  EXPECT_EQ(windows("gpt_oss", R"("sliding_window": 128)"), "128 0 128 0");
  EXPECT_EQ(windows("gemma2", R"("sliding_window": 4096)"), "4096 0 4096 0");
}

TEST(Families, GptOssHasSinksWithoutAField) {
  EXPECT_TRUE(parse_model_config(plain("gpt_oss", "")).layers[0].attention().score.sinks);
  EXPECT_FALSE(parse_model_config(plain("llama", "")).layers[0].attention().score.sinks);
}

TEST(Families, SoftCapIsTheOneOfAttention) {
  const auto cap = [](std::string_view type, std::string_view more) {
    return parse_model_config(plain(type, more)).layers[0].attention().score.soft_cap;
  };
  EXPECT_EQ(cap("gemma2", R"("attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0)"), 20.f);
  EXPECT_EQ(cap("gemma2", R"("final_logit_softcapping": 30.0)"), 50.f);  // the class default
  EXPECT_EQ(cap("gemma2", R"("attn_logit_softcapping": null)"), 0.f);
  EXPECT_EQ(cap("gemma3_text", R"("final_logit_softcapping": 30.0)"), 0.f);
}

TEST(Families, GemmaScaleIsTheScalarNotTheHeadDim) {
  const ModelSpec model = parse_model_config(plain("gemma2", R"("head_dim": 128, "query_pre_attn_scalar": 144)"));
  EXPECT_FLOAT_EQ(model.layers[0].attention().scale(), 1.f / 12.f);
  EXPECT_FLOAT_EQ(load_model("gemma-3-27b").layers[0].attention().scale(), float(1.0 / std::sqrt(168.0)));
}

TEST(Families, Gemma3PatternCountsFromTheFirstLayer) {
  EXPECT_EQ(windows("gemma3_text", R"("sliding_window": 512, "sliding_window_pattern": 2)"), "512 0 512 0");
  EXPECT_EQ(windows("gemma3_text", R"("sliding_window": 512, "_sliding_window_pattern": 4)"), "512 512 512 0");
  EXPECT_EQ(windows("gemma3_text", R"("sliding_window": 512)"), "512 512 512 512");  // the default is 6
}

TEST(Families, NestedConfigsLeaveOutClassDefaults) {
  const ModelSpec model = load_model("gemma-3-4b");
  EXPECT_EQ(model.layers[0].attention().num_q_heads, 8);
  EXPECT_TRUE(has_note(model, "text_config.num_attention_heads absent: the class default 8"));
  EXPECT_EQ(model.family, "gemma3");
  // At the top level all fields are written, so an absent one is an error.
  EXPECT_EQ(code_of(R"({"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34})"), "model.field.missing");
}

TEST(Families, Llama4ChunksAreNotWindows) {
  const auto chunks = [](std::string_view more) {
    std::string text;
    const ModelSpec model =
        parse_model_config(R"({"model_type": "llama4", "text_config": {"num_hidden_layers": 4)" + std::string(more) + "}}");
    for (const ModelLayer& layer : model.layers) {
      EXPECT_EQ(layer.attention().mask.window_left, -1);
      text += (text.empty() ? "" : " ") + std::to_string(layer.attention().mask.chunk);
    }
    return text;
  };
  EXPECT_EQ(chunks(""), "8192 8192 8192 0");
  EXPECT_EQ(chunks(R"(, "no_rope_layers": [], "attention_chunk_size": 64)"), "64 64 64 0");
  EXPECT_EQ(chunks(R"(, "no_rope_layers": [1, 0, 1, 0])"), "8192 0 8192 0");
  EXPECT_EQ(chunks(R"(, "no_rope_layer_interval": 2)"), "8192 0 8192 0");
  EXPECT_EQ(chunks(R"(, "layer_types": ["full_attention", "chunked_attention", "full_attention", "full_attention"])"), "0 8192 0 0");
}

TEST(Families, QueryTemperaturesAreNoted) {
  EXPECT_TRUE(has_note(load_model("llama-4-scout"), "attention temperature tuning"));
  EXPECT_TRUE(has_note(load_model("ministral-3-3b"), "llama_4_scaling_beta 0.1"));
  const ModelSpec off = parse_model_config(R"({"model_type": "llama4", "text_config": {"attn_temperature_tuning": false}})");
  EXPECT_FALSE(has_note(off, "temperature"));
}

TEST(Families, Gemma4FullLayersHaveTheirOwnHeads) {
  const ModelSpec model = parse_model_config(
      R"({"model_type": "gemma4", "text_config": {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 8,
          "attention_k_eq_v": true, "num_global_key_value_heads": 2}})");
  EXPECT_EQ(windows(model), "512 512 512 512 512 0 512 0");  // the last layer is a full one whatever the pattern says
  EXPECT_EQ(model.layers[5].attention().num_kv_heads, 2);
  EXPECT_EQ(model.layers[5].attention().head_dim_v, 512);
  EXPECT_EQ(model.layers[0].attention().num_kv_heads, 8);
  EXPECT_EQ(code_of(R"({"model_type": "gemma4", "text_config": {"num_kv_shared_layers": 20}})"), "model.family.later");
}

TEST(Families, FalconCountsKvHeadsOnlyInTheNewArchitecture) {
  EXPECT_EQ(load_model("falcon-7b").layers[0].attention().num_kv_heads, 1);
  EXPECT_TRUE(has_note(load_model("falcon-7b"), "num_kv_heads 71 present but multi_query is true"));
  EXPECT_EQ(load_model("falcon-40b").layers[0].attention().num_kv_heads, 8);
}

TEST(Families, FalconScalesItsAlibi) {
  const ModelSpec model = load_model("falcon-rw-1b");
  EXPECT_TRUE(model.layers[0].attention().score.alibi);
  EXPECT_TRUE(has_note(model, "slopes times 0.125"));
  EXPECT_FALSE(load_model("falcon-7b").layers[0].attention().score.alibi);
}

TEST(Families, AlibiOfBloomHasNoField) {
  EXPECT_TRUE(load_model("bloom").layers[0].attention().score.alibi);
  EXPECT_FALSE(has_note(load_model("bloom"), "slopes"));
}

TEST(Families, MptNestsItsAttention) {
  const auto mpt = [](std::string_view attn) {
    return parse_model_config(R"({"model_type": "mpt", "d_model": 512, "n_layers": 1, "n_heads": 8)" + std::string(attn) + "}");
  };
  EXPECT_TRUE(mpt("").layers[0].attention().score.alibi);
  EXPECT_FALSE(mpt(R"(, "attn_config": {"alibi": false})").layers[0].attention().score.alibi);
  EXPECT_EQ(mpt(R"(, "attn_config": {"attn_type": "multiquery_attention"})").layers[0].attention().num_kv_heads, 1);
  EXPECT_EQ(mpt(R"(, "attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 4})").layers[0].attention().num_kv_heads, 4);
  EXPECT_EQ(mpt(R"(, "attn_config": {"softmax_scale": 0.5})").layers[0].attention().scale(), 0.5f);
  EXPECT_TRUE(has_note(mpt(R"(, "attn_config": {"alibi_bias_max": 16})"), "alibi_bias_max 16"));
}

TEST(Families, T5HasBiasInItsSelfAttentionOnly) {
  const ModelSpec model = load_model("t5-small");
  ASSERT_EQ(model.layers.size(), 18u);
  const AttentionSpec &encoder = model.layers[0].attention(), &decoder = model.layers[6].attention(), &cross = model.layers[7].attention();
  EXPECT_EQ(model.layers[0].name, "encoder.0");
  EXPECT_EQ(encoder.kind, AttentionKind::encoder);
  EXPECT_FALSE(encoder.mask.causal);
  EXPECT_EQ(encoder.score.relative_buckets, 32);
  EXPECT_TRUE(encoder.score.relative_bidirectional);
  EXPECT_EQ(model.layers[6].name, "decoder.0");
  EXPECT_TRUE(decoder.mask.causal);
  EXPECT_EQ(decoder.score.relative_max_distance, 128);
  EXPECT_FALSE(decoder.score.relative_bidirectional);
  EXPECT_EQ(model.layers[7].name, "decoder.0.cross");
  EXPECT_EQ(cross.kind, AttentionKind::encoder_decoder);
  EXPECT_FALSE(cross.mask.causal);
  EXPECT_EQ(cross.score.relative_buckets, 0);
  for (const ModelLayer& layer : model.layers) EXPECT_EQ(layer.attention().scale(), 1.f);
}

TEST(Families, WhisperNotesItsLengths) {
  const ModelSpec model = load_model("whisper-large-v3");
  EXPECT_EQ(model.layers.size(), 96u);
  EXPECT_TRUE(has_note(model, "1500 tokens"));
  EXPECT_TRUE(has_note(model, "at most 448"));
}

TEST(Families, DtypeIsHonoured) {
  const auto dtype = [](std::string_view field) {
    const ModelSpec model = parse_model_config(
        R"({"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8)" + std::string(field) + "}");
    EXPECT_EQ(model.layers[0].attention().kv_dtype, model.layers[0].attention().q_dtype);
    return model.layers[0].attention().q_dtype;
  };
  EXPECT_EQ(dtype(R"(, "torch_dtype": "float16")"), DType::f16);
  EXPECT_EQ(dtype(R"(, "dtype": "float32")"), DType::f32);
  EXPECT_EQ(dtype(R"(, "dtype": "torch.bfloat16")"), DType::bf16);
  EXPECT_EQ(dtype(""), DType::bf16);
  EXPECT_TRUE(has_note(load_model("gemma-4-class-default"), "dtype absent: bfloat16"));
  // The language model's own dtype comes before the one of the whole.
  const ModelSpec nested = parse_model_config(R"({"model_type": "gemma3", "torch_dtype": "float32", "text_config": {"dtype": "float16"}})");
  EXPECT_EQ(nested.layers[0].attention().q_dtype, DType::f16);
}

}  // namespace
}  // namespace imbrex

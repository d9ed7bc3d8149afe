// Refusals: one broken config for every code, and families that imbrex knows by name only.
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "expect_error.h"
#include "imbrex/model.h"
#include "model/config_reader.h"

namespace imbrex {
namespace {

struct Mutation {
  const char* code;
  std::string config;
  const char* text;  // must be part of the message
};

// A sound config of 2 layers with `more` fields; later ones of the same name do not override, so `without` drops one first.
std::string base(std::string_view type, std::string_view more, std::string_view without = {}) {
  const std::pair<std::string_view, std::string_view> fields[] = {
      {"hidden_size", "512"}, {"num_hidden_layers", "2"}, {"num_attention_heads", "8"}, {"num_key_value_heads", "2"}};
  std::string text = R"({"model_type": ")" + std::string(type) + "\"";
  for (const auto& [key, value] : fields)
    if (key != without) text += ", \"" + std::string(key) + "\": " + std::string(value);
  return text + (more.empty() ? "" : ", ") + std::string(more) + "}";
}

std::string t5(std::string_view more) {
  return R"({"model_type": "t5", "d_model": 512, "d_kv": 64, "num_heads": 8, "num_layers": 2, )" + std::string(more) + "}";
}

std::vector<Mutation> mutations() {
  const std::string deep = std::string(65, '[') + std::string(65, ']');
  return {
      {"model.json.empty", " \n", "empty"},
      {"model.json.size", std::string(kMaxConfigBytes + 1, ' '), "4194305 bytes"},
      {"model.json.depth", R"({"a": )" + deep + "}", "64 levels"},
      {"model.json.syntax", R"({"model_type": "llama",})", "at byte 24 of 24"},
      {"model.json.number", R"({"model_type": "llama", "hidden_size": 1e999})", "does not fit"},
      {"model.json.duplicate", R"({"model_type": "llama", "model_type": "bert"})", "model_type"},
      {"model.json.root", "[1, 2]", "array of 2"},
      {"model.field.missing", base("llama", "", "hidden_size"), "hidden_size is missing"},
      {"model.field.type", base("llama", R"("hidden_size": "512")", "hidden_size"), "must be an integer, got string (\"512\")"},
      {"model.field.integer", base("llama", R"("num_hidden_layers": 2.5)", "num_hidden_layers"), "got 2.5"},
      {"model.field.negative", base("llama", R"("num_attention_heads": -8)", "num_attention_heads"), "-8"},
      {"model.field.zero", base("llama", R"("num_attention_heads": 0)", "num_attention_heads"), "at least 1"},
      {"model.field.large", base("llama", R"("num_hidden_layers": 1000000000)", "num_hidden_layers"), "at most 1024"},
      {"model.field.conflict", base("llama", R"("n_head": 4)"), "num_attention_heads is 8 but n_head, another name of it, is 4"},
      {"model.field.heads.indivisible", base("llama", R"("num_key_value_heads": 3)", "num_key_value_heads"), "8 query heads"},
      {"model.field.head_dim.indivisible", base("llama", R"("hidden_size": 500)", "hidden_size"), "500"},
      {"model.field.head_dim.multiple", base("llama", R"("head_dim": 100)"), "100"},
      {"model.field.head_dim.large", base("llama", R"("head_dim": 584)"), "584"},
      {"model.field.layer_types.length", base("gpt_oss", R"("layer_types": ["full_attention"])"), "1 entries, the model has 2"},
      {"model.field.layer_types.unknown", base("gpt_oss", R"("layer_types": ["full_attention", "local"])"), "layer_types[1]"},
      {"model.field.window.missing", base("mistral", R"("layer_types": ["full_attention", "sliding_attention"])"), "sliding_window"},
      {"model.field.window.conflict",
       base("qwen2", R"("use_sliding_window": false, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"])"),
       "layer_types[1]"},
      {"model.field.window.interleaved", base("mistral", R"("interleaved_sliding_window": [4096, 8])"), "array of 2"},
      {"model.field.chunk.missing", base("mistral", R"("layer_types": ["full_attention", "chunked_attention"])"), "attention_chunk_size"},
      {"model.field.no_rope_layers.length", base("llama4_text", R"("no_rope_layers": [1])"), "1 entries"},
      {"model.field.no_rope_layers.value", base("llama4_text", R"("no_rope_layers": [1, 2])"), "no_rope_layers[1] must be 0 or 1, got 2"},
      {"model.field.attn_type_list.length", base("minimax_m2", R"("attn_type_list": [1])"), "1 entries"},
      {"model.field.dtype.unknown", base("llama", R"("torch_dtype": "bf17")"), "bf17"},
      {"model.field.dtype.unsupported", base("llama", R"("torch_dtype": "float64")"), "float64"},
      {"model.field.attn_type.unknown", base("mpt", R"("attn_config": {"attn_type": "other"})", "num_key_value_heads"), "other"},
      {"model.field.prefix_lm", base("mpt", R"("attn_config": {"prefix_lm": true})", "num_key_value_heads"), "attn_config.prefix_lm"},
      {"model.field.is_decoder", base("bert", R"("is_decoder": true)"), "is_decoder"},
      {"model.field.position_embedding", base("bert", R"("position_embedding_type": "relative_key")"), "relative_key"},
      {"model.field.bidirectional", base("gemma3_text", R"("use_bidirectional_attention": true)"), "use_bidirectional_attention"},
      {"model.field.per_layer_config", base("gemma4_text", R"("per_layer_config": {})"), "per_layer_config"},
      {"model.field.buckets.odd", t5(R"("relative_attention_num_buckets": 31)"), "31"},
      {"model.field.buckets.few", t5(R"("relative_attention_num_buckets": 2)"), "at least 4"},
      {"model.field.buckets.distance", t5(R"("relative_attention_num_buckets": 32, "relative_attention_max_distance": 16)"), "16"},
      {"model.family.missing", R"({"hidden_size": 512})", "model_type"},
      {"model.family.unknown", base("grok9", ""), "grok9"},
      {"model.field.linear_attn_config", base("kimi_linear", R"("linear_attn_config": {"full_attn_layers": [3]})"), "1 to 2"},
      {"model.family.later", base("deepseek_v4", ""), "sparse"},
  };
}

TEST(Parse, EveryMutationHasItsOwnCode) {
  std::set<std::string> codes;
  for (const Mutation& mutation : mutations()) {
    SCOPED_TRACE(mutation.code);
    try {
      parse_model_config(mutation.config);
      ADD_FAILURE() << "nothing thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), mutation.code) << error.what();
      EXPECT_NE(std::string(error.what()).find(mutation.text), std::string::npos) << error.what();
    }
    codes.insert(mutation.code);
  }
  EXPECT_EQ(codes.size(), mutations().size());
}

TEST(Parse, TheUnmutatedBasesAreSound) {
  for (const char* type : {"llama", "gpt_oss", "mistral", "qwen2", "llama4_text", "minimax_m2", "gemma3_text", "gemma4_text", "bert"})
    EXPECT_EQ(test::error_code([&] { parse_model_config(base(type, "")); }), "nothing thrown") << type;
  EXPECT_EQ(test::error_code([&] { parse_model_config(base("mpt", "", "num_key_value_heads")); }), "nothing thrown");
  EXPECT_EQ(test::error_code([&] { parse_model_config(t5(R"("relative_attention_num_buckets": 32)")); }), "nothing thrown");
}

std::string code_of(const std::string& config) {
  return test::error_code([&] { parse_model_config(config); });
}

TEST(Parse, WrongTypesAreRefusedWhereverTheyAre) {
  for (const char* value : {"true", "\"8\"", "[8]", "{}"})
    EXPECT_EQ(code_of(base("llama", "\"num_attention_heads\": " + std::string(value), "num_attention_heads")), "model.field.type") << value;
  EXPECT_EQ(code_of(base("mistral", R"("sliding_window": "4096")")), "model.field.type");
  EXPECT_EQ(code_of(base("mistral", R"("sliding_window": 4096.0)")), "model.field.integer");
  EXPECT_EQ(code_of(base("qwen2", R"("use_sliding_window": 1)")), "model.field.type");
  EXPECT_EQ(code_of(base("gpt_oss", R"("layer_types": "full_attention")")), "model.field.type");
  EXPECT_EQ(code_of(base("gpt_oss", R"("layer_types": ["full_attention", 1])")), "model.field.type");
  EXPECT_EQ(code_of(base("gemma2", R"("query_pre_attn_scalar": "256")")), "model.field.type");
  EXPECT_EQ(code_of(base("gemma2", R"("query_pre_attn_scalar": -1)")), "model.field.negative");
  EXPECT_EQ(code_of(base("gemma2", R"("attn_logit_softcapping": 0)")), "model.field.zero");
  EXPECT_EQ(code_of(base("llama", R"("torch_dtype": 16)")), "model.field.type");
  EXPECT_EQ(code_of(R"({"model_type": 3})"), "model.field.type");
  EXPECT_EQ(code_of(R"({"model_type": "gemma3", "text_config": []})"), "model.field.type");
  EXPECT_EQ(code_of(R"({"model_type": "gemma3"})"), "model.field.missing");
}

TEST(Parse, HugeNumbersAreRefused) {
  EXPECT_EQ(code_of(base("llama", R"("hidden_size": 18446744073709551615)", "hidden_size")), "model.field.large");
  EXPECT_EQ(code_of(base("llama", R"("num_attention_heads": 9223372036854775807)", "num_attention_heads")), "model.field.large");
  EXPECT_EQ(code_of(base("mistral", R"("sliding_window": 4294967297)")), "model.field.large");
  EXPECT_EQ(code_of(base("gemma2", R"("query_pre_attn_scalar": 1e300)")), "model.field.large");
}

TEST(Parse, DepthLimitIsExact) {
  const auto nested = [](int depth) { return R"({"x": )" + std::string(depth, '[') + std::string(depth, ']') + "}"; };
  EXPECT_EQ(code_of(nested(kMaxConfigDepth - 1)), "model.family.missing");
  EXPECT_EQ(code_of(nested(kMaxConfigDepth)), "model.json.depth");
  EXPECT_EQ(code_of(std::string(2'000'000, '[')), "model.json.depth");
}

TEST(Parse, TheSameKeyInTwoObjectsIsFine) {
  EXPECT_EQ(code_of(base("llama", R"("a": {"hidden_size": 1}, "b": [{"x": 1}, {"x": 2}])")), "nothing thrown");
}

TEST(Parse, LaterFamiliesSayWhatTheyWaitFor) {
  const std::pair<const char*, const char*> families[] = {{"deepseek_vl_v2", "vision"}, {"glm5_next", "sparse"},
                                                          {"deepseek_v4", "sparse"},    {"zamba", "state-space"},
                                                          {"rwkv", "linear"},           {"nemotron-nas", "block_configs"}};
  for (const auto& [family, text] : families) {
    SCOPED_TRACE(family);
    try {
      parse_model_config(base(family, ""), "some-model");
      ADD_FAILURE() << "nothing thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), "model.family.later");
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("some-model"), std::string::npos) << error.what();
    }
  }
}

TEST(Parse, LaterPartsAreFoundInsideOtherFamilies) {
  EXPECT_EQ(code_of(base("brand_new", R"("kv_lora_rank": 512)")), "model.family.later");
  EXPECT_EQ(code_of(base("gpt_oss", R"("layer_types": ["full_attention", "linear_attention"])")), "model.family.later");
  EXPECT_EQ(code_of(base("minimax_m2", R"("attn_type_list": [0, 1])")), "model.family.later");
  EXPECT_EQ(code_of(base("minimax_m2", R"("attn_type_list": [1, 1])")), "nothing thrown");
  EXPECT_EQ(code_of(R"({"model_type": "some_vl", "text_config": {"model_type": "recurrent_gemma"}})"), "model.family.later");
  // An unknown wrapper may change the mask of the language model inside it.
  EXPECT_EQ(code_of(R"({"model_type": "some_vl", "text_config": )" + base("llama", "") + "}"), "model.family.unknown");
}

TEST(Parse, NamesComeFromTheCallerOrTheConfig) {
  EXPECT_EQ(parse_model_config(base("llama", "")).name, "llama");
  EXPECT_EQ(parse_model_config(base("llama", R"("_name_or_path": "a/b")")).name, "a/b");
  EXPECT_EQ(parse_model_config(base("llama", R"("_name_or_path": "a/b")"), "mine").name, "mine");
  EXPECT_EQ(parse_model_config(base("llama", "")).family, "llama");
  EXPECT_EQ(parse_model_config(R"({"text_config": )" + base("llama", "") + "}").family, "llama");
}

TEST(Parse, EveryCodeIsInTheDocs) {
  std::ifstream file(IMBREX_DATA "/../docs/errors.md");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  for (const Mutation& mutation : mutations()) EXPECT_NE(text.find(mutation.code), std::string::npos) << mutation.code;
}

}  // namespace
}  // namespace imbrex

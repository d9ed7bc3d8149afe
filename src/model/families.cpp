// The table of model families and the reader of ordinary decoders; used by parse_model_config().
// Class defaults and layer rules: transformers, the configuration and modelling files of each model_type.
#include "model/families.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace imbrex {

namespace {

constexpr DecoderRules kMha{.mha = true};
constexpr DecoderRules kMistral{.window = WindowRule::every_layer};
constexpr DecoderRules kMinistral3{.defaults = {34, 4096, 32, 8, 128}, .window = WindowRule::every_layer};
constexpr DecoderRules kPhi3{.mha = true, .window = WindowRule::every_layer};
constexpr DecoderRules kQwen2{.window = WindowRule::tail_if_used};
constexpr DecoderRules kQwen2Moe{.window = WindowRule::even_if_used};
constexpr DecoderRules kQwen3{.defaults = {.head_dim = 128}, .window = WindowRule::tail_if_used};
constexpr DecoderRules kQwen3Moe{.window = WindowRule::every_if_used};
constexpr DecoderRules kGemma{.defaults = {.head_dim = 256}};
constexpr DecoderRules kGemma2{.defaults = {26, 2304, 8, 4, 256},
                               .window = WindowRule::even_layers,
                               .window_default = 4096,
                               .pre_attn_scalar = 256,
                               .soft_cap_default = 50.f};
constexpr DecoderRules kGemma3{
    .defaults = {26, 2304, 8, 4, 256}, .window = WindowRule::pattern, .window_default = 4096, .pre_attn_scalar = 256};
constexpr DecoderRules kGptOss{.defaults = {.head_dim = 64}, .window = WindowRule::even_layers, .window_default = 128, .sinks = true};
constexpr DecoderRules kHeadDim128{.defaults = {.head_dim = 128}};

constexpr Family kFamilies[] = {
    {"llama", kMha},
    {"mistral", kMistral},
    {"mixtral", kMistral},
    {"ministral", kMistral},
    {"ministral3", kMinistral3},
    {"qwen2", kQwen2},
    {"qwen2_moe", kQwen2Moe},
    {"qwen3", kQwen3},
    {"qwen3_moe", kQwen3Moe},
    {"gemma", kGemma},
    {"gemma2", kGemma2},
    {"gemma3_text", kGemma3},
    {"gpt_oss", kGptOss},
    {"phi", kMha},
    {"phi3", kPhi3},
    {"starcoder2", kMistral},
    {"glm4", kHeadDim128},
    {"glm4_moe", {}},
    {"minimax_m2", kHeadDim128},
    {"gptj", kMha},
    {"llama4_text", {}, read_llama4},
    {"gemma4_text", {}, read_gemma4},
    {"falcon", {}, read_falcon},
    {"bloom", {}, read_bloom},
    {"mpt", {}, read_mpt},
    {"t5", {}, read_t5},
    {"mt5", {}, read_t5},
    {"bart", {}, read_bart},
    {"whisper", {}, read_whisper},
    {"bert", {}, read_bert},
    {"roberta", {}, read_bert},
    {"xlm-roberta", {}, read_bert},
    {"lfm2", {}, read_lfm2},
    {"lfm2_moe", {}, read_lfm2_moe},
    {"qwen3_next", {}, read_qwen3_next},
    {"qwen3_5_text", {}, read_qwen3_5},
    {"qwen3_5_moe_text", {}, read_qwen3_5_moe},
    {"nemotron_h", {}, read_nemotron_h},
    {"granitemoehybrid", {}, read_granite_hybrid},
    {"falcon_h1", {}, read_falcon_h1},
    {"bamba", {}, read_bamba},
    {"zamba2", {}, read_zamba2},
    {"jamba", {}, read_jamba},
    {"mamba", {}, read_mamba},
    {"falcon_mamba", {}, read_falcon_mamba},
    {"mamba2", {}, read_mamba2_model},
    {"minimax", {}, read_minimax},
    {"minimax_text_01", {}, read_minimax_01},
    {"minimax_m1", {}, read_minimax_01},
    {"bailing_moe_linear", {}, read_bailing_linear},
    {"deepseek_v2", {}, read_deepseek_v2, true},
    {"deepseek_v3", {}, read_deepseek_v3, true},
    {"deepseek_v32", {}, read_deepseek_v32, true},
    {"kimi_k2", {}, read_deepseek_v3, true},
    {"kimi_linear", {}, read_kimi_linear, true},
    {"bailing_hybrid", {}, read_bailing_hybrid, true},
    {"glm_moe_dsa", {}, read_glm_moe_dsa, true},
    {"glm4_moe_lite", {}, read_glm4_moe_lite, true},
    {"longcat_flash", {}, read_longcat_flash, true},
    {"minicpm3", {}, read_minicpm3, true},
};

void read_gemma_score(const ConfigReader& config, const DecoderRules& rules, ScoreMod& score) {
  if (rules.pre_attn_scalar == 0) return;
  double scalar = rules.pre_attn_scalar;
  if (const auto given = config.maybe_number("query_pre_attn_scalar", kMaxHidden)) {
    scalar = *given;
  } else {
    config.note(fmt::format("{} absent: the class default {}", config.path("query_pre_attn_scalar"), rules.pre_attn_scalar));
  }
  score.scale = float(1.0 / std::sqrt(scalar));
  if (const auto cap = config.maybe_number("attn_logit_softcapping", 1e6)) {
    score.soft_cap = float(*cap);
  } else if (rules.soft_cap_default > 0 && !config.is_null("attn_logit_softcapping")) {
    score.soft_cap = rules.soft_cap_default;
    config.note(fmt::format("{} absent: the class default {}", config.path("attn_logit_softcapping"), rules.soft_cap_default));
  }
  check(!config.flag("use_bidirectional_attention", false), "model.field.bidirectional",
        "{} is true: decoders that attend in both directions are not read", config.path("use_bidirectional_attention"));
}

// MiniMax lists 1 for softmax and 0 for lightning attention.
void check_attn_type_list(const ConfigReader& config, int layers) {
  const auto types = config.maybe_integers("attn_type_list");
  if (!types) return;
  check(int64_t(types->size()) == layers, "model.field.attn_type_list.length", "{} has {} entries, the model has {} layers",
        config.path("attn_type_list"), types->size(), layers);
  const auto other = std::find_if(types->begin(), types->end(), [](int64_t type) { return type != 1; });
  check(other == types->end(), "model.family.later", "{}[{}] is {} and not 1 (softmax): it waits for {}", config.path("attn_type_list"),
        other - types->begin(), other == types->end() ? 1 : *other, kWaitsForLinear);
}

void note_query_temperature(const ConfigReader& config) {
  const auto rope = config.child("rope_parameters");
  for (const ConfigReader* place : {&config, rope ? &*rope : nullptr})
    if (place != nullptr && place->has("llama_4_scaling_beta"))
      config.note(fmt::format("{} {}: the engine scales q with its position before attention", place->path("llama_4_scaling_beta"),
                              place->shown("llama_4_scaling_beta")));
}

void read_decoder(const FamilyInput& in, const DecoderRules& rules) {
  const ConfigReader& config = in.config;
  const Geometry geometry = read_geometry(config, rules.defaults, rules.mha);
  check_attn_type_list(config, geometry.layers);
  AttentionSpec spec = decoder_spec(geometry, in.dtype);
  read_gemma_score(config, rules, spec.score);
  spec.score.sinks = rules.sinks;
  note_query_temperature(config);

  std::optional<int> window;
  if (rules.window != WindowRule::ignored) {
    window = read_window(config, rules.window_default);
  } else if (config.has("sliding_window")) {
    config.note(
        fmt::format("{} {} is ignored, as the model's own code does", config.path("sliding_window"), config.shown("sliding_window")));
  }
  std::optional<int> chunk = config.maybe_integer({"attention_chunk_size"}, kMaxTokens);
  const std::vector<Span> spans = read_spans(config, rules.window, geometry.layers, window);
  in.model.hidden_size = geometry.hidden;
  for (int i = 0; i < geometry.layers; ++i) add_decoder_layer(in.model, i, with_span(config, spec, spans[i], window, chunk));
}

}  // namespace

const Family* find_family(std::string_view model_type) {
  const auto it = std::find_if(std::begin(kFamilies), std::end(kFamilies), [&](const Family& f) { return f.model_type == model_type; });
  return it == std::end(kFamilies) ? nullptr : it;
}

void read_family(const Family& family, const FamilyInput& in) {
  if (family.read != nullptr) {
    family.read(in);
  } else {
    read_decoder(in, family.rules);
  }
}

}  // namespace imbrex

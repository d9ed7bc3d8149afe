// Decoders with latent attention (MLA): DeepSeek V2, V3 and V3.2, Kimi K2 and Kimi-Linear, GLM-4.7-Flash and GLM-5, LongCat-Flash,
// MiniCPM3, and Bailing's hybrids (Ling, Ring); used by the family table.
// Class defaults and rules: transformers 5.19, configuration and modelling files of deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe_lite,
// glm_moe_dsa, kimi_linear, longcat_flash and minicpm3; kimi_k2 is read as deepseek_v3 there.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "model/recurrent_layers.h"

namespace imbrex {

namespace {

// Defaults of a class, for configs that are nested.
struct MlaDefaults {
  GeometryDefaults geometry;
  int kv_lora_rank, nope, rope, v;  // v 0: as long as hidden / heads
};

// What YaRN multiplies the logits by: the square of 1 + 0.1 mscale_all_dim ln(factor), where mscale_all_dim is there.
double read_yarn_scale(const ConfigReader& config) {
  for (const char* place : {"rope_scaling", "rope_parameters"}) {
    const auto rope = config.child(place);
    if (!rope) continue;
    auto type = rope->maybe_string("rope_type");
    if (!type) type = rope->maybe_string("type");
    if (!type || *type == "default") return 1;
    const auto mscale = rope->maybe_number("mscale_all_dim", 1e3, true), factor = rope->maybe_number("factor", 1e6);
    if (!mscale || *mscale == 0 || !factor) return 1;
    const double m = *factor > 1 ? 1 + 0.1 * *mscale * std::log(*factor) : 1;
    config.note(fmt::format("{}: the logits' scale has the factor {:.6g}, the square of {:.6g}", rope->path("mscale_all_dim"), m * m, m));
    return m * m;
  }
  return 1;
}

// `zero`: the dimension may be 0.
int read_dim(const ConfigReader& config, const char* key, int class_default, bool zero = false) {
  if (zero && config.has(key) && config.any_integer(key) == 0) return 0;
  const int dim = config.integer_or({key}, kMaxHeadDim, class_default);
  check(dim % 8 == 0, "model.field.head_dim.multiple", "{} is {}, expected a multiple of 8", config.path(key), dim);
  return dim;
}

MlaSpec read_mla(const ConfigReader& config, const MlaDefaults& defaults, int hidden, int heads, DType dtype) {
  MlaSpec spec;
  spec.num_heads = heads;
  spec.dtype = spec.kv_dtype = dtype;
  spec.kv_lora_rank = read_dim(config, "kv_lora_rank", defaults.kv_lora_rank);
  spec.qk_nope_dim = read_dim(config, "qk_nope_head_dim", defaults.nope);
  spec.qk_rope_dim = read_dim(config, "qk_rope_head_dim", defaults.rope, true);
  spec.v_dim = read_dim(config, "v_head_dim", defaults.v > 0 ? defaults.v : even_head_dim(config, hidden, heads));
  check(spec.latent_dim() <= kMaxHeadDim, "model.field.kv_lora_rank.large", "{} {} and {} {} are more than {} together",
        config.path("kv_lora_rank"), spec.kv_lora_rank, config.path("qk_rope_head_dim"), spec.qk_rope_dim, kMaxHeadDim);
  const auto qk_dim = config.maybe_integer({"qk_head_dim"}, kMaxHidden);
  check(!qk_dim || *qk_dim == spec.qk_dim(), "model.field.conflict", "{} is {} but {} and {} are {} together", config.path("qk_head_dim"),
        qk_dim.value_or(0), config.path("qk_nope_head_dim"), config.path("qk_rope_head_dim"), spec.qk_dim());
  // Zero where it is the usual one, so that equal layers have equal specs.
  if (const double factor = read_yarn_scale(config); factor != 1) spec.scale = float(factor / std::sqrt(double(spec.qk_dim())));
  return spec;
}

// What all layers share, read with the fields' names that most families use.
struct MlaGeometry {
  int layers = 0;
  MlaSpec spec;
};

MlaGeometry read_geometry(const FamilyInput& in, const MlaDefaults& defaults) {
  const ConfigReader& config = in.config;
  const GeometryDefaults nested = config.nested() ? defaults.geometry : GeometryDefaults{};
  const auto or_none = [](int value) { return value > 0 ? std::optional(value) : std::nullopt; };
  MlaGeometry geometry;
  geometry.layers = config.integer_or({"num_hidden_layers"}, kMaxLayers, or_none(nested.layers));
  in.model.hidden_size = config.integer_or({"hidden_size"}, kMaxHidden, or_none(nested.hidden));
  const int heads = config.integer_or({"num_attention_heads"}, kMaxHeads, or_none(nested.q_heads));
  geometry.spec = read_mla(config, defaults, in.model.hidden_size, heads, in.dtype);
  return geometry;
}

void read_mla_decoder(const FamilyInput& in, const MlaDefaults& defaults) {
  const MlaGeometry geometry = read_geometry(in, defaults);
  for (int i = 0; i < geometry.layers; ++i) add_decoder_layer(in.model, i, geometry.spec);
}

// An indexer picks the index_topk keys that a query attends to, or all that the mask shows it where there are no more: its scores say which
// keys, and take no part in the sums.
void note_indexer(const ConfigReader& config, int top_k) {
  config.note(
      fmt::format("{} {}: the indexer is not run, every query attends to all keys that its mask shows. That is exact where these "
                  "are at most {}, and another model where they are more",
                  config.path("index_topk"), top_k, top_k));
}

// Which layers attend: by linear_attn_config, whose lists count layers from 1 and may leave one of the two kinds to be the rest, or by
// layer_types.
std::vector<bool> read_kimi_attention(const ConfigReader& config, int layers) {
  std::vector<bool> attends;
  if (const auto lists = config.child("linear_attn_config"); lists && (lists->has("full_attn_layers") || lists->has("kda_layers"))) {
    const auto full = lists->maybe_integers("full_attn_layers"), kda = lists->maybe_integers("kda_layers");
    attends.assign(size_t(layers), !full);
    std::vector<bool> named(size_t(layers), false);
    for (const auto& [list, key] : {std::pair(&full, "full_attn_layers"), std::pair(&kda, "kda_layers")}) {
      for (size_t i = 0; *list && i < (*list)->size(); ++i) {
        const int64_t layer = (**list)[i];
        check(layer >= 1 && layer <= layers && !named[size_t(layer - 1)], "model.field.linear_attn_config",
              "{}[{}] must be one of the layers 1 to {} that has not been named yet, got {}", lists->path(key), i, layers, layer);
        named[size_t(layer - 1)] = true;
        attends[size_t(layer - 1)] = list == &full;
      }
    }
    const auto missing = std::find(named.begin(), named.end(), false);
    check(!full || !kda || missing == named.end(), "model.field.linear_attn_config", "{} and {} name no layer {}, expected each of {}",
          lists->path("full_attn_layers"), lists->path("kda_layers"), missing - named.begin() + 1, layers);
    return attends;
  }
  const auto names = config.maybe_strings("layer_types");
  const std::string field = config.path("layer_types");
  check(names.has_value(), "model.field.missing",
        "{} and {} are missing, expected lists of layers that attend and of those that are linear", config.path("linear_attn_config"),
        field);
  check(int64_t(names->size()) == layers, "model.field.layer_types.length", "{} has {} entries, the model has {} layers", field,
        names->size(), layers);
  for (const std::string& name : *names) {
    check(name == "full_attention" || name == "linear_attention", "model.field.layer_types.unknown",
          "{}[{}] must be full_attention or linear_attention, got \"{:.60}\"", field, attends.size(), name);
    attends.push_back(name == "full_attention");
  }
  return attends;
}

constexpr MlaDefaults kDeepseekV2{{32, 4096, 32, 32}, 512, 128, 64, 128};
constexpr MlaDefaults kDeepseekV3{{61, 7168, 128, 128}, 512, 128, 64, 128};
constexpr MlaDefaults kGlmDsa{{78, 6144, 64, 64}, 512, 192, 64, 256};
constexpr MlaDefaults kKimiLinear{{27, 2304, 32, 32}, 512, 128, 64, 128};
constexpr MlaDefaults kBailingHybrid{{42, 2560, 32, 32}, 512, 128, 64, 128};

void read_indexed(const FamilyInput& in, const MlaDefaults& defaults) {
  read_mla_decoder(in, defaults);
  note_indexer(in.config, in.config.integer_or({"index_topk"}, kMaxTokens, 2048));
}

}  // namespace

void read_deepseek_v2(const FamilyInput& in) { read_mla_decoder(in, kDeepseekV2); }
void read_deepseek_v3(const FamilyInput& in) {
  const auto read = in.config.has("index_topk") ? read_indexed : read_mla_decoder;
  read(in, kDeepseekV3);
}
void read_deepseek_v32(const FamilyInput& in) { read_indexed(in, kDeepseekV3); }
void read_glm_moe_dsa(const FamilyInput& in) { read_indexed(in, kGlmDsa); }

void read_glm4_moe_lite(const FamilyInput& in) { read_mla_decoder(in, {{47, 2048, 20, 20}, 512, 192, 64, 256}); }

void read_minicpm3(const FamilyInput& in) { read_mla_decoder(in, {{62, 2560, 40, 40}, 256, 64, 32, 0}); }

// Layers of latent attention, whose keys have no rotated part though they have qk_rope_head_dim elements for one, among layers of KDA.
void read_kimi_linear(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const MlaGeometry geometry = read_geometry(in, kKimiLinear);
  std::vector<Mixer> mixers;
  for (const bool attends : read_kimi_attention(config, geometry.layers)) mixers.push_back(attends ? Mixer::attention : Mixer::recurrent);
  config.note(fmt::format("{}: the engine rotates no part of queries and keys", config.path("qk_rope_head_dim")));
  if (config.flag("mla_use_output_gate", false))
    config.note(fmt::format("{} true: the engine multiplies outputs by the gate", config.path("mla_use_output_gate")));
  const bool has_kda = std::find(mixers.begin(), mixers.end(), Mixer::recurrent) != mixers.end();
  add_mixers(in, mixers, geometry.spec, has_kda ? read_kda(in) : RecurrentLayer{});
}

// The last layer of each group has latent attention. The others are KDA in the models that have a short convolution or a gate of KDA
// (Ling 3), and lightning attention in those that do not (Ring 2.5).
void read_bailing_hybrid(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const MlaGeometry geometry = read_geometry(in, kBailingHybrid);
  auto mixers = read_mixers(config, geometry.layers);
  if (!mixers) mixers = interval_mixers(geometry.layers, config.integer_or({"layer_group_size"}, kMaxLayers, 6));
  const int heads = geometry.spec.num_heads, head_dim = config.integer_or({"head_dim"}, kMaxHeadDim, 128);
  const bool is_kda = config.has("kda_safe_gate") || config.has("kda_lower_bound") || config.has("short_conv_kernel_size");
  std::optional<double> bound;
  if (is_kda && config.flag("kda_safe_gate", true)) bound = config.maybe_negative("kda_lower_bound").value_or(-5);
  add_mixers(in, *mixers, geometry.spec,
             is_kda ? kda_layer(in, heads, head_dim, bound, config, "short_conv_kernel_size", 1e-6f)
                    : read_bailing_lightning(in, heads, head_dim));
}

// Each of num_layers has two layers of attention, one after the other.
void read_longcat_flash(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const auto method = config.maybe_string("attention_method");
  const bool sparse = config.has("index_topk") || (method && *method != "MLA");
  check(!sparse, "model.family.later", "{:.100}: {} is {} and {} is {}: the model waits for sparse attention on top of MLA", in.model.name,
        config.path("attention_method"), config.shown("attention_method"), config.path("index_topk"), config.shown("index_topk"));
  const int layers = config.integer({"num_layers"}, kMaxLayers / 2), heads = config.integer({"num_attention_heads"}, kMaxHeads);
  in.model.hidden_size = config.integer({"hidden_size"}, kMaxHidden);
  const MlaSpec spec = read_mla(config, {{}, 512, 128, 64, 128}, in.model.hidden_size, heads, in.dtype);
  config.note(fmt::format("{} {}: each has two layers of attention; the engine scales q and the latent before them",
                          config.path("num_layers"), layers));
  for (int i = 0; i < 2 * layers; ++i) add_decoder_layer(in.model, i / 2, spec, i % 2 == 0 ? "0" : "1");
}

}  // namespace imbrex

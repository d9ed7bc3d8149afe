// Decoders with latent attention (MLA): DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash, LongCat-Flash and MiniCPM3; used by the family table.
// Class defaults and rules: transformers, configuration and modelling files of deepseek_v2, deepseek_v3, glm4_moe_lite and longcat_flash;
// of kimi_k2 and minicpm3 the code beside the published weights.
#include <cmath>

#include "core/check.h"
#include "model/families.h"

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

int read_dim(const ConfigReader& config, const char* key, int class_default) {
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
  spec.qk_rope_dim = read_dim(config, "qk_rope_head_dim", defaults.rope);
  spec.v_dim = read_dim(config, "v_head_dim", defaults.v > 0 ? defaults.v : even_head_dim(config, hidden, heads));
  check(spec.latent_dim() <= kMaxHeadDim, "model.field.kv_lora_rank.large", "{} {} and {} {} are more than {} together",
        config.path("kv_lora_rank"), spec.kv_lora_rank, config.path("qk_rope_head_dim"), spec.qk_rope_dim, kMaxHeadDim);
  // Zero where it is the usual one, so that equal layers have equal specs.
  if (const double factor = read_yarn_scale(config); factor != 1) spec.scale = float(factor / std::sqrt(double(spec.qk_dim())));
  return spec;
}

void read_mla_decoder(const FamilyInput& in, const MlaDefaults& defaults) {
  const ConfigReader& config = in.config;
  const GeometryDefaults nested = config.nested() ? defaults.geometry : GeometryDefaults{};
  const auto or_none = [](int value) { return value > 0 ? std::optional(value) : std::nullopt; };
  const int layers = config.integer_or({"num_hidden_layers"}, kMaxLayers, or_none(nested.layers));
  in.model.hidden_size = config.integer_or({"hidden_size"}, kMaxHidden, or_none(nested.hidden));
  const int heads = config.integer_or({"num_attention_heads"}, kMaxHeads, or_none(nested.q_heads));
  const MlaSpec spec = read_mla(config, defaults, in.model.hidden_size, heads, in.dtype);
  for (int i = 0; i < layers; ++i) add_layer(in.model, spec, fmt::format("decoder.{}", i));
}

}  // namespace

void read_deepseek(const FamilyInput& in) {
  check(!in.config.has("index_topk"), "model.family.later", "{} is {}: the model waits for sparse attention (an indexer picks the keys)",
        in.config.path("index_topk"), in.config.shown("index_topk"));
  read_mla_decoder(in, {{61, 7168, 128, 128}, 512, 128, 64, 128});
}

void read_glm4_moe_lite(const FamilyInput& in) { read_mla_decoder(in, {{47, 2048, 20, 20}, 512, 192, 64, 256}); }

void read_minicpm3(const FamilyInput& in) { read_mla_decoder(in, {{62, 2560, 40, 40}, 256, 64, 32, 0}); }

// Each of num_layers has two layers of attention, one after the other.
void read_longcat_flash(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const int layers = config.integer({"num_layers"}, kMaxLayers / 2), heads = config.integer({"num_attention_heads"}, kMaxHeads);
  in.model.hidden_size = config.integer({"hidden_size"}, kMaxHidden);
  const MlaSpec spec = read_mla(config, {{}, 512, 128, 64, 128}, in.model.hidden_size, heads, in.dtype);
  config.note(fmt::format("{} {}: each has two layers of attention; the engine scales q and the latent before them",
                          config.path("num_layers"), layers));
  for (int i = 0; i < 2 * layers; ++i) add_layer(in.model, spec, fmt::format("decoder.{}.{}", i / 2, i % 2));
}

}  // namespace imbrex

// Decoders with recurrent layers, alone or among layers of attention: Qwen3-Next and Qwen3.5, Nemotron-H, Granite-4-H, Falcon-H1, Bamba,
// Zamba2, Jamba, Mamba and Falcon-Mamba, MiniMax-01 and M1, Ring; used by the family table. Kimi-Linear and Ling, whose attention is
// latent, are in mla_families.cpp.
// Class defaults and rules: transformers 5.24, configuration and modelling files of each model_type; of minimax_text_01, minimax_m1 and
// bailing_moe_linear the files beside the checkpoints, and vLLM's models.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "model/recurrent_layers.h"

namespace imbrex {

namespace {

void add_hybrid(const FamilyInput& in, const Geometry& geometry, const std::vector<Mixer>& mixers, const AttentionSpec& attention,
                const RecurrentLayer& recurrent) {
  in.model.hidden_size = geometry.hidden;
  add_mixers(in, mixers, attention, recurrent);
}

void read_gdn_decoder(const FamilyInput& in, const GeometryDefaults& defaults) {
  const ConfigReader& config = in.config;
  const Geometry geometry = read_geometry(config, defaults, false);
  auto mixers = read_mixers(config, geometry.layers);
  if (!mixers) mixers = interval_mixers(geometry.layers, config.integer_or({"full_attention_interval"}, kMaxLayers, 4));
  add_hybrid(in, geometry, *mixers, decoder_spec(geometry, in.dtype), read_gdn(in));
}

constexpr ConvFields kMambaConv{.width = "mamba_d_conv", .bias = "mamba_conv_bias", .activation = "hidden_act"};
constexpr ConvFields kPureConv{.width = "conv_kernel", .bias = "use_conv_bias", .activation = "hidden_act"};

// The fields of Granite-4-H, Falcon-H1 and Bamba.
constexpr Mamba2Fields kMambaFields{.heads = "mamba_n_heads",
                                    .head_dim = "mamba_d_head",
                                    .state = "mamba_d_state",
                                    .groups = "mamba_n_groups",
                                    .conv = kMambaConv,
                                    .heads_default = 128,
                                    .state_default = 256,
                                    .groups_default = 1,
                                    .expand = "mamba_expand"};

// "M" a Mamba2 layer, "*" attention, "-" and "E" an MLP or experts alone.
std::vector<Mixer> read_pattern(const ConfigReader& config, const std::string& pattern) {
  std::vector<Mixer> mixers;
  for (const char c : pattern) {
    check(c == 'M' || c == '*' || c == '-' || c == 'E', "model.field.layer_types.unknown",
          "{}: character {} must be one of M, *, - and E, got code {}", config.path("hybrid_override_pattern"), mixers.size(),
          int(static_cast<unsigned char>(c)));
    mixers.push_back(c == 'M' ? Mixer::recurrent : c == '*' ? Mixer::attention : Mixer::none);
  }
  return mixers;
}

// Without a list: the layers of the 2.7B model, as the class has them.
std::vector<Mixer> zamba2_mixers(const ConfigReader& config, int layers) {
  if (auto mixers = read_mixers(config, layers)) return *mixers;
  std::vector<Mixer> mixers;
  if (const auto ids = config.maybe_integers("hybrid_layer_ids")) {
    mixers = listed_mixers(config, "hybrid_layer_ids", *ids, layers);
  } else {
    check(layers == 54, "model.field.missing", "{} is missing, expected a list of {} layers that are mamba or hybrid",
          config.path("layers_block_type"), layers);
    config.note(fmt::format("{} absent: the class default", config.path("layers_block_type")));
    mixers = listed_mixers(config, "layers_block_type", {6, 12, 18, 24, 30, 36, 42, 47, 51}, layers);
  }
  std::replace(mixers.begin(), mixers.end(), Mixer::attention, Mixer::both);
  return mixers;
}

// Models without attention.
void read_pure(const FamilyInput& in, const RecurrentLayer& layer, int layers, int hidden) {
  in.model.hidden_size = hidden;
  for (int i = 0; i < layers; ++i) add_recurrent(in.model, i, layer);
}

void read_mamba1_model(const FamilyInput& in) {
  const int layers = in.config.integer({"num_hidden_layers", "n_layer"}, kMaxLayers),
            hidden = in.config.integer({"hidden_size", "d_model"}, kMaxHidden);
  read_pure(in, read_mamba1(in, {.state = "state_size", .expand = "expand", .conv = kPureConv, .width = "intermediate_size"}, hidden),
            layers, hidden);
}

// 1 for softmax and 0 for lightning attention.
std::vector<Mixer> read_attn_types(const ConfigReader& config, const std::vector<int64_t>& types, int layers) {
  const std::string field = config.path("attn_type_list");
  check(int64_t(types.size()) == layers, "model.field.attn_type_list.length", "{} has {} entries, the model has {} layers", field,
        types.size(), layers);
  std::vector<Mixer> mixers;
  for (const int64_t type : types) {
    check(type == 0 || type == 1, "model.field.attn_type.unknown", "{}[{}] must be 0 (lightning attention) or 1 (softmax), got {}", field,
          mixers.size(), type);
    mixers.push_back(type == 1 ? Mixer::attention : Mixer::recurrent);
  }
  return mixers;
}

// `absent`: the layers where there is no list; null: an error.
void read_minimax_decoder(const FamilyInput& in, const GeometryDefaults& defaults, std::vector<Mixer> (*absent)(int layers)) {
  const ConfigReader& config = in.config;
  const Geometry geometry = read_geometry(config, defaults, false);
  auto mixers = read_mixers(config, geometry.layers);
  if (const auto types = config.maybe_integers("attn_type_list"); types && !mixers)
    mixers = read_attn_types(config, *types, geometry.layers);
  if (!mixers && absent != nullptr) {
    mixers = absent(geometry.layers);
    config.note(fmt::format("{} and {} absent: every second layer is lightning attention, the class default, which is no published model",
                            config.path("layer_types"), config.path("attn_type_list")));
  }
  check(mixers.has_value(), "model.field.missing",
        "{} is missing, expected a list of {} numbers, 1 for softmax and 0 for lightning attention", config.path("attn_type_list"),
        geometry.layers);
  AttentionSpec attention = decoder_spec(geometry, in.dtype);
  if (const auto window = read_window(config, 0)) attention.mask.window_left = *window - 1;
  constexpr float kEps = 1e-6f;
  config.note("lightning attention: the norm of outputs has the epsilon 1e-6, as in transformers; vLLM has 1e-5");
  add_hybrid(in, geometry, *mixers, attention, lightning_layer(config, geometry.q_heads, geometry.head_dim, 1, 1, kEps, in.dtype));
}

}  // namespace

void read_qwen3_next(const FamilyInput& in) { read_gdn_decoder(in, {48, 2048, 16, 2, 256}); }
void read_qwen3_5(const FamilyInput& in) { read_gdn_decoder(in, {32, 4096, 16, 4, 256}); }
void read_qwen3_5_moe(const FamilyInput& in) { read_gdn_decoder(in, {40, 2048, 16, 2, 256}); }

// The width of its Mamba2 layers is heads times head_dim; `expand` says something else and means nothing.
void read_nemotron_h(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const auto pattern = config.maybe_string("hybrid_override_pattern");
  const auto layers = config.maybe_integer({"num_hidden_layers"}, kMaxLayers);
  std::optional<std::vector<Mixer>> mixers;
  if (pattern) mixers = read_pattern(config, *pattern);
  if (const auto names = config.maybe_strings(config.has("layer_types") ? "layer_types" : "layers_block_type"); !mixers && names)
    mixers = read_mixers(config, layers.value_or(int(names->size())));
  check(mixers.has_value() && !mixers->empty() && mixers->size() <= size_t(kMaxLayers), "model.field.missing",
        "{} is missing, expected a letter for each layer: M, *, - or E", config.path("hybrid_override_pattern"));
  check(!layers || mixers->size() == size_t(*layers), "model.field.layer_types.length", "{} has {} letters, the model has {} layers",
        config.path("hybrid_override_pattern"), mixers->size(), layers.value_or(0));
  if (config.has("sliding_window"))
    config.note(
        fmt::format("{} {} is ignored, as the model's own code does", config.path("sliding_window"), config.shown("sliding_window")));
  const Geometry geometry = read_geometry(config, {0, 4096, 32, 8, 128}, false, int(mixers->size()));
  add_hybrid(in, geometry, *mixers, decoder_spec(geometry, in.dtype),
             read_mamba2(in,
                         {.heads = "mamba_num_heads",
                          .head_dim = "mamba_head_dim",
                          .state = "ssm_state_size",
                          .groups = "n_groups",
                          .conv = {.width = "conv_kernel", .bias = "use_conv_bias", .activation = "mamba_hidden_act"},
                          .heads_default = 128,
                          .state_default = 128,
                          .groups_default = 8,
                          .least_step = true,
                          .eps = "layer_norm_epsilon"},
                         geometry.hidden));
}

// The scale of its attention is a field, whose class default is 1.
void read_granite_hybrid(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const Geometry geometry = read_geometry(config, {32, 4096, 32, 32}, true);
  auto mixers = read_mixers(config, geometry.layers);
  if (!mixers) {
    mixers.emplace(size_t(geometry.layers), Mixer::recurrent);
    config.note(fmt::format("{} absent: no layer attends, the class default", config.path("layer_types")));
  }
  AttentionSpec attention = decoder_spec(geometry, in.dtype);
  attention.score.scale = float(config.maybe_number("attention_multiplier", 1e3).value_or(1));
  if (!config.has("attention_multiplier")) config.note(fmt::format("{} absent: the class default 1", config.path("attention_multiplier")));
  const bool mamba = std::any_of(mixers->begin(), mixers->end(), [](Mixer m) { return m != Mixer::attention; });
  Mamba2Fields fields = kMambaFields;
  fields.eps_default = 1e-6f;
  add_hybrid(in, geometry, *mixers, attention, mamba ? read_mamba2(in, fields, geometry.hidden) : RecurrentLayer{});
}

// Each layer has both.
void read_falcon_h1(const FamilyInput& in) {
  const Geometry geometry = read_geometry(in.config, {32, 4096, 32, 8}, false);
  Mamba2Fields fields = kMambaFields;
  fields.width = "mamba_d_ssm";
  fields.optional_norm = true;
  if (const auto factor = in.config.maybe_number("key_multiplier", 1e3))
    in.config.note(
        fmt::format("{} {:g}: the engine multiplies keys by it, before they are written", in.config.path("key_multiplier"), *factor));
  add_hybrid(in, geometry, std::vector<Mixer>(size_t(geometry.layers), Mixer::both), decoder_spec(geometry, in.dtype),
             read_mamba2(in, fields, geometry.hidden));
}

void read_bamba(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const Geometry geometry = read_geometry(config, {32, 4096, 32, 8}, false);
  auto mixers = read_mixers(config, geometry.layers);
  if (!mixers) {
    const auto list = config.maybe_integers("attn_layer_indices");
    if (!list) config.note(fmt::format("{} absent: no layer attends, the class default", config.path("attn_layer_indices")));
    mixers = listed_mixers(config, "attn_layer_indices", list.value_or(std::vector<int64_t>{}), geometry.layers);
  }
  add_hybrid(in, geometry, *mixers, decoder_spec(geometry, in.dtype), read_mamba2(in, kMambaFields, geometry.hidden));
}

// Attention is over twice the hidden size, and its logits are divided by the root of half a head's dimension. Its weights are shared by the
// layers that have it; keys and values are not.
void read_zamba2(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const auto read = [&](const char* key, int max, int class_default) {
    return config.integer_or({key}, max, config.nested() ? std::optional(class_default) : std::nullopt);
  };
  const int layers = read("num_hidden_layers", kMaxLayers, 54), hidden = read("hidden_size", kMaxHidden / 2, 2560),
            heads = read("num_attention_heads", kMaxHeads, 32), head_dim = even_head_dim(config, 2 * hidden, heads);
  const auto given = config.maybe_integer({"attention_head_dim", "head_dim"}, kMaxHidden);
  check(!given || *given == head_dim, "model.field.conflict", "{} is {} but twice the hidden size {} over {} heads is {}",
        config.path("attention_head_dim"), given.value_or(0), hidden, heads, head_dim);
  check_head_dim(config, head_dim);
  const int kv_heads = config.maybe_integer({"num_key_value_heads"}, kMaxHeads).value_or(heads);
  check_heads(config, heads, kv_heads);
  const Geometry geometry{layers, hidden, heads, kv_heads, head_dim};
  AttentionSpec attention = decoder_spec(geometry, in.dtype);
  attention.score.scale = float(1 / std::sqrt(head_dim / 2.0));
  add_hybrid(in, geometry, zamba2_mixers(config, layers), attention,
             read_mamba2(in,
                         {.heads = "n_mamba_heads",
                          .head_dim = nullptr,
                          .state = "mamba_d_state",
                          .groups = "mamba_ngroups",
                          .conv = {.width = "mamba_d_conv", .biased = true},
                          .heads_default = 8,
                          .state_default = 64,
                          .groups_default = 1,
                          .expand = "mamba_expand",
                          .least_step = true,
                          .eps = nullptr},
                         hidden));
}

void read_jamba(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const Geometry geometry = read_geometry(config, {32, 4096, 32, 8}, false);
  const int period = config.integer_or({"attn_layer_period"}, kMaxLayers, 8);
  const int64_t offset = config.any_integer("attn_layer_offset").value_or(4);
  if (!config.has("attn_layer_offset")) config.note(fmt::format("{} absent: the class default 4", config.path("attn_layer_offset")));
  check(offset >= 0 && offset < period, "model.field.attn_layers", "{} is {}, expected 0 to {}, one less than {}",
        config.path("attn_layer_offset"), offset, period - 1, config.path("attn_layer_period"));
  const std::vector<Mixer> mixers = mixers_where(geometry.layers, [&](int i) { return i % period == offset; });
  add_hybrid(in, geometry, mixers, decoder_spec(geometry, in.dtype),
             read_mamba1(in, {.state = "mamba_d_state", .expand = "mamba_expand", .conv = kMambaConv}, geometry.hidden));
}

void read_falcon_mamba(const FamilyInput& in) { read_mamba1_model(in); }
void read_mamba(const FamilyInput& in) { read_mamba1_model(in); }

void read_mamba2_model(const FamilyInput& in) {
  const int layers = in.config.integer({"num_hidden_layers"}, kMaxLayers), hidden = in.config.integer({"hidden_size"}, kMaxHidden);
  read_pure(in,
            read_mamba2(in,
                        {.heads = "num_heads",
                         .head_dim = "head_dim",
                         .state = "state_size",
                         .groups = "n_groups",
                         .conv = kPureConv,
                         .heads_default = 128,
                         .state_default = 128,
                         .groups_default = 8,
                         .expand = "expand",
                         .eps = "layer_norm_epsilon"},
                        hidden),
            layers, hidden);
}

void read_minimax(const FamilyInput& in) {
  const auto alternate = [](int layers) { return mixers_where(layers, [](int i) { return i % 2 == 0; }); };
  read_minimax_decoder(in, {32, 4096, 32, 8}, alternate);
}
void read_minimax_01(const FamilyInput& in) { read_minimax_decoder(in, {}, nullptr); }

// The last layer of each group attends, and so do layers at the end that make no whole group.
void read_bailing_linear(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const Geometry geometry = read_geometry(config, {}, true);
  const int group = config.integer({"layer_group_size"}, kMaxLayers);
  std::vector<Mixer> mixers = interval_mixers(geometry.layers, group);
  std::fill(mixers.begin() + geometry.layers / group * group, mixers.end(), Mixer::attention);
  const auto kv_heads = config.any_integer("num_kv_heads_for_linear_attn").value_or(0);
  check(kv_heads == 0 || kv_heads == geometry.q_heads, "model.family.later",
        "{:.100}: {} is {}, expected 0 or {}: lightning attention whose heads share keys and values is not read", in.model.name,
        config.path("num_kv_heads_for_linear_attn"), kv_heads, geometry.q_heads);
  add_hybrid(in, geometry, mixers, decoder_spec(geometry, in.dtype), read_bailing_lightning(in, geometry.q_heads, geometry.head_dim));
}

}  // namespace imbrex

// Decoders with their own field names or layer rules: Llama 4, Gemma 4, Falcon, BLOOM, MPT; used by the family table.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "model/families.h"

namespace imbrex {

namespace {

void add_uniform_decoders(const FamilyInput& in, const Geometry& geometry, const AttentionSpec& spec) {
  in.model.hidden_size = geometry.hidden;
  for (int i = 0; i < geometry.layers; ++i) add_decoder_layer(in.model, i, spec);
}

// Llama 4: 1 for a layer with rotary positions, which is chunked; 0 for one without (NoPE), which sees everything.
std::vector<Span> read_no_rope_layers(const ConfigReader& config, int layers) {
  std::vector<Span> spans(layers, Span::chunked);
  const auto rope = config.maybe_integers("no_rope_layers");
  if (!rope || rope->empty()) {  // published configs have an empty list
    const int interval = config.maybe_integer({"no_rope_layer_interval"}, kMaxLayers).value_or(4);
    for (int i = 0; i < layers; ++i)
      if ((i + 1) % interval == 0) spans[i] = Span::full;
    return spans;
  }
  check(int64_t(rope->size()) == layers, "model.field.no_rope_layers.length", "{} has {} entries, the model has {} layers",
        config.path("no_rope_layers"), rope->size(), layers);
  for (int i = 0; i < layers; ++i) {
    const int64_t value = (*rope)[i];
    check(value == 0 || value == 1, "model.field.no_rope_layers.value", "{}[{}] must be 0 or 1, got {}", config.path("no_rope_layers"), i,
          value);
    if (value == 0) spans[i] = Span::full;
  }
  return spans;
}

}  // namespace

void read_llama4(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const Geometry geometry = read_geometry(config, {48, 5120, 40, 8, 128}, false);
  std::optional<int> chunk = config.maybe_integer({"attention_chunk_size"}, kMaxTokens);
  if (!chunk && !config.is_null("attention_chunk_size")) chunk = config.integer_or({"attention_chunk_size"}, kMaxTokens, 8192);
  const auto listed = read_layer_types(config, geometry.layers);
  const std::vector<Span> spans = listed ? *listed : read_no_rope_layers(config, geometry.layers);

  const std::string tuning = config.shown("attn_temperature_tuning");  // true or, in older files, the interval 4
  if (tuning != "false" && tuning != "0")
    config.note("attention temperature tuning: the engine scales q of the layers without rotary positions before attention");
  const AttentionSpec spec = decoder_spec(geometry, in.dtype);
  const std::optional<int> window = read_window(config, 0);
  in.model.hidden_size = geometry.hidden;
  for (int i = 0; i < geometry.layers; ++i) add_decoder_layer(in.model, i, with_span(config, spec, spans[i], window, chunk));
}

void read_gemma4(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const Geometry geometry = read_geometry(config, {30, 2304, 8, 4, 256}, false);
  check(!config.has("per_layer_config"), "model.field.per_layer_config", "{} is {}: overrides of single layers are not read",
        config.path("per_layer_config"), config.shown("per_layer_config"));
  const int64_t shared = config.any_integer("num_kv_shared_layers").value_or(0);
  check(shared == 0, "model.family.later", "{} is {}: it waits for layers that read the cache of another layer",
        config.path("num_kv_shared_layers"), shared);
  const std::string bidirectional = config.maybe_string("use_bidirectional_attention").value_or("");
  check(bidirectional != "all", "model.field.bidirectional", "{} is \"all\": decoders that attend in both directions are not read",
        config.path("use_bidirectional_attention"));
  if (bidirectional == "vision") config.note("images attend in both directions: the engine gives such steps a custom mask");

  const std::optional<int> window = read_window(config, 512);
  std::vector<Span> spans = read_spans(config, WindowRule::pattern, geometry.layers, window);
  if (spans.back() != Span::full) config.note("the last layer is always a full one");
  spans.back() = Span::full;

  AttentionSpec local = decoder_spec(geometry, in.dtype);
  local.score.scale = 1.f;  // q and k are normalised with learned weights
  AttentionSpec global = local;
  const int global_dim = config.maybe_integer({"global_head_dim"}, kMaxHidden).value_or(512);
  check_head_dim(config, global_dim);
  global.head_dim_qk = global.head_dim_v = global_dim;
  // Keys and values of one projection are still normalised and rotated apart, so both are cached.
  if (config.flag("attention_k_eq_v", false))
    global.num_kv_heads = config.maybe_integer({"num_global_key_value_heads"}, kMaxHeads).value_or(geometry.kv_heads);
  check_heads(config, geometry.q_heads, global.num_kv_heads);
  in.model.hidden_size = geometry.hidden;
  for (int i = 0; i < geometry.layers; ++i) {
    const AttentionSpec& spec = spans[i] == Span::full ? global : local;
    add_decoder_layer(in.model, i, with_span(config, spec, spans[i], window, std::nullopt));
  }
}

void read_falcon(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  Geometry geometry;
  geometry.layers = config.integer({"num_hidden_layers", "n_layer"}, kMaxLayers);
  geometry.hidden = config.integer({"hidden_size", "n_embed"}, kMaxHidden);
  geometry.q_heads = config.integer({"num_attention_heads", "n_head"}, kMaxHeads);
  const auto kv_heads = config.maybe_integer({"num_kv_heads", "n_head_kv"}, kMaxHeads);
  // Only the new architecture counts kv heads; falcon-7b lists 71 of them beside multi_query.
  if (config.flag("new_decoder_architecture", false)) {
    geometry.kv_heads = kv_heads.value_or(geometry.q_heads);
  } else if (config.flag("multi_query", true)) {
    geometry.kv_heads = 1;
    if (kv_heads && *kv_heads != 1) config.note(fmt::format("num_kv_heads {} present but multi_query is true: 1", *kv_heads));
  } else {
    geometry.kv_heads = kv_heads.value_or(geometry.q_heads);
  }
  check_heads(config, geometry.q_heads, geometry.kv_heads);
  geometry.head_dim = even_head_dim(config, geometry.hidden, geometry.q_heads);
  check_head_dim(config, geometry.head_dim);
  AttentionSpec spec = decoder_spec(geometry, in.dtype);
  spec.score.alibi = config.flag("alibi", false);
  if (spec.score.alibi)
    config.note(
        fmt::format("Falcon scales the ALiBi bias together with q.k: give slopes times {:.6g}", 1.0 / std::sqrt(geometry.head_dim)));
  add_uniform_decoders(in, geometry, spec);
}

void read_bloom(const FamilyInput& in) {
  const Geometry geometry = read_geometry(in.config, {}, true);
  AttentionSpec spec = decoder_spec(geometry, in.dtype);
  spec.score.alibi = true;
  add_uniform_decoders(in, geometry, spec);
}

void read_mpt(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  Geometry geometry = read_geometry(config, {}, true);
  AttentionSpec spec;
  const auto attn = config.child("attn_config");
  if (!attn) {
    spec = decoder_spec(geometry, in.dtype);
    spec.score.alibi = true;
    config.note("attn_config absent: the class default, with ALiBi");
    return add_uniform_decoders(in, geometry, spec);
  }
  const std::string type = attn->maybe_string("attn_type").value_or("multihead_attention");
  if (type == "multiquery_attention") {
    geometry.kv_heads = 1;
  } else if (type == "grouped_query_attention") {
    geometry.kv_heads = attn->integer({"kv_n_heads"}, kMaxHeads);
  } else {
    check(type == "multihead_attention", "model.field.attn_type.unknown",
          "{} must be multihead_attention, multiquery_attention or grouped_query_attention, got \"{:.60}\"", attn->path("attn_type"), type);
  }
  check_heads(config, geometry.q_heads, geometry.kv_heads);
  check(!attn->flag("prefix_lm", false), "model.field.prefix_lm", "{} is true: prefix language models are not read",
        attn->path("prefix_lm"));
  spec = decoder_spec(geometry, in.dtype);
  spec.score.scale = float(attn->maybe_number("softmax_scale", 1e6).value_or(0.0));
  spec.score.alibi = attn->flag("alibi", true);
  const double bias_max = attn->maybe_number("alibi_bias_max", 1e6).value_or(8.0);
  if (spec.score.alibi && bias_max != 8.0) config.note(fmt::format("alibi_bias_max {}: give slopes of that base, not of 8", bias_max));
  add_uniform_decoders(in, geometry, spec);
}

}  // namespace imbrex

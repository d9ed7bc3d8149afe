// Geometry and layer kinds as nearly all configs spell them; used by the family readers.
#include <algorithm>

#include "core/check.h"
#include "model/families.h"

namespace imbrex {

namespace {

std::optional<int> or_none(int class_default) { return class_default > 0 ? std::optional(class_default) : std::nullopt; }

}  // namespace

void check_heads(const ConfigReader& config, int q_heads, int kv_heads) {
  check(q_heads % kv_heads == 0, "model.field.heads.indivisible", "{}: {} query heads are not a multiple of {} kv heads",
        config.path("num_key_value_heads"), q_heads, kv_heads);
}

void check_head_dim(const ConfigReader& config, int head_dim) {
  check(head_dim % 8 == 0, "model.field.head_dim.multiple", "{}: a head dim of {} is not a multiple of 8", config.path("head_dim"),
        head_dim);
  check(head_dim <= kMaxHeadDim, "model.field.head_dim.large", "{}: a head dim of {} is more than {}", config.path("head_dim"), head_dim,
        kMaxHeadDim);
}

int even_head_dim(const ConfigReader& config, int hidden, int heads) {
  check(hidden % heads == 0, "model.field.head_dim.indivisible", "{} is absent, and hidden size {} is not a multiple of {} heads",
        config.path("head_dim"), hidden, heads);
  return hidden / heads;
}

Geometry read_geometry(const ConfigReader& config, const GeometryDefaults& defaults, bool mha, int layers) {
  // A top-level config.json has all fields of its class, a nested one only those that differ from the class's defaults.
  const GeometryDefaults nested = config.nested() ? defaults : GeometryDefaults{};
  Geometry geometry;
  geometry.layers =
      layers > 0 ? layers : config.integer_or({"num_hidden_layers", "n_layer", "n_layers"}, kMaxLayers, or_none(nested.layers));
  geometry.hidden = config.integer_or({"hidden_size", "n_embd", "n_embed", "d_model"}, kMaxHidden, or_none(nested.hidden));
  geometry.q_heads = config.integer_or({"num_attention_heads", "n_head", "n_heads"}, kMaxHeads, or_none(nested.q_heads));
  const auto kv_heads = config.maybe_integer({"num_key_value_heads", "num_kv_heads", "n_head_kv"}, kMaxHeads);
  if (kv_heads) {
    geometry.kv_heads = *kv_heads;
  } else if (mha || config.is_null("num_key_value_heads")) {
    geometry.kv_heads = geometry.q_heads;
  } else {
    geometry.kv_heads = config.integer_or({"num_key_value_heads"}, kMaxHeads, or_none(nested.kv_heads));
  }
  check_heads(config, geometry.q_heads, geometry.kv_heads);
  if (const auto head_dim = config.maybe_integer({"head_dim", "attention_head_dim"}, kMaxHidden)) {
    geometry.head_dim = *head_dim;
  } else if (defaults.head_dim > 0) {
    geometry.head_dim = config.integer_or({"head_dim"}, kMaxHeadDim, defaults.head_dim);
  } else {
    geometry.head_dim = even_head_dim(config, geometry.hidden, geometry.q_heads);
  }
  check_head_dim(config, geometry.head_dim);
  return geometry;
}

AttentionSpec decoder_spec(const Geometry& geometry, DType dtype) {
  AttentionSpec spec;
  spec.num_q_heads = geometry.q_heads;
  spec.num_kv_heads = geometry.kv_heads;
  spec.head_dim_qk = spec.head_dim_v = geometry.head_dim;
  spec.q_dtype = spec.kv_dtype = dtype;
  return spec;
}

void add_layer(ModelSpec& model, int number, const LayerSpec& spec, std::string name) {
  model.layers.push_back({.spec = spec, .name = std::move(name), .number = number, .cache_group = -1});
  model.num_layers = std::max(model.num_layers, number + 1);
}

void add_decoder_layer(ModelSpec& model, int number, const LayerSpec& spec, std::string_view part) {
  add_layer(model, number, spec, fmt::format("decoder.{}{}{}", number, part.empty() ? "" : ".", part));
}

int read_conv_width(const ConfigReader& config, const char* key, int class_default) {
  const int64_t width = config.any_integer(key).value_or(class_default);
  if (!config.has(key)) config.note(fmt::format("{} absent: the class default {}", config.path(key), width));
  check(width >= 2 && width <= 8, "model.field.conv_width", "{} is {}, from 2 to 8 tokens are run", config.path(key), width);
  return int(width);
}

std::optional<std::vector<Span>> read_layer_types(const ConfigReader& config, int layers) {
  const auto names = config.maybe_strings("layer_types");
  if (!names) return std::nullopt;
  check(int64_t(names->size()) == layers, "model.field.layer_types.length", "{} has {} entries, the model has {} layers",
        config.path("layer_types"), names->size(), layers);
  std::vector<Span> spans;
  for (const std::string& name : *names) {
    const std::string field = fmt::format("{}[{}]", config.path("layer_types"), spans.size());
    const bool recurrent = name == "linear_attention" || name == "mamba" || name == "recurrent" || name == "conv";
    check(!recurrent, "model.family.later", "{} is \"{}\": it waits for {}", field, name, kWaitsForLinear);
    if (name == "full_attention") {
      spans.push_back(Span::full);
    } else if (name == "sliding_attention") {
      spans.push_back(Span::sliding);
    } else {
      check(name == "chunked_attention", "model.field.layer_types.unknown",
            "{} must be full_attention, sliding_attention or chunked_attention, got \"{:.60}\"", field, name);
      spans.push_back(Span::chunked);
    }
  }
  return spans;
}

std::optional<int> read_window(const ConfigReader& config, int class_default) {
  check(!config.has("interleaved_sliding_window"), "model.field.window.interleaved",
        "{} is {}: give the kinds of the layers as layer_types instead", config.path("interleaved_sliding_window"),
        config.shown("interleaved_sliding_window"));
  const std::string field = config.path("sliding_window");
  auto window = config.any_integer("sliding_window");
  if (!window && !config.is_null("sliding_window") && class_default > 0) {
    config.note(fmt::format("{} absent: the class default {}", field, class_default));
    window = class_default;
  }
  if (!window) return std::nullopt;
  if (*window <= 0) {
    config.note(fmt::format("{} {} means no window", field, *window));
    return std::nullopt;
  }
  check(*window <= kMaxTokens, "model.field.large", "{} is {}, at most {} is allowed", field, *window, kMaxTokens);
  const auto context = config.maybe_integer({"max_position_embeddings"}, kMaxTokens);
  if (context && *window >= *context) {
    config.note(fmt::format("{} {} hides nothing within max_position_embeddings {}: no window", field, *window, *context));
    return std::nullopt;
  }
  return int(*window);
}

std::vector<Span> read_spans(const ConfigReader& config, WindowRule rule, int layers, std::optional<int> window) {
  const bool switched = rule == WindowRule::tail_if_used || rule == WindowRule::even_if_used || rule == WindowRule::every_if_used;
  const bool used = !switched || config.flag("use_sliding_window", false);
  if (!used && config.has("sliding_window"))
    config.note(
        fmt::format("{} {} present but use_sliding_window is false", config.path("sliding_window"), config.shown("sliding_window")));
  if (auto spans = read_layer_types(config, layers)) {
    const auto sliding = std::find(spans->begin(), spans->end(), Span::sliding);
    check(used || sliding == spans->end(), "model.field.window.conflict", "{}[{}] is sliding_attention but {} is false",
          config.path("layer_types"), sliding - spans->begin(), config.path("use_sliding_window"));
    return *spans;
  }
  int period = 0, tail = 0;
  if (rule == WindowRule::pattern) period = config.integer_or({"sliding_window_pattern", "_sliding_window_pattern"}, kMaxLayers, 6);
  if (used && (rule == WindowRule::tail_if_used || rule == WindowRule::even_if_used))
    tail = int(std::clamp<int64_t>(config.any_integer("max_window_layers").value_or(28), 0, layers));  // 28: the class default
  std::vector<Span> spans(layers, Span::full);
  for (int i = 0; i < layers; ++i) {
    bool sliding = false;
    switch (rule) {
      case WindowRule::ignored: break;
      case WindowRule::every_layer:
      case WindowRule::every_if_used: sliding = used && window.has_value(); break;
      case WindowRule::tail_if_used: sliding = used && window.has_value() && i >= tail; break;
      case WindowRule::even_if_used: sliding = used && window.has_value() && i % 2 == 0 && i < tail; break;
      case WindowRule::even_layers: sliding = i % 2 == 0; break;
      case WindowRule::pattern: sliding = (i + 1) % period != 0; break;
    }
    if (sliding) spans[i] = Span::sliding;
  }
  return spans;
}

AttentionSpec with_span(const ConfigReader& config, AttentionSpec spec, Span span, std::optional<int> window, std::optional<int> chunk) {
  if (span == Span::sliding) {
    // A window that is present but off makes these layers full; one that is not there at all is a broken config.
    check(window || config.has("sliding_window"), "model.field.window.missing", "{} is missing, but some layers are sliding",
          config.path("sliding_window"));
    if (window) spec.mask.window_left = *window - 1;
  }
  if (span == Span::chunked) {
    check(chunk.has_value(), "model.field.chunk.missing", "{} is missing, but some layers are chunked",
          config.path("attention_chunk_size"));
    spec.mask.chunk = *chunk;
  }
  return spec;
}

}  // namespace imbrex

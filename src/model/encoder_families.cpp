// Models with an encoder: T5, BART, Whisper (encoder, decoder, cross attention) and BERT (encoder only); used by the family table.
#include "core/check.h"
#include "model/families.h"

namespace imbrex {

namespace {

// The three specs of an encoder-decoder model.
struct Specs {
  AttentionSpec encoder, decoder, cross;
};

AttentionSpec bidirectional(AttentionSpec spec, AttentionKind kind) {
  spec.kind = kind;
  spec.mask.causal = false;
  if (kind != AttentionKind::encoder_decoder) spec.block_size = 0;  // reads keys where the projection wrote them
  return spec;
}

void add_encoder_decoder(ModelSpec& model, const Specs& specs, int encoder_layers, int decoder_layers) {
  for (int i = 0; i < encoder_layers; ++i) add_layer(model, i, specs.encoder, fmt::format("encoder.{}", i));
  for (int i = 0; i < decoder_layers; ++i) {
    add_layer(model, encoder_layers + i, specs.decoder, fmt::format("decoder.{}", i));
    add_layer(model, encoder_layers + i, specs.cross, fmt::format("decoder.{}.cross", i));
  }
}

Geometry even_shape(const ConfigReader& config, int hidden, int heads) {
  const int head_dim = even_head_dim(config, hidden, heads);
  check_head_dim(config, head_dim);
  return {.layers = 0, .hidden = hidden, .q_heads = heads, .kv_heads = heads, .head_dim = head_dim};
}

void read_encoder_decoder(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const int hidden = config.integer({"d_model", "hidden_size"}, kMaxHidden);
  const Geometry encoder = even_shape(config, hidden, config.integer({"encoder_attention_heads"}, kMaxHeads));
  const Geometry decoder = even_shape(config, hidden, config.integer({"decoder_attention_heads"}, kMaxHeads));
  const int encoder_layers = config.integer({"encoder_layers"}, kMaxLayers);
  const int decoder_layers = config.integer({"decoder_layers"}, kMaxLayers);
  Specs specs;
  specs.encoder = bidirectional(decoder_spec(encoder, in.dtype), AttentionKind::encoder);
  specs.decoder = decoder_spec(decoder, in.dtype);
  specs.cross = bidirectional(specs.decoder, AttentionKind::encoder_decoder);
  in.model.hidden_size = hidden;
  add_encoder_decoder(in.model, specs, encoder_layers, decoder_layers);
}

}  // namespace

void read_t5(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  Geometry geometry;
  geometry.hidden = config.integer({"d_model", "hidden_size"}, kMaxHidden);
  geometry.q_heads = geometry.kv_heads = config.integer({"num_heads", "num_attention_heads"}, kMaxHeads);
  geometry.head_dim = config.integer({"d_kv"}, kMaxHidden);  // heads x d_kv need not be d_model
  check_head_dim(config, geometry.head_dim);
  const int encoder_layers = config.integer({"num_layers", "num_hidden_layers"}, kMaxLayers);
  const int decoder_layers = config.maybe_integer({"num_decoder_layers"}, kMaxLayers).value_or(encoder_layers);
  const int buckets = config.integer({"relative_attention_num_buckets"}, 4096);
  check(buckets % 2 == 0, "model.field.buckets.odd", "{} is {}, must be even: half are for keys after the query",
        config.path("relative_attention_num_buckets"), buckets);
  check(buckets >= 4, "model.field.buckets.few", "{} is {}, must be at least 4", config.path("relative_attention_num_buckets"), buckets);
  const int max_distance = config.integer_or({"relative_attention_max_distance"}, kMaxTokens, 128);
  check(max_distance > buckets / 2, "model.field.buckets.distance", "{} is {}, must be more than half of the {} buckets",
        config.path("relative_attention_max_distance"), max_distance, buckets);

  AttentionSpec plain = decoder_spec(geometry, in.dtype);
  plain.score.scale = 1.f;
  AttentionSpec biased = plain;
  biased.score.relative_buckets = buckets;
  biased.score.relative_max_distance = max_distance;
  Specs specs;
  specs.encoder = bidirectional(biased, AttentionKind::encoder);
  specs.encoder.score.relative_bidirectional = true;
  specs.decoder = biased;
  specs.cross = bidirectional(plain, AttentionKind::encoder_decoder);
  in.model.hidden_size = geometry.hidden;
  config.note("all layers of a stack share the relative bias of its first layer");
  add_encoder_decoder(in.model, specs, encoder_layers, decoder_layers);
}

void read_bart(const FamilyInput& in) { read_encoder_decoder(in); }

void read_whisper(const FamilyInput& in) {
  read_encoder_decoder(in);
  const auto source = in.config.maybe_integer({"max_source_positions"}, kMaxTokens);
  const auto target = in.config.maybe_integer({"max_target_positions"}, kMaxTokens);
  if (source) in.config.note(fmt::format("the encoder, and so every cross attention, has {} tokens", *source));
  if (target) in.config.note(fmt::format("the decoder has at most {} tokens", *target));
}

void read_bert(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  check(!config.flag("is_decoder", false), "model.field.is_decoder", "{} is true: BERT is read as an encoder only",
        config.path("is_decoder"));
  const std::string position = config.maybe_string("position_embedding_type").value_or("absolute");
  check(position == "absolute", "model.field.position_embedding",
        "{} is \"{:.60}\", only absolute is read (the relative ones multiply q and k with a table)", config.path("position_embedding_type"),
        position);
  const int hidden = config.integer({"hidden_size"}, kMaxHidden);
  const Geometry geometry = even_shape(config, hidden, config.integer({"num_attention_heads"}, kMaxHeads));
  const int layers = config.integer({"num_hidden_layers"}, kMaxLayers);
  in.model.hidden_size = hidden;
  const AttentionSpec spec = bidirectional(decoder_spec(geometry, in.dtype), AttentionKind::encoder_only);
  for (int i = 0; i < layers; ++i) add_layer(in.model, i, spec, fmt::format("encoder.{}", i));
}

}  // namespace imbrex

// Decoders whose layers are of several families: LFM2, of attention and short convolutions; used by the family table.
// Class defaults and layer rules: transformers, configuration_lfm2.py, configuration_lfm2_moe.py and modeling_lfm2.py.
#include <algorithm>

#include "core/check.h"
#include "model/families.h"

namespace imbrex {

namespace {

// Which layers are attention, by either of the two fields that say so.
std::vector<bool> read_attention_layers(const ConfigReader& config, int layers) {
  const std::string types_field = config.path("layer_types"), list_field = config.path("full_attn_idxs");
  std::vector<bool> by_type, by_list;
  if (const auto names = config.maybe_strings("layer_types")) {
    check(int64_t(names->size()) == layers, "model.field.layer_types.length", "{} has {} entries, the model has {} layers", types_field,
          names->size(), layers);
    for (const std::string& name : *names) {
      check(name == "conv" || name == "full_attention", "model.field.layer_types.unknown",
            "{}[{}] must be conv or full_attention, got \"{:.60}\"", types_field, by_type.size(), name);
      by_type.push_back(name == "full_attention");
    }
  }
  if (const auto list = config.maybe_integers("full_attn_idxs")) {
    by_list.assign(size_t(layers), false);
    for (size_t i = 0; i < list->size(); ++i) {
      const int64_t layer = (*list)[i];
      check(layer >= 0 && layer < layers && !by_list[size_t(layer)], "model.field.full_attn_idxs",
            "{}[{}] must be one of the layers 0 to {} that the list has not named yet, got {}", list_field, i, layers - 1, layer);
      by_list[size_t(layer)] = true;
    }
  }
  if (by_type.empty() && by_list.empty()) {
    config.note(fmt::format("{} and {} absent: every layer attends, the class default", types_field, list_field));
    return std::vector<bool>(size_t(layers), true);
  }
  if (by_type.empty()) return by_list;
  const size_t differs = size_t(std::mismatch(by_type.begin(), by_type.end(), by_list.begin(), by_list.end()).first - by_type.begin());
  check(by_list.empty() || differs == by_type.size(), "model.field.conflict", "{}[{}] is {}, but {} says otherwise", types_field, differs,
        differs < by_type.size() && by_type[differs] ? "full_attention" : "conv", list_field);
  return by_type;
}

ShortConvSpec read_short_conv(const ConfigReader& config, int hidden, DType dtype) {
  ShortConvSpec spec;
  spec.dim = hidden;
  spec.dtype = dtype;
  spec.bias = config.flag("conv_bias", false);
  spec.width = read_conv_width(config, "conv_L_cache", spec.width);
  if (const auto dim = config.maybe_integer({"conv_dim"}, kMaxHidden))
    check(*dim == hidden, "model.field.conflict", "{} is {} but {}, which the convolutions are as wide as, is {}", config.path("conv_dim"),
          *dim, config.path("hidden_size"), hidden);
  return spec;
}

void read_conv_decoder(const FamilyInput& in, const GeometryDefaults& defaults) {
  const ConfigReader& config = in.config;
  const Geometry geometry = read_geometry(config, defaults, false);
  const std::vector<bool> attends = read_attention_layers(config, geometry.layers);
  const AttentionSpec attention = decoder_spec(geometry, in.dtype);
  const ShortConvSpec conv = read_short_conv(config, geometry.hidden, in.dtype);
  in.model.hidden_size = geometry.hidden;
  for (int i = 0; i < geometry.layers; ++i) add_decoder_layer(in.model, i, attends[size_t(i)] ? LayerSpec(attention) : LayerSpec(conv));
}

}  // namespace

void read_lfm2(const FamilyInput& in) { read_conv_decoder(in, {32, 2560, 32, 8}); }
void read_lfm2_moe(const FamilyInput& in) { read_conv_decoder(in, {32, 2048, 32, 8}); }

}  // namespace imbrex

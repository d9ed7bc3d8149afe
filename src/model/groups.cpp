// What follows from a model's layers: KV groups, distinct specs, the deployed variant and the printed summary.
#include "model/groups.h"

#include <fmt/format.h>

#include <algorithm>

#include "imbrex/kv_cache.h"

namespace imbrex {

namespace {

bool has_cache(AttentionKind kind) { return kind == AttentionKind::decoder || kind == AttentionKind::encoder_decoder; }

// Whether two layers' blocks can live and die together: the same tokens are kept, in records of the same size and form.
bool same_group(const AttentionSpec& a, const AttentionSpec& b) {
  return a.kind == b.kind && a.mask.window_left == b.mask.window_left && a.mask.chunk == b.mask.chunk && a.num_kv_heads == b.num_kv_heads &&
         a.head_dim_qk == b.head_dim_qk && a.head_dim_v == b.head_dim_v && a.kv_dtype == b.kv_dtype && a.kv_format == b.kv_format &&
         a.block_size == b.block_size;
}

std::string group_name(const AttentionSpec& spec) {
  if (spec.kind == AttentionKind::encoder_decoder) return "cross";
  if (spec.mask.chunk > 0) return fmt::format("chunk {}", spec.mask.chunk);
  if (spec.mask.window_left >= 0) return fmt::format("window {}", int64_t(spec.mask.window_left) + 1);
  return "full";
}

int64_t cache_bytes_per_token(const AttentionSpec& spec) {
  if (spec.kv_format != KvFormat::amx_packed) return spec.kv_bytes_per_token();
  const int64_t block = packed_block_bytes(spec.block_size, spec.head_dim_qk, spec.kv_dtype) +
                        packed_block_bytes(spec.block_size, spec.head_dim_v, spec.kv_dtype);
  return spec.num_kv_heads * block / spec.block_size;
}

}  // namespace

void group_layers(ModelSpec& model) {
  model.kv_groups.clear();
  std::vector<const AttentionSpec*> first;  // of each group
  for (size_t i = 0; i < model.layers.size(); ++i) {
    ModelLayer& layer = model.layers[i];
    layer.kv_group = -1;
    if (!has_cache(layer.spec.kind)) continue;
    const auto it = std::find_if(first.begin(), first.end(), [&](const AttentionSpec* spec) { return same_group(*spec, layer.spec); });
    layer.kv_group = int(it - first.begin());
    if (it == first.end()) {
      first.push_back(&layer.spec);
      model.kv_groups.push_back({.name = group_name(layer.spec), .layers = {}, .bytes_per_token = 0});
    }
    KvGroup& group = model.kv_groups[layer.kv_group];
    group.layers.push_back(int(i));
    group.bytes_per_token += cache_bytes_per_token(layer.spec);
  }
  std::vector<std::string> names;
  for (const KvGroup& group : model.kv_groups) names.push_back(group.name);
  for (size_t g = 0; g < names.size(); ++g) {
    if (std::count(names.begin(), names.end(), names[g]) == 1) continue;
    model.kv_groups[g].name += fmt::format(" kv{} d{}", first[g]->num_kv_heads, first[g]->head_dim_qk);
  }
}

std::vector<ModelSpec::Kind> ModelSpec::kinds() const {
  std::vector<Kind> kinds;
  for (size_t i = 0; i < layers.size(); ++i) {
    auto it = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& kind) { return kind.spec == layers[i].spec; });
    if (it == kinds.end()) it = kinds.insert(it, Kind{.spec = layers[i].spec, .layers = {}});
    it->layers.push_back(int(i));
  }
  return kinds;
}

ModelSpec ModelSpec::with_kv(DType q_dtype, DType kv_dtype, KvFormat kv_format, int block_size) const {
  ModelSpec model = *this;
  for (ModelLayer& layer : model.layers) {
    layer.spec.q_dtype = q_dtype;
    const bool cached = has_cache(layer.spec.kind);  // the others read keys where the projection wrote them
    layer.spec.kv_dtype = cached ? kv_dtype : q_dtype;
    layer.spec.kv_format = cached ? kv_format : KvFormat::strided;
    layer.spec.block_size = cached ? block_size : 0;
  }
  for (const Kind& kind : model.kinds()) kind.spec.validate();
  group_layers(model);
  return model;
}

std::string ModelSpec::str() const {
  const auto is_cross = [&](const KvGroup& group) { return layers[group.layers[0]].spec.kind == AttentionKind::encoder_decoder; };
  int64_t bytes = 0;  // that one more token of the decoder takes
  for (const KvGroup& group : kv_groups) bytes += is_cross(group) ? 0 : group.bytes_per_token;
  std::string text =
      fmt::format("{} ({}): {} attention layers, hidden {}, KV {} B/token\n", name, family, layers.size(), hidden_size, bytes);
  for (const Kind& kind : kinds()) text += fmt::format("  {:>4} x {}\n", kind.layers.size(), kind.spec.str());
  size_t width = 0;
  for (const KvGroup& group : kv_groups) width = std::max(width, group.name.size());
  for (const KvGroup& group : kv_groups)
    text += fmt::format("  KV group {:<{}}  {:>4} layers  {:>8} B/{}token\n", group.name, width, group.layers.size(), group.bytes_per_token,
                        is_cross(group) ? "encoder " : "");
  for (const std::string& note : notes) text += fmt::format("  note: {}\n", note);
  text.pop_back();
  return text;
}

}  // namespace imbrex

// What follows from a model's layers: cache groups, distinct specs, the deployed variant and the printed summary.
#include "model/groups.h"

#include <fmt/format.h>

#include <algorithm>

#include "attention/kv_codec.h"
#include "recurrent/conv_plan.h"

namespace imbrex {

namespace {

// What each family says of its caches: a family has these six functions.

bool has_cache(const AttentionSpec& spec) { return spec.kind == AttentionKind::decoder || spec.kind == AttentionKind::encoder_decoder; }

// Whether two layers can share a block table: both keep the same tokens, in records of the same size and form.
bool same_group(const AttentionSpec& a, const AttentionSpec& b) {
  return a.kind == b.kind && a.mask.window_left == b.mask.window_left && a.mask.chunk == b.mask.chunk &&
         a.mask.chunk_lookback == b.mask.chunk_lookback && a.num_kv_heads == b.num_kv_heads && a.head_dim_qk == b.head_dim_qk &&
         a.head_dim_v == b.head_dim_v && a.kv_dtype == b.kv_dtype && a.kv_format == b.kv_format && a.block_size == b.block_size;
}

std::string group_name(const AttentionSpec& spec) {
  if (spec.kind == AttentionKind::encoder_decoder) return "cross";
  if (spec.mask.chunk > 0) return fmt::format("chunk {}", spec.mask.chunk);
  if (spec.mask.window_left >= 0) return fmt::format("window {}", int64_t(spec.mask.window_left) + 1);
  return "full";
}
std::string group_detail(const AttentionSpec& spec) { return fmt::format("kv{} d{}", spec.num_kv_heads, spec.head_dim_qk); }

void add_bytes(const AttentionSpec& spec, CacheGroup& group) { group.bytes_per_token += spec.kv_bytes_per_token(); }

void deploy(AttentionSpec& spec, DType q_dtype, DType kv_dtype, KvFormat kv_format, int block_size) {
  const bool cached = has_cache(spec);  // the others read keys where the projection wrote them
  spec.q_dtype = q_dtype;
  spec.kv_dtype = cached ? kv_dtype : q_dtype;
  spec.kv_format = cached ? kv_format : KvFormat::strided;
  spec.block_size = cached ? block_size : 0;
}

bool has_cache(const ShortConvSpec&) { return true; }

bool same_group(const ShortConvSpec& a, const ShortConvSpec& b) {
  return a.dim == b.dim && a.state_rows() == b.state_rows() && a.dtype == b.dtype;
}

std::string group_name(const ShortConvSpec&) { return std::string(ShortConvFamily::name); }
std::string group_detail(const ShortConvSpec& spec) { return fmt::format("d{} rows{}", spec.dim, spec.state_rows()); }

void add_bytes(const ShortConvSpec& spec, CacheGroup& group) { group.bytes_per_slot += spec.state_bytes(); }

void deploy(ShortConvSpec& spec, DType q_dtype, DType, KvFormat, int) {
  if (!is_fp8(q_dtype)) spec.dtype = q_dtype;
}

bool has_cache(const RecurrentSpec&) { return true; }

// A layer with a convolution in front has two states in a slot.
int64_t conv_bytes(const RecurrentSpec& spec) { return spec.conv == RecurrentConv::none ? 0 : conv_of(spec).state_bytes(); }

bool same_group(const RecurrentSpec& a, const RecurrentSpec& b) {
  const bool no_conv = a.conv == RecurrentConv::none && b.conv == RecurrentConv::none;
  const bool both_conv = a.conv != RecurrentConv::none && b.conv != RecurrentConv::none;
  return (no_conv || (both_conv && same_group(conv_of(a), conv_of(b)))) && a.num_v_heads == b.num_v_heads && a.head_dim_k == b.head_dim_k &&
         a.head_dim_v == b.head_dim_v && a.state_rows() == b.state_rows() && a.state_dtype == b.state_dtype && a.layout == b.layout;
}

std::string group_name(const RecurrentSpec&) { return std::string(RecurrentFamily::name); }
std::string group_detail(const RecurrentSpec& spec) {
  return fmt::format("v{} k{} v{} rows{} {} {}{}", spec.num_v_heads, spec.head_dim_k, spec.head_dim_v, spec.state_rows(),
                     to_string(spec.state_dtype), to_string(spec.layout),
                     spec.conv == RecurrentConv::none ? "" : fmt::format(" conv {}", group_detail(conv_of(spec))));
}

void add_bytes(const RecurrentSpec& spec, CacheGroup& group) { group.bytes_per_slot += spec.state_bytes() + conv_bytes(spec); }

// The state keeps its type: it is that of the model's sums, not of its activations.
void deploy(RecurrentSpec& spec, DType q_dtype, DType, KvFormat, int) {
  if (!is_fp8(q_dtype)) spec.dtype = q_dtype;
}

// Pages of latents are those of attention in latent space.
bool has_cache(const MlaSpec&) { return true; }
bool same_group(const MlaSpec& a, const MlaSpec& b) { return same_group(a.latent_spec(), b.latent_spec()); }
std::string group_name(const MlaSpec& spec) { return group_name(spec.latent_spec()); }
std::string group_detail(const MlaSpec& spec) { return group_detail(spec.latent_spec()); }
void add_bytes(const MlaSpec& spec, CacheGroup& group) { group.bytes_per_token += spec.kv_bytes_per_token(); }

// A format that stores values by themselves is not for latents: they stay in theirs.
void deploy(MlaSpec& spec, DType q_dtype, DType kv_dtype, KvFormat kv_format, int block_size) {
  if (!is_fp8(q_dtype)) spec.dtype = q_dtype;
  spec.kv_dtype = kv_dtype;
  if (codec_of(kv_format).values_in_keys) spec.kv_format = kv_format;
  spec.block_size = std::max(block_size, 1);
}

// These functions for a layer of any family.

bool is_cached(const LayerSpec& layer) {
  return std::visit([](const auto& spec) { return has_cache(spec); }, layer);
}

bool go_together(const LayerSpec& a, const LayerSpec& b) {
  return std::visit(
      [&]<class Spec>(const Spec& spec) {
        const Spec* other = std::get_if<Spec>(&b);
        return other != nullptr && same_group(spec, *other);
      },
      a);
}

bool is_cross(const LayerSpec& layer) {
  const auto* spec = std::get_if<AttentionSpec>(&layer);
  return spec != nullptr && spec->kind == AttentionKind::encoder_decoder;
}

// "32 attention layers", "16 layers (6 attention, 10 short_conv)"
std::string count_layers(const ModelSpec& model) {
  std::vector<std::pair<std::string_view, size_t>> counts;
  for (const ModelLayer& layer : model.layers) {
    const std::string_view family = family_name(layer.spec);
    const auto it = std::find_if(counts.begin(), counts.end(), [&](const auto& c) { return c.first == family; });
    if (it == counts.end()) {
      counts.emplace_back(family, 1);
    } else {
      ++it->second;
    }
  }
  std::string text;
  for (const auto& [family, count] : counts) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, family);
  return counts.size() == 1 ? text + " layers" : fmt::format("{} layers ({})", model.num_layers, text);
}

}  // namespace

void validate(const LayerSpec& layer) {
  std::visit([](const auto& spec) { spec.validate(); }, layer);
}

std::optional<AttentionSpec> paged_attention(const LayerSpec& layer) {
  if (const auto* attention = std::get_if<AttentionSpec>(&layer)) return *attention;
  if (const auto* mla = std::get_if<MlaSpec>(&layer)) return mla->latent_spec();
  return std::nullopt;
}

std::string group_lines(const ModelSpec& model) {
  size_t width = 0;
  for (const CacheGroup& group : model.cache_groups) width = std::max(width, group.name.size());
  std::string text;
  for (const CacheGroup& group : model.cache_groups) {
    const char* unit = group.holds_states() ? "request" : is_cross(model.layers[group.layers[0]].spec) ? "encoder token" : "token";
    text += fmt::format("  {} group {:<{}}  {:>4} layers  {:>8} B/{}\n", group.holds_states() ? "state" : "KV", group.name, width,
                        group.layers.size(), group.holds_states() ? group.bytes_per_slot : group.bytes_per_token, unit);
  }
  return text;
}

void group_layers(ModelSpec& model) {
  model.cache_groups.clear();
  std::vector<const LayerSpec*> first;  // of each group
  for (size_t i = 0; i < model.layers.size(); ++i) {
    ModelLayer& layer = model.layers[i];
    layer.cache_group = -1;
    if (!is_cached(layer.spec)) continue;
    const auto it = std::find_if(first.begin(), first.end(), [&](const LayerSpec* spec) { return go_together(*spec, layer.spec); });
    layer.cache_group = int(it - first.begin());
    if (it == first.end()) {
      first.push_back(&layer.spec);
      model.cache_groups.push_back({.name = std::visit([](const auto& spec) { return group_name(spec); }, layer.spec), .layers = {}});
    }
    CacheGroup& group = model.cache_groups[layer.cache_group];
    group.layers.push_back(int(i));
    std::visit([&](const auto& spec) { add_bytes(spec, group); }, layer.spec);
  }
  std::vector<std::string> names;
  for (const CacheGroup& group : model.cache_groups) names.push_back(group.name);
  for (size_t g = 0; g < names.size(); ++g) {
    if (std::count(names.begin(), names.end(), names[g]) == 1) continue;
    model.cache_groups[g].name += " " + std::visit([](const auto& spec) { return group_detail(spec); }, *first[g]);
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

std::vector<int> ModelSpec::numbers_of(const std::vector<int>& indices) const {
  std::vector<int> numbers;
  for (const int i : indices)
    if (const int number = layers[size_t(i)].number; numbers.empty() || numbers.back() != number) numbers.push_back(number);
  return numbers;
}

ModelSpec ModelSpec::with_kv(DType q_dtype, DType kv_dtype, KvFormat kv_format, int block_size) const {
  ModelSpec model = *this;
  for (ModelLayer& layer : model.layers)
    std::visit([&](auto& spec) { deploy(spec, q_dtype, kv_dtype, kv_format, block_size); }, layer.spec);
  for (const Kind& kind : model.kinds()) validate(kind.spec);
  group_layers(model);
  return model;
}

std::string ModelSpec::str() const {
  int64_t token_bytes = 0, slot_bytes = 0;  // that one more token of the decoder takes, and one more request
  for (const CacheGroup& group : cache_groups) {
    token_bytes += is_cross(layers[group.layers[0]].spec) ? 0 : group.bytes_per_token;
    slot_bytes += group.bytes_per_slot;
  }
  std::string text = fmt::format("{} ({}): {}, hidden {}, KV {} B/token", name, family, count_layers(*this), hidden_size, token_bytes);
  text += slot_bytes > 0 ? fmt::format(", states {} B/request\n", slot_bytes) : "\n";
  for (const Kind& kind : kinds()) text += fmt::format("  {:>4} x {}\n", kind.layers.size(), to_string(kind.spec));
  text += group_lines(*this);
  for (const std::string& note : notes) text += fmt::format("  note: {}\n", note);
  text.pop_back();
  return text;
}

}  // namespace imbrex

// The options by which select, bench and compile are told what to compute: a model, or one layer described by flags.
#include "cli/spec_options.h"

#include <fmt/format.h>

#include <charconv>

#include "attention/kv_codec.h"
#include "attention/spec_fields.h"
#include "core/check.h"
#include "core/text.h"
#include "short_conv/spec_fields.h"

namespace imbrex::cli {
namespace {

// "32/8" or "32": two numbers, the second like the first where it is missing.
std::pair<int, int> parse_pair(const std::string& text, std::string_view code, std::string_view example) {
  const auto parts = split(text, "/");
  int values[2] = {0, 0};
  bool ok = parts.size() == 1 || parts.size() == 2;
  for (size_t i = 0; ok && i < parts.size(); ++i) {
    const auto [rest, error] = std::from_chars(parts[i].data(), parts[i].data() + parts[i].size(), values[i]);
    ok = error == std::errc() && rest == parts[i].data() + parts[i].size() && values[i] > 0;
  }
  check(ok, code, "one or two positive numbers such as {}, got \"{}\"", example, text);
  return {values[0], parts.size() == 2 ? values[1] : values[0]};
}

AttentionKind parse_kind(const std::string& text) {
  for (const auto kind : {AttentionKind::decoder, AttentionKind::encoder, AttentionKind::encoder_only, AttentionKind::encoder_decoder}) {
    if (text == to_string(kind)) return kind;
  }
  fail("cli.kind", "decoder, encoder, encoder_only or encoder_decoder, got \"{}\"", text);
}

AttentionSpec spec_of(const SpecOptions& o) {
  AttentionSpec spec = o.spec;
  std::tie(spec.num_q_heads, spec.num_kv_heads) = parse_pair(o.heads, "cli.heads", "32/8 (query heads/kv heads)");
  std::tie(spec.head_dim_qk, spec.head_dim_v) = parse_pair(o.head_dim, "cli.head_dim", "128 or 192/128 (of q and k/of v)");
  spec.kv_dtype = o.kv_dtype.empty() ? spec.q_dtype : parse_dtype(o.kv_dtype);
  spec.mask.causal = !o.bidirectional && spec.kind == AttentionKind::decoder;
  if (o.window > 0) spec.mask.window_left = o.window - 1;
  spec.validate();
  return spec;
}

// An option whose values have names. `parse` throws for what is none.
template <class Enum, class Parse>
void add_named(CLI::App& app, const char* flag, Enum& value, const std::string& help, Parse parse) {
  app.add_option_function<std::string>(
         flag, [&value, parse](const std::string& text) { value = parse(text); }, help)
      ->default_str(to_string(value));
}

// The option of a field, by its type.
using Help = const std::string&;
void add_field(CLI::App& app, const char* flag, bool& value, Help help) { app.add_flag(flag, value, help); }
void add_field(CLI::App& app, const char* flag, float& value, Help help) { app.add_option(flag, value, help); }
void add_field(CLI::App& app, const char* flag, int& value, Help help) { app.add_option(flag, value, help)->capture_default_str(); }
void add_field(CLI::App& app, const char* flag, Expression& value, Help help) {
  app.add_option_function<std::string>(
      flag, [&value](const std::string& text) { value = parse_expression(text); }, help);
}
void add_field(CLI::App& app, const char* flag, AttentionKind& value, Help help) { add_named(app, flag, value, help, parse_kind); }
void add_field(CLI::App& app, const char* flag, KvFormat& value, Help) { add_named(app, flag, value, kv_format_names(), parse_kv_format); }
// Of a family whose names parse_value() knows.
template <class Enum>
requires std::is_enum_v<Enum>
void add_field(CLI::App& app, const char* flag, Enum& value, Help help) {
  add_named(app, flag, value, help, [](const std::string& text) {
    Enum parsed{};
    parse_value(text, parsed);
    return parsed;
  });
}
void add_field(CLI::App& app, const char* flag, DType& value, Help help) { add_dtype_option(app, flag, value, help); }

}  // namespace

KvFormat parse_kv_format(const std::string& text) {
  const std::optional<KvFormat> format = find_kv_format(text);
  check(format.has_value(), "cli.kv_format", "{}, got \"{}\"", kv_format_names(), text);
  return *format;
}

void add_dtype_option(CLI::App& app, const char* flag, DType& value, const std::string& help) {
  add_named(app, flag, value, help, [](const std::string& text) { return parse_dtype(text); });
}

template <class Spec>
void add_field_options(CLI::App& app, Spec& spec, const std::string& before) {
  for_each_field(spec, [&](const SpecField& field, auto& value) {
    if (*field.flag != 0) add_field(app, field.flag, value, before + field.help);
  });
}
template void add_field_options(CLI::App&, ShortConvSpec&, const std::string&);

void add_spec_options(CLI::App& app, SpecOptions& o) {
  app.add_option("--model", o.model, "Preset name, config.json, or a folder with one (instead of --heads etc.)");
  app.add_option("--heads", o.heads, "Query heads / KV heads")->capture_default_str();
  app.add_option("--head-dim", o.head_dim, "Head dimension, or that of q and k / that of v")->capture_default_str();
  app.add_option("--kv-dtype", o.kv_dtype, "f32, bf16, f16, fp8_e4m3, fp8_e5m2 (default: like q)");
  app.add_option("--window", o.window, "Sliding window: keys a query sees, itself included")->check(CLI::PositiveNumber);
  app.add_flag("--bidirectional", o.bidirectional, "Queries see later keys too");
  add_field_options(app, o.spec, "");
}

std::optional<ModelSpec> model_of(const SpecOptions& o) {
  if (o.model.empty()) return std::nullopt;
  const DType q_dtype = o.spec.q_dtype, kv_dtype = o.kv_dtype.empty() ? q_dtype : parse_dtype(o.kv_dtype);
  return load_model(o.model).with_kv(q_dtype, kv_dtype, o.spec.kv_format, o.spec.block_size);
}

std::vector<Named<LayerSpec>> specs_of(const SpecOptions& o) {
  const std::optional<ModelSpec> model = model_of(o);
  if (!model) return {{"", {}, spec_of(o)}};
  std::vector<Named<LayerSpec>> specs;
  bool any_attention = false;
  for (const auto& kind : model->kinds()) {
    const std::vector<int> numbers = model->numbers_of(kind.layers);
    LayerSpec spec = kind.spec;
    if (auto* const attention = std::get_if<AttentionSpec>(&spec)) {
      attention->mask.tree = o.spec.mask.tree;
      attention->score_mod = o.spec.score_mod, attention->mask_mod = o.spec.mask_mod;
      attention->validate();
      any_attention = true;
    }
    if (auto* const latent = std::get_if<MlaSpec>(&spec)) latent->mask.tree = o.spec.mask.tree;
    specs.push_back({fmt::format("{} {}", numbers.size() == 1 ? "layer" : "layers", format_ranges(numbers)), numbers, spec});
  }
  check(any_attention || (o.spec.score_mod.empty() && o.spec.mask_mod.empty()), "cli.family",
        "{}: expected a model with attention layers, which expressions are of, it has none", o.model);
  return specs;
}

namespace {

// The specs of one family among those of the options; a line on stderr tells of the others.
template <class Spec>
std::vector<Named<Spec>> specs_of_family(const SpecOptions& o, std::string_view family) {
  std::vector<Named<Spec>> specs;
  for (const Named<LayerSpec>& named : specs_of(o)) {
    if (const auto* spec = std::get_if<Spec>(&named.spec)) {
      specs.push_back({named.name, named.layers, *spec});
    } else {
      fmt::print(stderr, "note: {} ({}) left out: this command knows {} only\n", named.name, to_string(named.spec), family);
    }
  }
  check(!specs.empty(), "cli.family", "{}: expected a model with {} layers, it has none", o.model, family);
  return specs;
}

}  // namespace

std::vector<Named<AttentionSpec>> attention_specs_of(const SpecOptions& o) { return specs_of_family<AttentionSpec>(o, "attention"); }

std::vector<Named<MlaSpec>> mla_specs_of(const SpecOptions& o, const MlaSpec& dims, bool heads_given) {
  if (!o.model.empty()) return specs_of_family<MlaSpec>(o, MlaFamily::name);
  MlaSpec spec = dims;
  if (heads_given) spec.num_heads = parse_pair(o.heads, "cli.heads", "128").first;
  spec.dtype = o.spec.q_dtype;
  spec.kv_dtype = o.kv_dtype.empty() ? spec.dtype : parse_dtype(o.kv_dtype);
  if (codec_of(o.spec.kv_format).values_in_keys) spec.kv_format = o.spec.kv_format;
  spec.block_size = o.spec.block_size;
  spec.mask = o.spec.mask;
  spec.mask.causal = !o.bidirectional;
  if (o.window > 0) spec.mask.window_left = o.window - 1;
  spec.scale = o.spec.score.scale;
  spec.sinks = o.spec.score.sinks;
  spec.validate();
  return {{"", {}, spec}};
}

}  // namespace imbrex::cli

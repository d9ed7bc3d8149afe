// The options by which select and bench are told what to compute: a model, or one layer described by flags.
#include "cli/spec_options.h"

#include <fmt/format.h>

#include <charconv>

#include "core/check.h"

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
  AttentionSpec spec;
  spec.kind = parse_kind(o.kind);
  std::tie(spec.num_q_heads, spec.num_kv_heads) = parse_pair(o.heads, "cli.heads", "32/8 (query heads/kv heads)");
  std::tie(spec.head_dim_qk, spec.head_dim_v) = parse_pair(o.head_dim, "cli.head_dim", "128 or 192/128 (of q and k/of v)");
  spec.q_dtype = parse_dtype(o.q_dtype);
  spec.kv_dtype = o.kv_dtype.empty() ? spec.q_dtype : parse_dtype(o.kv_dtype);
  spec.kv_format = parse_kv_format(o.kv_format);
  spec.block_size = o.block_size;
  spec.mask.causal = !o.bidirectional && spec.kind == AttentionKind::decoder;
  if (o.window > 0) spec.mask.window_left = o.window - 1;
  spec.mask.chunk = o.chunk;
  spec.mask.custom = o.custom_mask;
  spec.score.scale = o.scale;
  spec.score.soft_cap = o.soft_cap;
  spec.score.sinks = o.sinks;
  spec.score.alibi = o.alibi;
  spec.validate();
  return spec;
}

}  // namespace

KvFormat parse_kv_format(const std::string& text) {
  for (const auto format : {KvFormat::strided, KvFormat::amx_packed}) {
    if (text == to_string(format)) return format;
  }
  fail("cli.kv_format", "strided or amx_packed, got \"{}\"", text);
}

void add_spec_options(CLI::App& app, SpecOptions& o) {
  app.add_option("--model", o.model, "Preset name, config.json, or a folder with one (instead of --heads etc.)");
  app.add_option("--heads", o.heads, "Query heads / KV heads")->capture_default_str();
  app.add_option("--head-dim", o.head_dim, "Head dimension, or that of q and k / that of v")->capture_default_str();
  app.add_option("--q-dtype", o.q_dtype, "f32, bf16, f16; fp8_e4m3 with such keys")->capture_default_str();
  app.add_option("--kv-dtype", o.kv_dtype, "f32, bf16, f16, fp8_e4m3, fp8_e5m2 (default: like q)");
  app.add_option("--kv-format", o.kv_format, "strided or amx_packed")->capture_default_str();
  app.add_option("--block-size", o.block_size, "Tokens in a block (page); 0: ragged keys without a cache")->capture_default_str();
  app.add_option("--kind", o.kind, "decoder, encoder, encoder_only, encoder_decoder")->capture_default_str();
  app.add_option("--window", o.window, "Sliding window: keys a query sees, itself included")->check(CLI::PositiveNumber);
  app.add_option("--chunk", o.chunk, "Chunked-local attention (Llama 4): chunk length")->check(CLI::PositiveNumber);
  app.add_option("--soft-cap", o.soft_cap, "Soft cap of the logits");
  app.add_option("--scale", o.scale, "Scale of the logits (default: 1/sqrt(head_dim))");
  app.add_flag("--sinks", o.sinks, "A sink logit per query head (gpt-oss)");
  app.add_flag("--alibi", o.alibi, "ALiBi position bias");
  app.add_flag("--bidirectional", o.bidirectional, "Queries see later keys too");
  app.add_flag("--custom-mask", o.custom_mask, "A mask byte for every query and key");
}

std::vector<NamedSpec> specs_of(const SpecOptions& o) {
  if (o.model.empty()) return {{"", {}, spec_of(o)}};
  const DType q_dtype = parse_dtype(o.q_dtype), kv_dtype = o.kv_dtype.empty() ? q_dtype : parse_dtype(o.kv_dtype);
  const ModelSpec model = load_model(o.model).with_kv(q_dtype, kv_dtype, parse_kv_format(o.kv_format), o.block_size);
  std::vector<NamedSpec> specs;
  for (const auto& kind : model.kinds()) {
    specs.push_back(
        {fmt::format("{} {}", kind.layers.size() == 1 ? "layer" : "layers", format_ranges(kind.layers)), kind.layers, kind.spec});
  }
  return specs;
}

}  // namespace imbrex::cli

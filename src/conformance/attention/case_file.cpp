// See case_file.h. The file's fields are in design order: spec, mask, then the tensors.
#include "conformance/attention/case_file.h"

#include <algorithm>
#include <type_traits>

#include "attention/kv_codec.h"
#include "attention/spec_fields.h"
#include "conformance/case_fields.h"
#include "core/check.h"

namespace imbrex {
namespace {

using nlohmann::json;

AttentionKind parse_kind(const std::string& name) {
  if (name.empty()) return AttentionKind::decoder;
  for (AttentionKind kind : {AttentionKind::decoder, AttentionKind::encoder, AttentionKind::encoder_only, AttentionKind::encoder_decoder})
    if (name == to_string(kind)) return kind;
  fail("case_file.kind", "expected decoder, encoder, encoder_only or encoder_decoder, got {}", name.substr(0, 64));
}

// A file holds a window as the keys that a query sees, itself included.
bool is_window(const SpecField& field) { return field.key == "window"; }
// What every layer says, so that a file without it is refused.
bool is_needed(const SpecField& field) { return field.feature.empty() && *field.flag == 0; }

void read_one(CaseFields& from, const SpecField& field, AttentionKind& value) { value = parse_kind(from.text(field.key.data())); }
void read_one(CaseFields&, const SpecField&, KvFormat&) {}  // no file has one
void read_one(CaseFields& from, const SpecField& field, auto& value) {
  read_field(from, field, is_needed(field), value);
  if constexpr (std::is_same_v<decltype(value), int&>) {
    if (!is_window(field) || !from.has(field.key.data())) return;
    check(value > 0, "case_file.window", "expected a window of 1 key or more, got {}", value);
    --value;
  }
}

AttentionSpec parse_spec(const json& root) {
  CaseFields top = top_fields(root, AttentionFamily::name);
  AttentionSpec spec;
  CaseFields f(top.object("spec"), "spec"), m(top.object("mask"), "mask");
  top.finish();
  for_each_field(spec, [&](const SpecField& field, auto& value) {
    if (!field.key.empty()) read_one(field.part == "mask" ? m : f, field, value);
  });
  f.finish();
  m.finish();
  // A block size the backends are asked about; verify runs several.
  spec.block_size = spec.kind == AttentionKind::encoder || spec.kind == AttentionKind::encoder_only ? 0 : 16;
  spec.validate();
  return spec;
}

json spec_json(const AttentionSpec& given) {
  AttentionSpec spec = given;
  spec.score.scale = given.scale();  // a file says the scale, and both types
  const AttentionSpec usual;
  json s, m;
  for_each_field(spec, usual, [&](const SpecField& field, const auto& value, const auto& default_value) {
    if (field.key.empty() || (value == default_value && !is_needed(field) && field.key != "q_dtype")) return;
    json& to = (field.part == "mask" ? m : s)[std::string(field.key)];
    to = json_of(value);
    if (is_window(field)) to = to.get<int>() + 1;
  });
  return {{"version", kCaseFileVersion}, {"spec", s}, {"mask", m}};
}

}  // namespace

std::vector<CaseRequest> case_requests(const HostTensor& starts, const HostTensor& lens, bool queries_are_keys) {
  std::vector<CaseRequest> requests;
  for (const int q_len : query_lens(starts)) {
    const int r = int(requests.size()), seq_len = int(lens.get(r));
    check(seq_len >= 0, "case_file.seq_lens.negative", "seq_lens[{}] is {}", r, seq_len);
    check(!queries_are_keys || seq_len >= q_len, "case_file.seq_lens.shorter_than_query", "request {} has {} queries and only {} keys", r,
          q_len, seq_len);
    requests.push_back({.q_len = q_len, .seq_len = seq_len, .id = r});
  }
  return requests;
}

HostTensor take_positions(CaseTensors& tensors, bool wanted, int64_t num_tokens) {
  HostTensor positions = tensors.take_if(wanted, "positions", DType::i32, {num_tokens});
  for (int64_t t = 0; t < positions.num_elements(); ++t)
    check(positions.get(t) >= 0 && positions.get(t) <= kMostPosition, "case_file.positions", "position of token {} is {}, expected 0 to {}",
          t, positions.get(t), kMostPosition);
  return positions;
}

HostTensor take_draft_parents(CaseTensors& tensors, bool wanted, std::span<const CaseRequest> requests) {
  int64_t first = 0;
  for (const CaseRequest& r : requests) first += r.q_len;
  HostTensor parents = tensors.take_if(wanted, "draft_parents", DType::i32, {first});
  if (parents.empty()) return parents;
  first = 0;
  for (const CaseRequest& r : requests) {
    for (int t = 0; t < r.q_len; ++t) {
      const int parent = int(parents.get(first + t));
      check(parent >= -1 && parent < t && (r.q_len <= kMostTreeTokens || parent == t - 1), "case_file.draft_parents",
            "token {} of a request of {} tokens follows token {}", t, r.q_len, parent);
    }
    first += r.q_len;
  }
  return parents;
}

void check_case_scale(const HostTensor& scale, int heads) {
  if (scale.empty()) return;
  check(scale.sizes[0] == 1 || scale.sizes[0] == heads, "case_file.scale.size", "expected 1 or {} scales, got {}", heads, scale.sizes[0]);
  for (int64_t i = 0; i < scale.sizes[0]; ++i)
    check(scale.get(i) > 0 && scale.get(i) <= 3e38, "case_file.scale.value", "expected a finite positive scale, got {}", scale.get(i));
}

// Names of the tensors of expressions begin so.
constexpr const char* kExpressionTensor = "expression.";

static std::vector<NamedHostTensor> take_expression_tensors(CaseTensors& tensors, const AttentionSpec& spec) {
  std::vector<NamedHostTensor> taken;
  for (const Expression* e : {&spec.score_mod, &spec.mask_mod})
    for (const ExpressionTensor& wanted : e->empty() ? std::span<const ExpressionTensor>() : e->tensors()) {
      if (std::ranges::find(taken, wanted.name, &NamedHostTensor::name) != taken.end()) continue;
      const DType dtype = wanted.type == ExpressionType::real      ? DType::f32
                          : wanted.type == ExpressionType::integer ? DType::i32
                                                                   : DType::u8;
      const std::string name = kExpressionTensor + wanted.name;
      taken.push_back({wanted.name, wanted.rank == 1   ? tensors.take(name.c_str(), {dtype}, {-1})
                                    : wanted.rank == 2 ? tensors.take(name.c_str(), {dtype}, {-1, -1})
                                                       : tensors.take(name.c_str(), {dtype}, {-1, -1, -1})});
    }
  return taken;
}

CaseFile parse_case(const Safetensors& file) {
  const json root = case_metadata(file);
  CaseFile c;
  CaseInputs& in = c.inputs;
  in.spec = parse_spec(root);
  const AttentionSpec& spec = in.spec;
  const int heads = spec.num_q_heads, kv_heads = spec.num_kv_heads;
  CaseTensors tensors(file);
  const bool latent = !tensors.has("v");
  if (latent) {
    check(spec.head_dim_v <= spec.head_dim_qk, "case_file.latent", "expected head_dim_v of at most {}, got {}", spec.head_dim_qk,
          spec.head_dim_v);
    check(!tensors.has("v_scale"), "case_file.latent", "expected no v_scale without v: values are a part of k and have k_scale");
    in.spec.kv_format = KvFormat::latent;
  }
  const HostTensor lens = tensors.take("seq_lens", {DType::i32}, {-1});
  const HostTensor starts = tensors.take("query_start_loc", {DType::i32}, {lens.sizes[0] + 1});
  in.requests = case_requests(starts, lens, spec.kind != AttentionKind::encoder_decoder);
  int64_t num_tokens = 0, num_keys = 0, num_pairs = 0;
  for (const CaseRequest& r : in.requests) {
    num_tokens += r.q_len;
    num_keys += r.seq_len;
    num_pairs += int64_t(r.q_len) * r.seq_len;
  }
  in.q = tensors.take("q", {spec.q_dtype}, {num_tokens, heads, spec.head_dim_qk});
  std::vector<DType> key_types{spec.kv_dtype};
  key_types.insert(key_types.end(), spec.new_kv_dtypes().begin(), spec.new_kv_dtypes().end());
  in.k = tensors.take("k", key_types, {num_keys, kv_heads, spec.head_dim_qk});
  in.v = latent ? first_elements(in.k, spec.head_dim_v) : tensors.take("v", {in.k.dtype}, {num_keys, kv_heads, spec.head_dim_v});
  in.sinks = tensors.take_if(spec.score.sinks, "sinks", DType::f32, {heads});
  in.alibi_slopes = tensors.take_if(spec.score.alibi, "alibi_slopes", DType::f32, {heads});
  in.head_scales = tensors.take_if(spec.score.head_scales, "head_scales", DType::f32, {heads});
  in.relative_bias = tensors.take_if(spec.score.relative_buckets > 0, "relative_bias", DType::f32, {spec.score.relative_buckets, heads});
  in.custom_mask = tensors.take_if(spec.mask.custom, "custom_mask", DType::u8, {num_pairs});
  in.positions = take_positions(tensors, spec.mask.positions, num_tokens);
  in.draft_parents = take_draft_parents(tensors, spec.mask.tree && tensors.has("draft_parents"), in.requests);
  in.expression_tensors = take_expression_tensors(tensors, spec);
  in.q_scale = tensors.take_if(spec.q_dtype == DType::fp8_e4m3 && tensors.has("q_scale"), "q_scale", DType::f32, {-1});
  in.k_scale = tensors.take_if(is_fp8(spec.kv_dtype) && tensors.has("k_scale"), "k_scale", DType::f32, {-1});
  in.v_scale = latent ? in.k_scale : tensors.take_if(is_fp8(spec.kv_dtype) && tensors.has("v_scale"), "v_scale", DType::f32, {-1});
  for (const HostTensor* scale : {&in.q_scale, &in.k_scale, &in.v_scale}) check_case_scale(*scale, kv_heads);
  c.out = floats_of(tensors.take("out", {DType::f32}, {num_tokens, heads, spec.head_dim_v}));
  if (tensors.has("lse")) c.lse = floats_of(tensors.take("lse", {DType::f32}, {num_tokens, heads}));
  tensors.finish();
  return c;
}

CaseFile load_case(const std::string& path) { return parse_case(load_safetensors(path)); }

Safetensors to_safetensors(const CaseFile& c) {
  const CaseInputs& in = c.inputs;
  check(in.spec.kv_format == KvFormat::strided || in.spec.kv_format == KvFormat::latent, "case_file.kv_format",
        "expected numbers of a strided or latent cache, got {}", to_string(in.spec.kv_format));
  const int64_t heads = in.spec.num_q_heads;
  std::vector<int32_t> starts{0}, lens;
  for (const CaseRequest& r : in.requests) {
    starts.push_back(starts.back() + r.q_len);
    lens.push_back(r.seq_len);
  }
  Safetensors file;
  file.metadata["imbrex"] = spec_json(in.spec).dump();
  file.tensors["q"] = in.q;
  file.tensors["k"] = in.k;
  const bool latent = codec_of(in.spec).values_in_keys;
  if (!latent) file.tensors["v"] = in.v;
  file.tensors["query_start_loc"] = tensor_of(starts);
  file.tensors["seq_lens"] = tensor_of(lens);
  file.tensors["out"] = tensor_of(c.out, {in.num_tokens(), heads, in.spec.head_dim_v});
  if (!c.lse.empty()) file.tensors["lse"] = tensor_of(c.lse, {in.num_tokens(), heads});
  const std::pair<const char*, const HostTensor*> optional[] = {{"sinks", &in.sinks},
                                                                {"alibi_slopes", &in.alibi_slopes},
                                                                {"head_scales", &in.head_scales},
                                                                {"relative_bias", &in.relative_bias},
                                                                {"q_scale", &in.q_scale},
                                                                {"k_scale", &in.k_scale},
                                                                {"v_scale", &in.v_scale},
                                                                {"custom_mask", &in.custom_mask},
                                                                {"positions", &in.positions},
                                                                {"draft_parents", &in.draft_parents}};
  for (const auto& [name, tensor] : optional)
    if (!tensor->empty() && !(latent && tensor == &in.v_scale)) file.tensors[name] = *tensor;
  for (const auto& [name, tensor] : in.expression_tensors) file.tensors[kExpressionTensor + name] = tensor;
  return file;
}

CaseFile make_case_file(const Case& c) {
  CaseFile file;
  file.inputs = make_inputs(c);
  Expected expected = expect(file.inputs);
  file.out = std::move(expected.out);
  file.lse = std::move(expected.lse);
  return file;
}

}  // namespace imbrex

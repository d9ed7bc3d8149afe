// See case_file.h. The file's fields are in design order: spec, mask, then the tensors.
#include "conformance/case_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/check.h"
#include "core/json_gate.h"

namespace imbrex {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;
constexpr int kMaxMetadataDepth = 4;  // of the metadata: root, spec; two to spare

// Reads the fields of a JSON object and refuses those that nobody asked for.
class Fields {
 public:
  Fields(const json& object, std::string path) : object_(object), path_(std::move(path)) {
    check(object.is_object(), "case_file.json.object", "{} is no object", path_);
  }
  bool has(const char* name) const { return object_.contains(name); }

  void read(const char* name, int& value) {
    number(
        name, [&](const json& j) { value = int(j.get<int64_t>()); }, true);
  }
  void read(const char* name, float& value) {
    number(
        name, [&](const json& j) { value = float(j.get<double>()); }, false);
  }
  void read(const char* name, bool& value) {
    if (const json* j = take(name)) {
      check(j->is_boolean(), "case_file.json.type", "{}.{} is no boolean", path_, name);
      value = j->get<bool>();
    }
  }
  std::string text(const char* name) {
    const json* j = take(name);
    if (j == nullptr) return {};
    check(j->is_string(), "case_file.json.type", "{}.{} is no string", path_, name);
    return j->get<std::string>();
  }
  template <class T>
  void require(const char* name, T& value) {
    check(has(name), "case_file.json.missing", "{}.{} is missing", path_, name);
    read(name, value);
  }
  const json& object(const char* name) {
    const json* j = take(name);
    check(j != nullptr, "case_file.json.missing", "{}.{} is missing", path_, name);
    return *j;
  }
  void finish() const {
    for (const auto& [name, value] : object_.items())
      check(std::find(taken_.begin(), taken_.end(), name) != taken_.end(), "case_file.json.unknown", "{}.{} is not known", path_,
            name.substr(0, 64));
  }

 private:
  const json* take(const char* name) {
    taken_.push_back(name);
    const auto it = object_.find(name);
    return it == object_.end() ? nullptr : &*it;
  }
  template <class Use>
  void number(const char* name, Use use, bool whole) {
    const json* j = take(name);
    if (j == nullptr) return;
    check(whole ? j->is_number_integer() : j->is_number(), "case_file.json.type", "{}.{} is no {}number", path_, name,
          whole ? "whole " : "");
    check(!whole || (j->is_number_unsigned() ? j->get<uint64_t>() <= INT32_MAX : j->get<int64_t>() >= INT32_MIN), "case_file.json.range",
          "{}.{} does not fit 32 bits", path_, name);
    use(*j);
  }

  const json& object_;
  std::string path_;
  std::vector<std::string> taken_;
};

AttentionKind parse_kind(const std::string& name) {
  if (name.empty()) return AttentionKind::decoder;
  for (AttentionKind kind : {AttentionKind::decoder, AttentionKind::encoder, AttentionKind::encoder_only, AttentionKind::encoder_decoder})
    if (name == to_string(kind)) return kind;
  fail("case_file.kind", "expected decoder, encoder, encoder_only or encoder_decoder, got {}", name.substr(0, 64));
}

AttentionSpec parse_spec(const json& root) {
  Fields top(root, "imbrex");
  int version = 0;
  top.require("version", version);
  check(version == kVersion, "case_file.version", "expected version {}, got {}", kVersion, version);
  AttentionSpec spec;
  Fields f(top.object("spec"), "spec"), m(top.object("mask"), "mask");
  top.finish();
  spec.kind = parse_kind(f.text("kind"));
  f.require("num_q_heads", spec.num_q_heads);
  f.require("num_kv_heads", spec.num_kv_heads);
  f.require("head_dim_qk", spec.head_dim_qk);
  f.require("head_dim_v", spec.head_dim_v);
  spec.q_dtype = parse_dtype(f.text("q_dtype"));
  spec.kv_dtype = parse_dtype(f.text("kv_dtype"));
  f.read("scale", spec.score.scale);
  f.read("soft_cap", spec.score.soft_cap);
  f.read("has_sinks", spec.score.sinks);
  f.read("alibi", spec.score.alibi);
  f.read("head_scales", spec.score.head_scales);
  f.read("relative_buckets", spec.score.relative_buckets);
  f.read("relative_max_distance", spec.score.relative_max_distance);
  f.read("relative_bidirectional", spec.score.relative_bidirectional);
  f.finish();
  m.require("causal", spec.mask.causal);
  int window = 0;
  m.read("window", window);
  check(!m.has("window") || window > 0, "case_file.window", "expected a window of 1 key or more, got {}", window);
  spec.mask.window_left = window - 1;  // the query itself is one of them
  m.read("window_right", spec.mask.window_right);
  m.read("chunk", spec.mask.chunk);
  m.read("custom", spec.mask.custom);
  m.finish();
  // A block size the backends are asked about; verify runs several.
  spec.block_size = spec.kind == AttentionKind::encoder || spec.kind == AttentionKind::encoder_only ? 0 : 16;
  spec.validate();
  return spec;
}

json spec_json(const AttentionSpec& spec) {
  json s = {{"num_q_heads", spec.num_q_heads}, {"num_kv_heads", spec.num_kv_heads},  {"head_dim_qk", spec.head_dim_qk},
            {"head_dim_v", spec.head_dim_v},   {"q_dtype", to_string(spec.q_dtype)}, {"kv_dtype", to_string(spec.kv_dtype)},
            {"scale", double(spec.scale())}};
  json m = {{"causal", spec.mask.causal}};
  if (spec.kind != AttentionKind::decoder) s["kind"] = to_string(spec.kind);
  if (spec.score.soft_cap > 0) s["soft_cap"] = double(spec.score.soft_cap);
  if (spec.score.sinks) s["has_sinks"] = true;
  if (spec.score.alibi) s["alibi"] = true;
  if (spec.score.head_scales) s["head_scales"] = true;
  if (spec.score.relative_buckets > 0) {
    s["relative_buckets"] = spec.score.relative_buckets;
    s["relative_max_distance"] = spec.score.relative_max_distance;
    s["relative_bidirectional"] = spec.score.relative_bidirectional;
  }
  if (spec.mask.window_left >= 0) m["window"] = spec.mask.window_left + 1;
  if (spec.mask.window_right >= 0) m["window_right"] = spec.mask.window_right;
  if (spec.mask.chunk > 0) m["chunk"] = spec.mask.chunk;
  if (spec.mask.custom) m["custom"] = true;
  return {{"version", kVersion}, {"spec", s}, {"mask", m}};
}

// Takes tensors out of a file by name, each with the shape and dtype it must have; -1 stands for any size.
class Tensors {
 public:
  explicit Tensors(const Safetensors& file) : file_(file) {}

  bool has(const char* name) const { return file_.tensors.contains(name); }
  HostTensor take(const char* name, const std::vector<DType>& dtypes, std::initializer_list<int64_t> sizes) {
    taken_.push_back(name);
    const auto it = file_.tensors.find(name);
    check(it != file_.tensors.end(), "case_file.tensor.missing", "tensor {} is missing", name);
    const HostTensor& t = it->second;
    check(std::find(dtypes.begin(), dtypes.end(), t.dtype) != dtypes.end(), "case_file.tensor.dtype", "tensor {}: expected {}, got {}",
          name, to_string(dtypes.front()), to_string(t.dtype));
    check(t.sizes.size() == sizes.size(), "case_file.tensor.rank", "tensor {}: expected {} dimensions, got {}", name, sizes.size(),
          t.sizes.size());
    size_t d = 0;
    for (int64_t size : sizes) {
      check(size == -1 || t.sizes[d] == size, "case_file.tensor.shape", "tensor {}: expected {} in dimension {}, got {}", name, size, d,
            t.sizes[d]);
      ++d;
    }
    return t;
  }
  // There exactly when the spec has it.
  HostTensor take_if(bool wanted, const char* name, DType dtype, std::initializer_list<int64_t> sizes) {
    return wanted ? take(name, {dtype}, sizes) : HostTensor{};
  }
  void finish() const {
    for (const auto& [name, tensor] : file_.tensors)
      check(std::find(taken_.begin(), taken_.end(), name) != taken_.end(), "case_file.tensor.unknown",
            "tensor {} is not known, or of no use here", name.substr(0, 64));
  }

 private:
  const Safetensors& file_;
  std::vector<std::string> taken_;
};

std::vector<CaseRequest> parse_requests(const HostTensor& starts, const HostTensor& lens, const AttentionSpec& spec) {
  const int64_t count = lens.sizes[0];
  check(starts.get(0) == 0, "case_file.query_start_loc.start", "expected query_start_loc[0] = 0, got {}", starts.get(0));
  std::vector<CaseRequest> requests;
  for (int64_t r = 0; r < count; ++r) {
    const double q_len = starts.get(r + 1) - starts.get(r), seq_len = lens.get(r);
    check(q_len >= 0, "case_file.query_start_loc.monotone", "query_start_loc falls at request {}", r);
    check(seq_len >= 0, "case_file.seq_lens.negative", "seq_lens[{}] is {}", r, seq_len);
    check(spec.kind == AttentionKind::encoder_decoder || seq_len >= q_len, "case_file.seq_lens.shorter_than_query",
          "request {} has {} queries and only {} keys", r, q_len, seq_len);
    requests.push_back({.q_len = int(q_len), .seq_len = int(seq_len), .id = int(r)});
  }
  return requests;
}

// MLA files carry one latent for both: the values are its first head_dim_v elements.
HostTensor values_of_latent(const HostTensor& k, int head_dim_v) {
  check(head_dim_v <= k.sizes[2], "case_file.latent", "expected head_dim_v of at most {}, got {}", k.sizes[2], head_dim_v);
  HostTensor v = HostTensor::make(k.dtype, {k.sizes[0], k.sizes[1], head_dim_v});
  for (int64_t row = 0; row < k.sizes[0] * k.sizes[1]; ++row)
    std::copy_n(k.bytes.begin() + row * k.sizes[2] * size_of(k.dtype), head_dim_v * size_of(k.dtype),
                v.bytes.begin() + row * head_dim_v * size_of(k.dtype));
  return v;
}

std::vector<float> floats(const HostTensor& t) {
  std::vector<float> values(size_t(t.num_elements()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(t.get(int64_t(i)));
  return values;
}

HostTensor from_values(DType dtype, std::vector<int64_t> sizes, const auto& values) {
  HostTensor t = HostTensor::make(dtype, std::move(sizes));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::i32) {
      const int32_t value = int32_t(values[i]);
      std::copy_n(reinterpret_cast<const char*>(&value), sizeof value, t.bytes.begin() + long(i * sizeof value));
    } else {
      t.set(int64_t(i), values[i]);
    }
  }
  return t;
}

}  // namespace

CaseFile parse_case(const Safetensors& file) {
  const auto text = file.metadata.find("imbrex");
  check(text != file.metadata.end(), "case_file.metadata", "the file has no metadata key imbrex");
  json root;
  try {
    root = parse_json(text->second, kMaxMetadataDepth);
  } catch (const JsonProblem& p) {
    check(p.kind != JsonProblem::depth, "case_file.json.depth", "the metadata nests deeper than {} levels", kMaxMetadataDepth);
    check(p.kind != JsonProblem::duplicate, "case_file.json.duplicate", "the metadata has the key {} twice in one object",
          p.name.substr(0, 64));
    fail("case_file.json.syntax", "the metadata imbrex is not JSON");
  }
  CaseFile c;
  CaseInputs& in = c.inputs;
  in.spec = parse_spec(root);
  const AttentionSpec& spec = in.spec;
  const int heads = spec.num_q_heads, kv_heads = spec.num_kv_heads;
  Tensors tensors(file);
  const HostTensor lens = tensors.take("seq_lens", {DType::i32}, {-1});
  const HostTensor starts = tensors.take("query_start_loc", {DType::i32}, {lens.sizes[0] + 1});
  in.requests = parse_requests(starts, lens, spec);
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
  in.v =
      tensors.has("v") ? tensors.take("v", {in.k.dtype}, {num_keys, kv_heads, spec.head_dim_v}) : values_of_latent(in.k, spec.head_dim_v);
  in.sinks = tensors.take_if(spec.score.sinks, "sinks", DType::f32, {heads});
  in.alibi_slopes = tensors.take_if(spec.score.alibi, "alibi_slopes", DType::f32, {heads});
  in.head_scales = tensors.take_if(spec.score.head_scales, "head_scales", DType::f32, {heads});
  in.relative_bias = tensors.take_if(spec.score.relative_buckets > 0, "relative_bias", DType::f32, {spec.score.relative_buckets, heads});
  in.custom_mask = tensors.take_if(spec.mask.custom, "custom_mask", DType::u8, {num_pairs});
  in.q_scale = tensors.take_if(spec.q_dtype == DType::fp8_e4m3 && tensors.has("q_scale"), "q_scale", DType::f32, {-1});
  in.k_scale = tensors.take_if(is_fp8(spec.kv_dtype) && tensors.has("k_scale"), "k_scale", DType::f32, {-1});
  in.v_scale = tensors.take_if(is_fp8(spec.kv_dtype) && tensors.has("v_scale"), "v_scale", DType::f32, {-1});
  for (const HostTensor* scale : {&in.q_scale, &in.k_scale, &in.v_scale}) {
    check(scale->empty() || scale->sizes[0] == 1 || scale->sizes[0] == kv_heads, "case_file.scale.size", "expected 1 or {} scales, got {}",
          kv_heads, scale->empty() ? 0 : scale->sizes[0]);
    for (int64_t i = 0; i < (scale->empty() ? 0 : scale->sizes[0]); ++i)
      check(scale->get(i) > 0 && scale->get(i) <= 3e38, "case_file.scale.value", "expected a finite positive scale, got {}", scale->get(i));
  }
  c.out = floats(tensors.take("out", {DType::f32}, {num_tokens, heads, spec.head_dim_v}));
  if (tensors.has("lse")) c.lse = floats(tensors.take("lse", {DType::f32}, {num_tokens, heads}));
  tensors.finish();
  return c;
}

CaseFile load_case(const std::string& path) { return parse_case(load_safetensors(path)); }

Safetensors to_safetensors(const CaseFile& c) {
  const CaseInputs& in = c.inputs;
  const int64_t heads = in.spec.num_q_heads, count = int64_t(in.requests.size());
  std::vector<int32_t> starts{0}, lens;
  for (const CaseRequest& r : in.requests) {
    starts.push_back(starts.back() + r.q_len);
    lens.push_back(r.seq_len);
  }
  Safetensors file;
  file.metadata["imbrex"] = spec_json(in.spec).dump();
  file.tensors["q"] = in.q;
  file.tensors["k"] = in.k;
  file.tensors["v"] = in.v;
  file.tensors["query_start_loc"] = from_values(DType::i32, {count + 1}, starts);
  file.tensors["seq_lens"] = from_values(DType::i32, {count}, lens);
  file.tensors["out"] = from_values(DType::f32, {in.num_tokens(), heads, in.spec.head_dim_v}, c.out);
  if (!c.lse.empty()) file.tensors["lse"] = from_values(DType::f32, {in.num_tokens(), heads}, c.lse);
  const std::pair<const char*, const HostTensor*> optional[] = {
      {"sinks", &in.sinks},     {"alibi_slopes", &in.alibi_slopes}, {"head_scales", &in.head_scales}, {"relative_bias", &in.relative_bias},
      {"q_scale", &in.q_scale}, {"k_scale", &in.k_scale},           {"v_scale", &in.v_scale},         {"custom_mask", &in.custom_mask}};
  for (const auto& [name, tensor] : optional)
    if (!tensor->empty()) file.tensors[name] = *tensor;
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

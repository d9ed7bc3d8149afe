// See case_file.h.
#include "conformance/mla/case_file.h"

#include <fmt/format.h>

#include <cstring>
#include <type_traits>

#include "conformance/attention/case_file.h"
#include "conformance/case_fields.h"
#include "core/check.h"
#include "mla/spec_fields.h"

namespace imbrex {
namespace {

using nlohmann::json;

constexpr const char* kMlaFamily = "mla";

// What every file says: types and dimensions.
bool every_file_has(const SpecField& field) {
  return field.part == "spec" && field.feature.empty() && field.key != "scale" && field.key != "absorbed";
}
bool is_window_of_mla(const SpecField& field) { return field.key == "window"; }

MlaSpec parse_mla_spec(const json& root) {
  CaseFields top = top_fields(root, kMlaFamily);
  CaseFields f(top.object("spec"), "spec"), m(top.object("mask"), "mask");
  top.finish();
  MlaSpec spec;
  for_each_field(spec, [&](const SpecField& field, auto& value) {
    if constexpr (!std::is_same_v<decltype(value), KvFormat&>) {
      if (field.key.empty()) return;
      CaseFields& from = field.part == "mask" ? m : f;
      read_field(from, field, every_file_has(field), value);
      if constexpr (std::is_same_v<decltype(value), int&>) {
        if (!is_window_of_mla(field) || !from.has(field.key.data())) return;
        check(value > 0, "case_file.window", "expected a window of 1 key or more, got {}", value);
        --value;
      }
    }
  });
  f.finish();
  m.finish();
  spec.validate();
  check(spec.q_dim() <= spec.latent_dim() && spec.out_dim() <= spec.kv_lora_rank, "case_file.mla",
        "expected queries of at most {} elements and values of at most {}, got {} and {}", spec.latent_dim(), spec.kv_lora_rank,
        spec.q_dim(), spec.out_dim());
  return spec;
}

// Rows of a tensor [.., dim] cut to their first elements, or filled up with zeros.
HostTensor with_rows_of(const HostTensor& t, int64_t dim) {
  HostTensor result = HostTensor::make(t.dtype, {t.sizes[0], t.sizes[1], dim});
  const int64_t from = t.sizes[2], size = size_of(t.dtype), kept = std::min(from, dim);
  for (int64_t row = 0; row < t.sizes[0] * t.sizes[1]; ++row)
    std::memcpy(result.bytes.data() + row * dim * size, t.bytes.data() + row * from * size, size_t(kept * size));
  return result;
}

std::vector<RunOptions> mla_variants(const MlaSpec& spec) {
  std::vector<RunOptions> all;
  const auto add = [&](int block_size, const char* order, bool csr) {
    RunOptions o;
    o.kv_format = spec.kv_format;
    o.block_size = block_size;
    o.order = order;
    o.csr = csr;
    o.page_seed = all.size() + 1;
    o.out_dtype = all.size() % 2 == 0 ? spec.dtype : DType::f32;
    all.push_back(o);
  };
  add(1, "lbthd", true);
  add(16, "lbhtd", false);
  add(64, "blhtd", false);
  add(128, "hlbtd", true);
  return all;
}

}  // namespace

MlaCaseFile parse_mla_case(const Safetensors& file) {
  MlaCaseFile c;
  c.inputs.spec = parse_mla_spec(case_metadata(file));
  const MlaSpec& spec = c.inputs.spec;
  CaseInputs& in = c.inputs.attention;
  in.spec = spec.latent_spec();
  CaseTensors tensors(file);
  const HostTensor lens = tensors.take("seq_lens", {DType::i32}, {-1});
  const HostTensor starts = tensors.take("query_start_loc", {DType::i32}, {lens.sizes[0] + 1});
  in.requests = case_requests(starts, lens, true);
  int64_t num_tokens = 0, num_keys = 0, num_pairs = 0;
  for (const CaseRequest& r : in.requests) num_tokens += r.q_len, num_keys += r.seq_len, num_pairs += int64_t(r.q_len) * r.seq_len;
  in.q = with_rows_of(tensors.take("q", {spec.dtype}, {num_tokens, spec.num_heads, spec.q_dim()}), spec.latent_dim());
  in.k = tensors.take("latents", {spec.kv_dtype, spec.dtype}, {num_keys, spec.latent_dim()});
  in.k.sizes = {num_keys, 1, spec.latent_dim()};
  in.v = first_elements(in.k, spec.kv_lora_rank);
  if (!spec.absorbed)
    c.inputs.kv_b = tensors.take("kv_b", {spec.dtype}, {spec.num_heads, int64_t(spec.qk_nope_dim) + spec.v_dim, spec.kv_lora_rank});
  in.sinks = tensors.take_if(spec.sinks, "sinks", DType::f32, {spec.num_heads});
  in.custom_mask = tensors.take_if(spec.mask.custom, "custom_mask", DType::u8, {num_pairs});
  in.positions = take_positions(tensors, spec.mask.positions, num_tokens);
  in.draft_parents = take_draft_parents(tensors, spec.mask.tree && tensors.has("draft_parents"), in.requests);
  in.k_scale = in.v_scale = tensors.take_if(is_fp8(spec.kv_dtype) && tensors.has("scale"), "scale", DType::f32, {1});
  check_case_scale(in.k_scale, 1);
  c.out = floats_of(tensors.take("out", {DType::f32}, {num_tokens, spec.num_heads, spec.out_dim()}));
  if (tensors.has("lse")) c.lse = floats_of(tensors.take("lse", {DType::f32}, {num_tokens, spec.num_heads}));
  tensors.finish();
  return c;
}

Safetensors to_safetensors(const MlaCaseFile& c) {
  const MlaSpec& spec = c.inputs.spec;
  const CaseInputs& in = c.inputs.attention;
  std::vector<int32_t> starts{0}, lens;
  for (const CaseRequest& r : in.requests) starts.push_back(starts.back() + r.q_len), lens.push_back(r.seq_len);
  json s, m = json::object();
  const MlaSpec usual;
  for_each_field(spec, usual, [&](const SpecField& field, const auto& value, const auto& default_value) {
    if (field.key.empty() || (value == default_value && !every_file_has(field))) return;
    json& to = (field.part == "mask" ? m : s)[std::string(field.key)];
    to = json_of(value);
    if (is_window_of_mla(field)) to = to.get<int>() + 1;
  });
  Safetensors file;
  file.metadata["imbrex"] = json{{"version", kCaseFileVersion}, {"family", kMlaFamily}, {"spec", s}, {"mask", m}}.dump();
  file.tensors["query_start_loc"] = tensor_of(starts);
  file.tensors["seq_lens"] = tensor_of(lens);
  file.tensors["q"] = with_rows_of(in.q, spec.q_dim());
  file.tensors["latents"] = in.k;
  file.tensors["latents"].sizes = {in.k.sizes[0], spec.latent_dim()};
  const std::pair<const char*, const HostTensor*> optional[] = {{"kv_b", &c.inputs.kv_b},
                                                                {"sinks", &in.sinks},
                                                                {"custom_mask", &in.custom_mask},
                                                                {"positions", &in.positions},
                                                                {"draft_parents", &in.draft_parents},
                                                                {"scale", &in.k_scale}};
  for (const auto& [name, tensor] : optional)
    if (!tensor->empty()) file.tensors[name] = *tensor;
  file.tensors["out"] = tensor_of(c.out, {in.num_tokens(), spec.num_heads, spec.out_dim()});
  if (!c.lse.empty()) file.tensors["lse"] = tensor_of(c.lse, {in.num_tokens(), spec.num_heads});
  return file;
}

MlaCaseFile make_case_file(const MlaCase& c) {
  MlaCaseFile file{.inputs = make_inputs(c), .out = {}, .lse = {}};
  Expected expected = expect(file.inputs);
  file.out = std::move(expected.out);
  file.lse = std::move(expected.lse);
  return file;
}

std::vector<VerifyRow> verify_case(const MlaCaseFile& file, const DeviceInfo& device,
                                   std::span<const BackendOf<MlaFamily>* const> backends) {
  Expected expected = expect(file.inputs);  // a wrong result must not widen the bounds
  expected.out = file.out;
  expected.lse = file.lse;
  std::vector<VerifyRow> rows;
  for (const BackendOf<MlaFamily>* backend : backends) {
    if (const auto reasons = backend->unsupported(file.inputs.spec, device); !reasons.empty()) {
      rows.push_back({std::string(backend->name()), {}, joined(reasons), {}, {}, {}});
      continue;
    }
    for (RunOptions options : mla_variants(file.inputs.spec)) {
      options.poison = Poison::nan;
      const RunResult result = run_case(*backend, device, file.inputs, options);
      Judgement judgement = judge(expected, result);
      options.poison = Poison::ones;
      const RunResult again = run_case(*backend, device, file.inputs, options);
      if (judgement.pass() && !(bit_identical(result.out, again.out) && bit_identical(result.lse, again.lse)))
        judgement.failure = "bytes that no request owns change the result";
      rows.push_back({std::string(backend->name()),
                      fmt::format("page {} {} {}", options.block_size, options.csr ? "csr" : "dense", options.order),
                      {},
                      judgement.out,
                      {expected.bounds.max, expected.bounds.mean},
                      std::move(judgement.failure)});
    }
  }
  return rows;
}

}  // namespace imbrex

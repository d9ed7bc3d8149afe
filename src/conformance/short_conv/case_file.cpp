// See case_file.h.
#include "conformance/short_conv/case_file.h"

#include <fmt/format.h>

#include <cstring>

#include "conformance/case_fields.h"
#include "conformance/state_case_file.h"
#include "core/check.h"
#include "short_conv/spec_fields.h"

namespace imbrex {
namespace {

using nlohmann::json;

constexpr const char* kFamily = "short_conv";

// The tensor that holds the rows of a token, by what they are.
const char* input_name(const ShortConvSpec& spec) { return spec.form == ShortConvForm::gated ? "bcx" : "x"; }

// A file without a field that every layer has is refused.
bool every_layer_has(const SpecField& field) { return field.feature.empty(); }

ShortConvSpec parse_conv_spec(const json& root) {
  CaseFields top = top_fields(root, kFamily);
  CaseFields f(top.object("spec"), "spec");
  top.finish();
  ShortConvSpec spec;
  for_each_field(spec, [&](const SpecField& field, auto& value) {
    if (!field.key.empty()) read_field(f, field, every_layer_has(field), value);
  });
  f.finish();
  spec.validate();
  return spec;
}

struct ConvVariant {
  std::string name;
  ShortConvRunOptions options;
};

std::vector<ConvVariant> conv_variants(const ShortConvCaseInputs& in) {
  std::vector<ConvVariant> all;
  for (const Gaps gaps : {Gaps::none, Gaps::aligned, Gaps::odd}) {
    ConvVariant v{fmt::format("gaps {}", to_string(gaps)), {}};
    v.options.gaps = gaps;
    v.options.slot_seed = all.size() + 1;
    v.options.padding_tokens = int(all.size());
    all.push_back(std::move(v));
  }
  if (!have_no_drafts(in.requests)) return all;
  all.push_back({"token by token", {}});
  all.back().options.chunk = 1;
  return all;
}

}  // namespace

ShortConvCaseFile parse_short_conv_case(const Safetensors& file) {
  ShortConvCaseFile c;
  ShortConvCaseInputs& in = c.inputs;
  in.spec = parse_conv_spec(case_metadata(file));
  const ShortConvSpec& spec = in.spec;
  const int64_t dim = spec.dim;
  CaseTensors tensors(file);
  in.requests = take_state_requests(tensors, StateDrafts(spec));
  const int64_t count = int64_t(in.requests.size());
  int64_t num_tokens = 0;
  for (const ShortConvCaseRequest& r : in.requests) num_tokens += r.q_len;
  in.input = tensors.take(input_name(spec), {spec.dtype}, {num_tokens, spec.input_channels()});
  in.weight = tensors.take("weight", {spec.dtype}, {dim, spec.width});
  in.bias = tensors.take_if(spec.bias, "bias", spec.dtype, {dim});
  in.state = tensors.take("state", {spec.dtype}, {count, spec.state_rows(), dim});
  c.out = floats_of(tensors.take("out", {DType::f32}, {num_tokens, dim}));
  c.state_out = tensors.take("state_out", {spec.dtype}, {count, spec.state_rows(), dim});
  tensors.finish();
  // Rows that a step does not write belong to no request, and are zero in a result.
  const size_t row_bytes = size_t(dim * size_of(spec.dtype)), slot_bytes = row_bytes * size_t(spec.state_rows());
  for (size_t r = 0; r < in.requests.size(); ++r) {
    char* const slot = c.state_out.bytes.data() + r * slot_bytes;
    const size_t written = size_t(in.written_rows(r).end) * row_bytes;
    if (in.requests[r].writes_state()) {
      std::memset(slot + written, 0, slot_bytes - written);
    } else {
      std::memcpy(slot, in.state.bytes.data() + r * slot_bytes, slot_bytes);
    }
  }
  return c;
}

Safetensors to_safetensors(const ShortConvCaseFile& c) {
  const ShortConvCaseInputs& in = c.inputs;
  const ShortConvSpec& spec = in.spec;
  const ShortConvSpec usual;
  json s;
  for_each_field(spec, usual, [&](const SpecField& field, const auto& value, const auto& default_value) {
    if (!field.key.empty() && (every_layer_has(field) || value != default_value)) s[std::string(field.key)] = json_of(value);
  });
  Safetensors file;
  file.metadata["imbrex"] = json{{"version", kCaseFileVersion}, {"family", kFamily}, {"spec", s}}.dump();
  add_state_requests(file, in.requests, StateDrafts(spec));
  file.tensors[input_name(spec)] = in.input;
  file.tensors["weight"] = in.weight;
  if (spec.bias) file.tensors["bias"] = in.bias;
  file.tensors["state"] = in.state;
  file.tensors["out"] = tensor_of(c.out, {in.num_tokens(), spec.dim});
  file.tensors["state_out"] = c.state_out;
  return file;
}

ShortConvCaseFile make_case_file(const ShortConvCase& c) {
  ShortConvCaseFile file;
  file.inputs = make_inputs(c);
  ShortConvExpected expected = expect(file.inputs);
  file.out.assign(expected.out.begin(), expected.out.end());
  file.state_out = std::move(expected.state);
  return file;
}

std::vector<VerifyRow> verify_case(const ShortConvCaseFile& file, const DeviceInfo& device,
                                   std::span<const BackendOf<ShortConvFamily>* const> backends) {
  const ShortConvCaseInputs& in = file.inputs;
  const ShortConvExpected expected = expect(in, file.out, file.state_out);
  std::vector<VerifyRow> rows;
  for (const BackendOf<ShortConvFamily>* backend : backends) {
    if (const auto reasons = backend->unsupported(in.spec, device); !reasons.empty()) {
      rows.push_back({std::string(backend->name()), {}, joined(reasons), {}, {}, {}});
      continue;
    }
    for (ConvVariant& variant : conv_variants(in)) {
      variant.options.poison = Poison::nan;
      const ShortConvRunResult result = run_case(*backend, device, in, variant.options);
      ShortConvJudgement judgement = judge(expected, in, result);
      variant.options.poison = Poison::ones;
      const ShortConvRunResult again = run_case(*backend, device, in, variant.options);
      if (judgement.pass() && !(bit_identical(result.out, again.out) && result.state.bytes == again.state.bytes))
        judgement.failure = "bytes that no request owns change the result";
      rows.push_back({std::string(backend->name()), variant.name, {}, judgement.error, judgement.bound, std::move(judgement.failure)});
    }
  }
  return rows;
}

}  // namespace imbrex

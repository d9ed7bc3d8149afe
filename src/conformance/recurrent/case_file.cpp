// See case_file.h.
#include "conformance/recurrent/case_file.h"

#include <fmt/format.h>

#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include "conformance/case_fields.h"
#include "conformance/state_case_file.h"
#include "core/check.h"
#include "recurrent/spec_fields.h"

namespace imbrex {
namespace {

using nlohmann::json;

constexpr std::string_view kRecurrentFamilyName = "recurrent";

// A file without a field that every layer has is refused; the gate's limits and the scale have values that mean the usual.
bool every_recurrent_layer_has(const SpecField& field) {
  return field.feature.empty() && field.member != "gate_min" && field.member != "gate_max" && field.member != "scale";
}

template <class Enum>
Enum recurrent_name(const std::string& text, std::string_view key, std::initializer_list<Enum> values) {
  std::string names;
  for (const Enum value : values) {
    if (text == to_string(value)) return value;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", to_string(value));
  }
  fail("case_file.kind", "{}: expected one of {}, got {}", key, names, text.substr(0, 64));
}

// Of files that have it: most layers have none.
template <class Enum>
void read_optional_name(CaseFields& from, const SpecField& field, Enum& value, std::initializer_list<Enum> values) {
  if (from.has(field.key.data())) value = recurrent_name(from.text(field.key.data()), field.key, values);
}

template <class Value>
void read_recurrent_field(CaseFields& from, const SpecField& field, Value& value) {
  using G = RecurrentGate;
  if constexpr (std::is_same_v<Value, RecurrentGate>)
    value = recurrent_name(from.text(field.key.data()), field.key, {G::fixed, G::log, G::softplus, G::sigmoid});
  else if constexpr (std::is_same_v<Value, StateLayout>)
    value = recurrent_name(from.text(field.key.data()), field.key, {StateLayout::k_first, StateLayout::v_first});
  else if constexpr (std::is_same_v<Value, RecurrentConv>)
    read_optional_name(from, field, value, {RecurrentConv::none, RecurrentConv::qkv, RecurrentConv::vkq});
  else if constexpr (std::is_same_v<Value, OutputGate>)
    read_optional_name(from, field, value, {OutputGate::none, OutputGate::silu, OutputGate::sigmoid});
  else if constexpr (std::is_same_v<Value, OutputNorm>)
    read_optional_name(from, field, value, {OutputNorm::none, OutputNorm::before_gate, OutputNorm::after_gate});
  else
    read_field(from, field, every_recurrent_layer_has(field), value);
}

RecurrentSpec parse_recurrent_spec(const json& root) {
  CaseFields top = top_fields(root, kRecurrentFamilyName);
  CaseFields f(top.object("spec"), "spec");
  top.finish();
  RecurrentSpec spec;
  for_each_field(spec, [&](const SpecField& field, auto& value) {
    if (!field.key.empty()) read_recurrent_field(f, field, value);
  });
  f.finish();
  spec.validate();
  return spec;
}

// The last two dimensions of states in files are in the order of the layout; those of a case are named [head_dim_k, head_dim_v] for any.
HostTensor swapped_dims(HostTensor state, const RecurrentSpec& spec) {
  if (spec.layout == StateLayout::v_first) std::swap(state.sizes[3], state.sizes[4]);
  return state;
}

// Gates and betas of a head have a dimension of one head in cases.
HostTensor with_one_head(HostTensor t) {
  if (t.sizes.size() == 2) t.sizes = {t.sizes[0], 1, t.sizes[1]};
  return t;
}
HostTensor without_one_head(HostTensor t, bool of_channels) {
  if (!of_channels) t.sizes = {t.sizes[0], t.sizes[2]};
  return t;
}

// Files have a weight of the norm for each head.
HostTensor with_all_heads(const HostTensor& weight, const RecurrentSpec& spec) {
  if (weight.sizes.size() == 2) return weight;
  HostTensor t = HostTensor::make(weight.dtype, {spec.num_v_heads, spec.head_dim_v});
  for (int64_t i = 0; i < t.num_elements(); ++i) t.set(i, weight.get(i % spec.head_dim_v));
  return t;
}

// Rows that a step does not write belong to no request: they are zero in a result, and so are rows that it does not read before it.
void clear_other_rows(const RecurrentCaseInputs& in, size_t row_bytes, char* state, const auto& kept) {
  for (size_t r = 0; r < in.requests.size(); ++r)
    for (int row = 0; row < in.spec.state_rows(); ++row)
      if (!kept(in.requests[r], row)) std::memset(state + (r * size_t(in.spec.state_rows()) + size_t(row)) * row_bytes, 0, row_bytes);
}

// The same of the rows that the convolution keeps; what a request without tokens keeps is what it had.
void clear_other_conv_rows(RecurrentCaseInputs& in, HostTensor& after) {
  const ShortConvCaseInputs conv = in.conv();
  const auto row_bytes = size_t(in.spec.conv_channels() * size_of(in.spec.dtype));
  for (size_t r = 0; r < in.requests.size(); ++r)
    for (int row = 0; row < in.spec.conv_state_rows(); ++row) {
      const size_t at = (r * size_t(in.spec.conv_state_rows()) + size_t(row)) * row_bytes;
      const auto holds = [row](const ShortConvCaseInputs::Rows& rows) { return rows.begin <= row && row < rows.end; };
      if (!holds(conv.past_rows(r))) std::memset(in.conv_state.bytes.data() + at, 0, row_bytes);
      if (!in.requests[r].writes_state())
        std::memcpy(after.bytes.data() + at, in.conv_state.bytes.data() + at, row_bytes);
      else if (!holds(conv.written_rows(r)))
        std::memset(after.bytes.data() + at, 0, row_bytes);
    }
}

struct RecurrentVariant {
  std::string name;
  RecurrentRunOptions options;
};

std::vector<RecurrentVariant> recurrent_variants(const RecurrentCaseInputs& in) {
  std::vector<RecurrentVariant> all;
  for (const Gaps gaps : {Gaps::none, Gaps::aligned, Gaps::odd}) {
    RecurrentVariant v{fmt::format("gaps {}", to_string(gaps)), {}};
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

// The results of the file, and how far a backend's may be from them, which follows from the inputs alone.
RecurrentExpected expected_of(const RecurrentCaseFile& file, int chunk, bool products) {
  RecurrentExpected expected = expect(file.inputs, chunk, products);
  expected.out.assign(file.out.begin(), file.out.end());
  expected.state.assign(file.state_out.begin(), file.state_out.end());
  expected.conv_state = file.conv_state_out;
  return expected;
}

}  // namespace

RecurrentCaseFile parse_recurrent_case(const Safetensors& file) {
  RecurrentCaseFile c;
  RecurrentCaseInputs& in = c.inputs;
  in.spec = parse_recurrent_spec(case_metadata(file));
  const RecurrentSpec& spec = in.spec;
  const int64_t k_heads = spec.num_k_heads, v_heads = spec.num_v_heads, k = spec.head_dim_k, v = spec.head_dim_v;
  CaseTensors tensors(file);
  in.requests = take_state_requests(tensors, StateDrafts(spec));
  const int64_t count = int64_t(in.requests.size()), tokens = num_tokens(in.requests);
  const auto of_tokens = [&](bool wanted, const char* name, bool of_channels) {
    if (!wanted) return HostTensor{};
    const std::vector<DType> types{spec.dtype, DType::f32};
    return with_one_head(of_channels ? tensors.take(name, types, {tokens, v_heads, k}) : tensors.take(name, types, {tokens, v_heads}));
  };
  const auto parameter = [&](bool wanted, const char* name, bool of_channels) {
    return of_channels ? tensors.take_if(wanted, name, DType::f32, {v_heads, k}) : tensors.take_if(wanted, name, DType::f32, {v_heads});
  };
  if (in.has_conv()) {
    const int64_t channels = spec.conv_channels();
    const auto conv_state = [&](const char* name) { return tensors.take(name, {spec.dtype}, {count, spec.conv_state_rows(), channels}); };
    in.input = tensors.take("input", {spec.dtype}, {tokens, channels});
    in.input.sizes = {tokens, 1, channels};
    in.conv_weight = tensors.take("conv_weight", {spec.dtype}, {channels, spec.conv_width});
    in.conv_bias = tensors.take_if(spec.conv_bias, "conv_bias", spec.dtype, {channels});
    in.conv_state = conv_state("conv_state"), c.conv_state_out = conv_state("conv_state_out");
    clear_other_conv_rows(in, c.conv_state_out);
  } else {
    in.q = tensors.take("q", {spec.dtype}, {tokens, k_heads, k});
    in.k = tensors.take("k", {spec.dtype}, {tokens, k_heads, k});
    in.v = tensors.take("v", {spec.dtype}, {tokens, v_heads, v});
  }
  in.gate = of_tokens(spec.gate != RecurrentGate::fixed, "gate", spec.channel_gate);
  in.beta = of_tokens(spec.delta, "beta", false);
  in.rates = parameter(spec.gate != RecurrentGate::log, "rates", spec.channel_rates);
  const bool may_have_bias = spec.gate == RecurrentGate::softplus || spec.gate == RecurrentGate::sigmoid;
  in.gate_bias = parameter(may_have_bias && tensors.has("gate_bias"), "gate_bias", spec.channel_gate);
  in.skip = parameter(spec.skip, "skip", false);
  if (spec.out_gate != OutputGate::none) in.z = tensors.take("z", {spec.dtype}, {tokens, v_heads, v});
  if (spec.out_norm != OutputNorm::none) in.norm_weight = tensors.take("norm_weight", {spec.dtype, DType::f32}, {v_heads, v});
  const bool k_first = spec.layout == StateLayout::k_first;
  const auto state = [&](const char* name, DType type) {
    return swapped_dims(tensors.take(name, {type}, {count, spec.state_rows(), v_heads, k_first ? k : v, k_first ? v : k}), spec);
  };
  in.state = state("state", spec.state_dtype);
  c.out = floats_of(tensors.take("out", {DType::f32}, {tokens, v_heads, v}));
  c.state_out = floats_of(state("state_out", DType::f32));
  tensors.finish();

  clear_other_rows(in, size_t(in.row_numbers() * size_of(spec.state_dtype)), in.state.bytes.data(),
                   [](const StateCaseRequest& r, int row) { return r.context_len > 0 && row == r.accepted; });
  const auto row_numbers = size_t(in.row_numbers());
  clear_other_rows(in, row_numbers * sizeof(float), reinterpret_cast<char*>(c.state_out.data()),
                   [](const StateCaseRequest& r, int row) { return r.writes_state() && row <= r.drafts; });
  for (size_t r = 0; r < in.requests.size(); ++r) {  // a request that writes none keeps its state
    const size_t slot = row_numbers * size_t(spec.state_rows());
    for (size_t i = 0; !in.requests[r].writes_state() && i < slot; ++i)
      c.state_out[r * slot + i] = float(in.state.get(int64_t(r * slot + i)));
  }
  return c;
}

Safetensors to_safetensors(const RecurrentCaseFile& c) {
  const RecurrentCaseInputs& in = c.inputs;
  const RecurrentSpec& spec = in.spec;
  const RecurrentSpec usual;
  json s;
  for_each_field(spec, usual, [&](const SpecField& field, const auto& value, const auto& default_value) {
    if (!field.key.empty() && (every_recurrent_layer_has(field) || value != default_value)) s[std::string(field.key)] = json_of(value);
  });
  Safetensors file;
  file.metadata["imbrex"] = json{{"version", kCaseFileVersion}, {"family", kRecurrentFamilyName}, {"spec", s}}.dump();
  add_state_requests(file, in.requests, StateDrafts(spec));
  for (const auto& [name, t] : {std::pair{"q", &in.q},
                                {"k", &in.k},
                                {"v", &in.v},
                                {"rates", &in.rates},
                                {"gate_bias", &in.gate_bias},
                                {"skip", &in.skip},
                                {"z", &in.z},
                                {"conv_weight", &in.conv_weight},
                                {"conv_bias", &in.conv_bias},
                                {"conv_state", &in.conv_state},
                                {"conv_state_out", &c.conv_state_out}})
    if (!t->empty()) file.tensors[name] = *t;
  if (in.has_conv()) {
    HostTensor input = in.input;
    input.sizes = {in.input.sizes[0], in.input.sizes[2]};
    file.tensors["input"] = std::move(input);
  }
  if (!in.gate.empty()) file.tensors["gate"] = without_one_head(in.gate, spec.channel_gate);
  if (!in.beta.empty()) file.tensors["beta"] = without_one_head(in.beta, false);
  if (!in.norm_weight.empty()) file.tensors["norm_weight"] = with_all_heads(in.norm_weight, spec);
  file.tensors["state"] = swapped_dims(in.state, spec);
  file.tensors["out"] = tensor_of(c.out, {num_tokens(in.requests), spec.num_v_heads, spec.head_dim_v});
  file.tensors["state_out"] = tensor_of(c.state_out, swapped_dims(in.state, spec).sizes);
  return file;
}

RecurrentCaseFile make_case_file(const RecurrentCase& c) {
  RecurrentCaseFile file{.inputs = make_inputs(c), .out = {}, .state_out = {}, .conv_state_out = {}};
  const RecurrentExpected expected = expect(file.inputs, 0);
  file.out.assign(expected.out.begin(), expected.out.end());
  file.state_out.assign(expected.state.begin(), expected.state.end());
  file.conv_state_out = expected.conv_state;
  return file;
}

std::vector<VerifyRow> verify_case(const RecurrentCaseFile& file, const DeviceInfo& device,
                                   std::span<const BackendOf<RecurrentFamily>* const> backends) {
  const RecurrentCaseInputs& in = file.inputs;
  std::vector<VerifyRow> rows;
  for (const BackendOf<RecurrentFamily>* backend : backends) {
    if (const auto reasons = backend->unsupported(in.spec, device); !reasons.empty()) {
      rows.push_back({std::string(backend->name()), {}, joined(reasons), {}, {}, {}});
      continue;
    }
    const bool products = backend->plan(in.spec, device, {.limits = limits_of(in.requests)})->rounded_products();
    const RecurrentExpected in_one_step = expected_of(file, 0, products), by_tokens = expected_of(file, 1, products);
    for (RecurrentVariant& variant : recurrent_variants(in)) {
      variant.options.poison = Poison::nan;
      const RecurrentRunResult result = run_case(*backend, device, in, variant.options);
      RecurrentJudgement judgement = judge(variant.options.chunk > 0 ? by_tokens : in_one_step, in, result);
      variant.options.poison = Poison::ones;
      const RecurrentRunResult again = run_case(*backend, device, in, variant.options);
      if (judgement.pass() && !same_bits(result, again)) judgement.failure = "bytes that no request owns change the result";
      rows.push_back({std::string(backend->name()), variant.name, {}, judgement.error, judgement.bound, std::move(judgement.failure)});
    }
  }
  return rows;
}

}  // namespace imbrex

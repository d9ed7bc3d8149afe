// See step.h.
#include "recurrent/step.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "family/begin_plan.h"
#include "recurrent/inputs.h"

namespace imbrex {
namespace {

// A tensor as run() wants it: with so many rows or more, and rows of these sizes, the innermost contiguous.
struct Wanted {
  const char* name;
  Device device;
  DType dtype;
  bool may_be_f32 = false;
  bool at_least_rows = true;
};
void check_tensor(const TensorView& t, const Wanted& wanted, std::initializer_list<int64_t> sizes) {
  bool fits = t.rank == int(sizes.size()) && (t.dtype == wanted.dtype || (wanted.may_be_f32 && t.dtype == DType::f32)) &&
              t.device == wanted.device && t.data != nullptr;
  std::string shape;
  int d = 0;
  for (const int64_t size : sizes) {
    const bool more = d == 0 && wanted.at_least_rows;
    fits = fits && (more ? t.size(d) >= size : t.size(d) == size);
    shape += (d == 0 ? more ? ">= " : "" : ", ") + std::to_string(size);
    ++d;
  }
  if (fits && (t.size(t.rank - 1) <= 1 || t.stride(t.rank - 1) == 1)) return;
  fail("recurrent.run.tensor", "{}: expected {}{}[{}] on {} with innermost stride 1, got {}", wanted.name, to_string(wanted.dtype),
       wanted.may_be_f32 && wanted.dtype != DType::f32 ? " or f32 " : "", shape, wanted.device, t);
}

// Whether a tensor that only some layers have is there as the spec says.
bool is_there(const TensorView& t, const char* name, bool needed) {
  check(needed != t.empty(), "recurrent.run.missing", "{}: {} by the spec, but {}", name, needed ? "needed" : "not used",
        t.empty() ? "not given" : "given");
  return needed;
}

}  // namespace

void begin_plan(const BackendOf<RecurrentFamily>& backend, const RecurrentSpec& spec, const DeviceInfo& device, const PlanOptions& options,
                std::string_view kernels) {
  spec.validate();
  check(!options.out_dtype || *options.out_dtype == spec.dtype, "backend.out_dtype", "expected outputs of {} in {}, got {}", spec.str(),
        to_string(spec.dtype), to_string(options.out_dtype.value_or(spec.dtype)));
  begin_plan(backend, spec.str(), backend.unsupported(spec, device), device, options, kernels);
}

void check_run(const RecurrentSpec& spec, Device device, const RecurrentInputs& in, const RecurrentOutputs& out, int num_tokens,
               int64_t num_slots) {
  const int64_t tokens = num_tokens, k_heads = spec.num_k_heads, v_heads = spec.num_v_heads, k = spec.head_dim_k, v = spec.head_dim_v;
  const auto rows = [&](const char* name, bool may_be_f32 = false) { return Wanted{name, device, spec.dtype, may_be_f32}; };
  const auto parameter = [&](const TensorView& t, const char* name, bool of_channels) {
    const Wanted wanted{name, device, DType::f32, false, false};
    of_channels ? check_tensor(t, wanted, {v_heads, k}) : check_tensor(t, wanted, {v_heads});
  };
  const bool convolved = spec.conv != RecurrentConv::none;
  const int64_t channels = spec.conv_channels();
  if (is_there(in.q, "q", !convolved)) check_tensor(in.q, rows("q"), {tokens, k_heads, k});
  if (is_there(in.k, "k", !convolved)) check_tensor(in.k, rows("k"), {tokens, k_heads, k});
  if (is_there(in.v, "v", !convolved)) check_tensor(in.v, rows("v"), {tokens, v_heads, v});
  const auto named = [&](const char* name) { return Wanted{name, device, spec.dtype, false, false}; };
  if (is_there(in.input, "input", convolved)) check_tensor(in.input, rows("input"), {tokens, channels});
  if (is_there(in.conv_weight, "conv_weight", convolved)) check_tensor(in.conv_weight, named("conv_weight"), {channels, spec.conv_width});
  if (is_there(in.conv_bias, "conv_bias", spec.conv_bias)) check_tensor(in.conv_bias, named("conv_bias"), {channels});
  if (is_there(in.conv_state, "conv_state", convolved))
    check_tensor(in.conv_state, rows("conv_state"), {num_slots, spec.conv_state_rows(), channels});
  if (is_there(in.gate, "gate", spec.gate != RecurrentGate::fixed)) {
    spec.channel_gate ? check_tensor(in.gate, rows("gate", true), {tokens, v_heads, k})
                      : check_tensor(in.gate, rows("gate", true), {tokens, v_heads});
  }
  if (is_there(in.beta, "beta", spec.delta)) check_tensor(in.beta, rows("beta", true), {tokens, v_heads});
  if (is_there(in.rates, "rates", spec.gate != RecurrentGate::log)) parameter(in.rates, "rates", spec.channel_rates);
  const bool may_have_bias = spec.gate == RecurrentGate::softplus || spec.gate == RecurrentGate::sigmoid;
  if (is_there(in.gate_bias, "gate_bias", may_have_bias && !in.gate_bias.empty())) parameter(in.gate_bias, "gate_bias", spec.channel_gate);
  if (is_there(in.skip, "skip", spec.skip)) parameter(in.skip, "skip", false);
  const Wanted state{"state", device, spec.state_dtype};
  const bool k_first = spec.layout == StateLayout::k_first;
  check_tensor(in.state, state, {num_slots, spec.state_rows(), v_heads, k_first ? k : v, k_first ? v : k});
  check(in.state.stride(3) == in.state.size(4) || in.state.size(3) == 1, "recurrent.run.state",
        "state: expected the numbers of a head to be contiguous, with stride {}, got {}", in.state.size(4), in.state);
  if (is_there(in.z, "z", spec.out_gate != OutputGate::none)) check_tensor(in.z, rows("z"), {tokens, v_heads, v});
  if (is_there(in.norm_weight, "norm_weight", spec.out_norm != OutputNorm::none)) {
    const Wanted weight{"norm_weight", device, spec.dtype, true, false};
    in.norm_weight.rank == 1 ? check_tensor(in.norm_weight, weight, {v}) : check_tensor(in.norm_weight, weight, {v_heads, v});
  }
  check_tensor(out.out, rows("out"), {tokens, v_heads, v});
  for (const auto& [name, tensor] : kReadInputs) check_layout(in.*tensor, name);
  if (convolved) check_written_layout(in.conv_state, "conv_state");
  check_written_layout(in.state, "state");
  check_written_layout(out.out, "out");
}

}  // namespace imbrex

// See step.h.
#include "short_conv/step.h"

#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "family/begin_plan.h"

namespace imbrex {
namespace {

void check_tensor(const TensorView& t, const char* name, Device device, DType dtype, std::initializer_list<int64_t> sizes,
                  bool at_least_rows) {
  bool fits = t.rank == int(sizes.size()) && t.dtype == dtype && t.device == device && t.data != nullptr;
  std::string wanted;
  int d = 0;
  for (const int64_t size : sizes) {
    const bool more = d == 0 && at_least_rows;
    fits = fits && (more ? t.size(d) >= size : t.size(d) == size);
    ++d;
  }
  if (fits && (t.size(t.rank - 1) <= 1 || t.stride(t.rank - 1) == 1)) return;
  for (const int64_t size : sizes) wanted += (wanted.empty() ? at_least_rows ? ">= " : "" : ", ") + std::to_string(size);
  fail("short_conv.run.tensor", "{}: expected {}[{}] on {} with innermost stride 1, got {}", name, to_string(dtype), wanted, device, t);
}

}  // namespace

void begin_plan(const BackendOf<ShortConvFamily>& backend, const ShortConvSpec& spec, const DeviceInfo& device, const PlanOptions& options,
                std::string_view kernels) {
  spec.validate();
  check(!options.out_dtype || *options.out_dtype == spec.dtype, "backend.out_dtype", "expected outputs of {} in {}, got {}", spec.str(),
        to_string(spec.dtype), to_string(options.out_dtype.value_or(spec.dtype)));
  begin_plan(backend, spec.str(), backend.unsupported(spec, device), device, options, kernels);
}

void check_run(const ShortConvSpec& spec, Device device, const ShortConvInputs& in, const ShortConvOutputs& out, int num_tokens,
               int64_t num_slots) {
  check_tensor(in.input, "input", device, spec.dtype, {num_tokens, spec.input_channels()}, true);
  check_tensor(in.weight, "weight", device, spec.dtype, {spec.dim, spec.width}, false);
  check(spec.bias != in.bias.empty(), "short_conv.run.bias", "bias: {} by the spec, but {}", spec.bias ? "needed" : "not used",
        in.bias.empty() ? "not given" : "given");
  if (spec.bias) check_tensor(in.bias, "bias", device, spec.dtype, {spec.dim}, false);
  check_tensor(in.state, "state", device, spec.dtype, {num_slots, spec.state_rows(), spec.dim}, true);
  check_tensor(out.out, "out", device, spec.dtype, {num_tokens, spec.dim}, true);
  check_layout(in.input, "input");
  check_layout(in.weight, "weight");
  check_layout(in.bias, "bias");
  check_written_layout(in.state, "state");
  check_written_layout(out.out, "out");
  if (may_meet(out.out, in.input))
    fail("short_conv.run.overlap", "out: expected memory of its own, got {} that begins {} bytes behind the input, {}", out.out,
         out.out.as<const char>() - in.input.as<const char>(), in.input);
}

}  // namespace imbrex

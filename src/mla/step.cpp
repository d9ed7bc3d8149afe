// See step.h.
#include "mla/step.h"

#include <algorithm>
#include <initializer_list>

#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "family/begin_plan.h"

namespace imbrex {
namespace {

// Checks that a tensor has these sizes, the first of which may be larger where it is one of tokens, and innermost stride 1.
void check_mla_tensor(const TensorView& t, const char* name, std::string_view code, Device device, DType dtype,
                      std::initializer_list<int64_t> sizes, bool of_tokens) {
  const bool none = of_tokens && *sizes.begin() == 0;
  bool fits = t.rank == int(sizes.size()) && t.dtype == dtype && t.device == device && (t.data != nullptr || none);
  int d = 0;
  for (const int64_t size : sizes) {
    fits = fits && (d == 0 && of_tokens ? t.size(d) >= size : t.size(d) == size);
    ++d;
  }
  if (!fits || (!none && t.size(t.rank - 1) > 1 && t.stride(t.rank - 1) != 1)) {
    std::string wanted;
    for (const int64_t size : sizes) wanted += (wanted.empty() ? of_tokens ? ">= " : "" : ", ") + std::to_string(size);
    fail(code, "{}: expected {}[{}] on {} with innermost stride 1, got {}", name, to_string(dtype), wanted, device, t);
  }
  check_layout(t, name);
}

}  // namespace

void begin_plan(const BackendOf<MlaFamily>& backend, const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options,
                std::string_view kernels) {
  spec.validate();
  if (options.out_dtype)
    check(*options.out_dtype == spec.dtype || *options.out_dtype == DType::f32, "backend.out_dtype",
          "expected a type of outputs of {}, such as {}, got {}", spec.str(), to_string(spec.dtype), to_string(*options.out_dtype));
  begin_plan(backend, spec.str(), backend.unsupported(spec, device), device, options, kernels);
}

DType check_run(const MlaSpec& spec, Device device, const MlaInputs& in, const MlaOutputs& out, int num_tokens, const BatchReach& reach) {
  check_mla_tensor(in.q, "q", "mla.run.q", device, spec.dtype, {num_tokens, spec.num_heads, spec.q_dim()}, true);
  check(spec.absorbed == in.kv_b.empty(), "mla.run.kv_b", "kv_b: {} by the spec, but {}", spec.absorbed ? "not used" : "needed",
        in.kv_b.empty() ? "not given" : "given");
  if (!spec.absorbed)
    check_mla_tensor(in.kv_b, "kv_b", "mla.run.kv_b", device, spec.dtype,
                     {spec.num_heads, int64_t(spec.qk_nope_dim) + spec.v_dim, spec.kv_lora_rank}, false);
  const DType out_dtype = out.out.dtype == DType::f32 ? DType::f32 : spec.dtype;
  check_mla_tensor(out.out, "out", "mla.run.out", device, out_dtype, {num_tokens, spec.num_heads, spec.out_dim()}, true);
  check_written_layout(out.out, "out");
  // Caches, sinks and log-sum-exps are those of attention in latent space; queries and outputs of its shape stand for those checked above.
  const auto like = [&](const TensorView& t, int dim) {
    return TensorView::contiguous(t.data, t.dtype, {std::max<int64_t>(t.size(0), num_tokens), spec.num_heads, dim}, device);
  };
  imbrex::check_run(spec.latent_spec(), device, {.q = like(in.q, spec.latent_dim()), .kv = in.kv, .sinks = in.sinks},
                    {.out = like(out.out, spec.kv_lora_rank), .lse = out.lse}, num_tokens, reach);
  return out_dtype;
}

DType check_write(const MlaSpec& spec, Device device, const KvCache& cache, const TensorView& latent, const TensorView& rope,
                  const TensorView& slot_mapping, int num_tokens, const BatchReach& reach) {
  const DType dtype = latent.dtype == spec.kv_dtype ? spec.kv_dtype : spec.dtype;
  check_mla_tensor(latent, "latent", "mla.write_kv.latent", device, dtype, {num_tokens, spec.kv_lora_rank}, true);
  if (spec.qk_rope_dim > 0)
    check_mla_tensor(rope, "rope", "mla.write_kv.rope", device, dtype, {num_tokens, spec.qk_rope_dim}, true);
  else
    check(rope.empty(), "mla.write_kv.rope", "rope: expected none, since qk_rope_dim is 0, got {}", rope);
  const TensorView joined =
      TensorView::contiguous(latent.data, dtype, {std::max<int64_t>(latent.size(0), num_tokens), 1, spec.latent_dim()}, device);
  return imbrex::check_write(spec.latent_spec(), device, cache, joined, {}, slot_mapping, num_tokens, reach);
}

}  // namespace imbrex

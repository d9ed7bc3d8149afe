// The CPU backends: objects of one class, which differ in their limits and in the kernel table that they give to the plan.
#include "imbrex/attention.h"

#include <algorithm>

#include "attention/known_mask.h"
#include "attention/kv_codec.h"
#include "attention/plan_checks.h"
#include "core/check.h"
#include "core/cpu_features.h"
#include "cpu/plan.h"
#include "family/begin_plan.h"

namespace imbrex {
namespace {

using cpu::Kernels;

// Whether kernels of this folder read the format; cpu/kv_sides.cpp says how.
bool reads(const AttentionSpec& spec) {
  switch (spec.kv_format) {
    case KvFormat::amx_packed:
    case KvFormat::latent_rope:
    case KvFormat::fp8_ds_mla: return true;
    default: return codec_of(spec).strided;
  }
}

class CpuBackend final : public BackendOf<AttentionFamily> {
 public:
  CpuBackend(std::string_view name, std::string_view description, CpuIsa needs) : name_(name), description_(description), needs_(needs) {}
  std::string_view name() const override { return name_; }
  std::string_view description() const override { return description_; }

  std::vector<Reason> unsupported(const AttentionSpec& spec, const DeviceInfo& device) const override {
    std::vector<Reason> reasons;
    const auto refuse = [&](std::string code, std::string wanted, std::string actual) {
      reasons.push_back({std::move(code), std::move(wanted), std::move(actual)});
    };
    const bool amx = needs_ == CpuIsa::amx_emulated;
    if (device.device.type != DeviceType::cpu) {
      refuse("device.type", "cpu", to_string(device.device.type));
    } else if (device.isa < needs_) {
      std::string actual = to_string(device.isa);
      if (!device.isa_note.empty()) actual += " (" + device.isa_note + ")";
      refuse("device.isa", amx ? "amx" : to_string(needs_), std::move(actual));
    }
    if (!amx) {
      if (!reads(spec) || spec.kv_format == KvFormat::amx_packed) refuse("spec.kv_format", "strided", to_string(spec.kv_format));
      // No CPU multiplies fp8 numbers: queries would only be widened again.
      if (spec.q_dtype == DType::fp8_e4m3) refuse("spec.q_dtype", "f32, bf16 or f16", to_string(spec.q_dtype));
      return reasons;
    }
    if (!reads(spec)) refuse("spec.kv_format", "strided or amx_packed", to_string(spec.kv_format));
    // Tile products take bf16 operands: f16 and f32 would lose bits that the caller paid for.
    if (spec.q_dtype != DType::bf16) refuse("spec.q_dtype", "bf16", to_string(spec.q_dtype));
    if (spec.kv_dtype == DType::f32 || spec.kv_dtype == DType::f16) {
      refuse("spec.kv_dtype", "bf16, fp8_e4m3 or fp8_e5m2", to_string(spec.kv_dtype));
    }
    return reasons;
  }

  std::unique_ptr<AttentionPlan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options, kernels(device.isa).isa);
    check(kX86 || needs_ == CpuIsa::generic, "device.cpu_isa.absent", "expected a device of this build, which is not for x86-64, got {}",
          device.str());
    return std::make_unique<cpu::Plan>(name_, kernels(device.isa), with_known_mask(spec), options);
  }

  std::vector<KernelChoice> kernel_choices(const AttentionSpec& spec, const DeviceInfo& device) const override {
    check_request(*this, spec.str(), unsupported(spec, device), device, {});
    const Kernels& k = kernels(device.isa);
    return {{.requests = "all",
             .kernel = k.isa,
             .sizes = {{"tile_rows", std::max(1, k.row_tile / spec.group_size()) * spec.group_size()},
                       {"tile_keys", cpu::kBlockKeys},
                       {"piece_keys", k.split_keys(shape_of(with_known_mask(spec), k))},
                       {"most_heads", k.most_heads}}}};
  }

 private:
  const Kernels& kernels(CpuIsa isa) const {
    if constexpr (kX86) {
      if (needs_ == CpuIsa::avx512) return isa >= CpuIsa::avx512_bf16 ? cpu::kernels_avx512_bf16 : cpu::kernels_avx512;
      if (needs_ == CpuIsa::amx_emulated) return isa == CpuIsa::amx ? cpu::kernels_amx : cpu::kernels_amx_emulated;
      if (isa >= CpuIsa::avx2) return cpu::kernels_avx2;
    }
    return cpu::kernels_generic;
  }

  std::string_view name_, description_;
  CpuIsa needs_;
};

}  // namespace

const BackendOf<AttentionFamily>& cpu_amx() {
  static const CpuBackend backend("cpu_amx", "bf16 tile products (AMX), softmax in their shadow", CpuIsa::amx_emulated);
  return backend;
}
const BackendOf<AttentionFamily>& cpu_avx512() {
  static const CpuBackend backend("cpu_avx512", "register tiles (AVX-512), every element type; pairs of bf16 where the CPU multiplies them",
                                  CpuIsa::avx512);
  return backend;
}
const BackendOf<AttentionFamily>& cpu_generic() {
  static const CpuBackend backend("cpu_generic", "portable C++, also compiled for AVX2", CpuIsa::generic);
  return backend;
}

}  // namespace imbrex

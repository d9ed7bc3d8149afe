#pragma once
// The specialisations of gather_latents.cu whose text runs on the host: each format of a cache, types that are copied and types that are
// converted.
#include <string>
#include <vector>

#include "cuda/mla/steps.h"

namespace imbrex::test {

struct MlaVariant {
  const char* name;
  DType dtype, kv_dtype;
  KvFormat format = KvFormat::latent;
  bool runs(const MlaSpec& spec) const { return spec.dtype == dtype && spec.kv_dtype == kv_dtype && spec.kv_format == format; }
  cuda::KernelKey key() const {
    return cuda::gather_latents_key("sm_90a", {.num_heads = 1, .dtype = dtype, .kv_dtype = kv_dtype, .kv_format = format});
  }
};

inline std::vector<MlaVariant> mla_variants() {
  return {{"latents_bf16", DType::bf16, DType::bf16},
          {"latents_exact", DType::f32, DType::f32},
          {"latents_records", DType::bf16, DType::fp8_e4m3, KvFormat::fp8_ds_mla},
          {"latents_apart", DType::bf16, DType::fp8_e4m3, KvFormat::latent_rope}};
}

}  // namespace imbrex::test

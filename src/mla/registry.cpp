// The family of MLA: its backends in order, and what the registry and select() make of them.
#include <fmt/format.h>

#include "family/select_of.h"
#include "family/spec_changes.h"
#include "mla/backend.h"
#include "mla/reference.h"
#include "mla/spec_fields.h"

namespace imbrex {

const BackendOf<AttentionFamily>& cpu_amx();  // cpu/backend.cpp
const BackendOf<AttentionFamily>& cpu_avx512();
const BackendOf<AttentionFamily>& cpu_generic();
const BackendOf<AttentionFamily>& cuda_sm90();  // cuda/backend.cpp
const BackendOf<AttentionFamily>& cuda_sm80();
extern const MlaHardware mla_on_cuda;  // cuda/mla/mla_plan.cpp

namespace {

// Of a whole GPU, not of one core. cuda_sm90: measured on an H100 with 80 GB (2026-11-26, DeviceMlaSpeed of tests/cuda), with 16 and 128
// heads of 512/128/64/128 in bf16; `bytes` is what makes both ways meet where they do, at about 200 queries of a request, and counts what
// stays in the L2 cache too. cuda_sm80: attention in latent space as measured on an H100 (170 TFLOP/s) and taken down to an A100's 312
// TFLOP/s and 2 TB/s at most; the others are parts of these, not measured.
constexpr MlaRates kCudaSm90Rates{
    .products = 250e12, .expansion = 620e12, .latent = 530e12, .expanded = 630e12, .bytes = 6.5e12, .round = 5e-6};
constexpr MlaRates kCudaSm80Rates{
    .products = 200e12, .expansion = 200e12, .latent = 120e12, .expanded = 180e12, .bytes = 1.5e12, .round = 5e-6};

// Speeds of one core of a CPU. Of AVX-512: measured on an EPYC of Zen 4 with 16 heads of 512/128/64/128 at 4096 keys, by products of pairs
// of bf16; without those all but attention to expanded keys are slower. Of AVX2: on the same machine without AVX-512. Of AMX: measured on a
// virtual machine beside an H100 with 16 heads and 64 rows or queries; attention to expanded keys is half of what two cores of such a
// machine do in prefill (docs/kernels/cpu_amx.md). A stream of memory is 8 GB/s where all cores have one.
constexpr MlaRates kAmxRates{.products = 400e9, .expansion = 550e9, .latent = 830e9, .expanded = 800e9, .bytes = 8e9};
constexpr MlaRates kAvx512Rates{.products = 140e9, .expansion = 140e9, .latent = 200e9, .expanded = 135e9, .bytes = 8e9};
constexpr MlaRates kGenericRates{.products = 60e9, .expansion = 60e9, .latent = 83e9, .expanded = 76e9, .bytes = 8e9};

const MlaCompositeBackend& cuda_sm90_mla() {
  static const MlaCompositeBackend backend(cuda_sm90(), "latents by wgmma (Hopper), products by cuBLASLt", mla_on_cuda, kCudaSm90Rates);
  return backend;
}
const MlaCompositeBackend& cuda_sm80_mla() {
  static const MlaCompositeBackend backend(cuda_sm80(), "latents by mma.sync on every NVIDIA GPU since Ampere, products by cuBLASLt",
                                           mla_on_cuda, kCudaSm80Rates);
  return backend;
}
const MlaCompositeBackend& cpu_amx_mla() {
  static const MlaCompositeBackend backend(cpu_amx(), "latents by bf16 tile products (AMX)", mla_on_cpus, kAmxRates);
  return backend;
}
const MlaCompositeBackend& cpu_avx512_mla() {
  static const MlaCompositeBackend backend(cpu_avx512(), "latents by register tiles (AVX-512)", mla_on_cpus, kAvx512Rates);
  return backend;
}
const MlaCompositeBackend& cpu_generic_mla() {
  static const MlaCompositeBackend backend(cpu_generic(), "portable C++, also compiled for AVX2", mla_on_cpus, kGenericRates);
  return backend;
}

}  // namespace

template <>
Registry<MlaFamily>::List Registry<MlaFamily>::built_in() {
  return {&cuda_sm90_mla(), &cuda_sm80_mla(), &cpu_amx_mla(), &cpu_avx512_mla(), &cpu_generic_mla(), &mla_reference()};
}

template <>
std::vector<std::string> propose<MlaFamily>(const MlaSpec& spec, const DeviceInfo& device,
                                            std::span<const CandidateOf<MlaFamily>> candidates, const BackendOf<MlaFamily>& slow) {
  std::vector<SpecChange<MlaSpec>> changes;
  for (const DType t : {DType::bf16, DType::f16, DType::f32})
    if (t != spec.dtype || t != spec.kv_dtype)
      changes.push_back({2, 0, fmt::format("dtype and kv_dtype {}", to_string(t)), [t](MlaSpec& s) { s.dtype = s.kv_dtype = t; }});
  if (spec.kv_format != KvFormat::latent)
    changes.push_back({1, 1, fmt::format("kv_format {}", to_string(KvFormat::latent)), [](MlaSpec& s) { s.kv_format = KvFormat::latent; }});
  add_feature_changes(spec, changes);
  return proposals_of<MlaFamily>(spec, device, candidates, slow, changes);
}

template struct SelectionOf<MlaFamily>;
template std::vector<const BackendOf<MlaFamily>*> backends<MlaFamily>();
template const BackendOf<MlaFamily>* find_backend<MlaFamily>(std::string_view);
template void register_backend<MlaFamily>(std::shared_ptr<const BackendOf<MlaFamily>>);
template void unregister_backend<MlaFamily>(std::string_view);
template SelectionOf<MlaFamily> select<MlaFamily>(const MlaSpec&, const DeviceInfo&, const SelectOptions&);

}  // namespace imbrex

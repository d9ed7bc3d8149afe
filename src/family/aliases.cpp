// The names that users of vLLM and SGLang know for attention backends, and the backends of imbrex that serve them. Used by select() and the
// docs.
#include "imbrex/layer_spec.h"

namespace imbrex {
namespace {

using Names = std::vector<std::string_view>;

constexpr std::string_view kCuda = "the CUDA backends";
constexpr std::string_view kCudaMla = "latent attention (MLA) on NVIDIA GPUs";
constexpr std::string_view kCpuMla = "latent attention (MLA) on a CPU";
constexpr std::string_view kSparse = "sparse attention (indexer and selected keys); waits for the sparse family";
constexpr std::string_view kRecurrent = "a linear or state-space layer";
constexpr std::string_view kQuantised = "a quantised KV cache of its own record format; waits for the quantised KV formats";
constexpr std::string_view kOther = "hardware that imbrex has no backend for";
constexpr std::string_view kCpu = "the CPU backends";

const Names& cpu_backends() {
  static const Names names{"cpu_amx", "cpu_avx512", "cpu_generic"};
  return names;
}

const Names& cuda_backends() {
  static const Names names{"cuda_sm90", "cuda_sm80"};
  return names;
}

// Lists: vLLM's enums as of its documentation of September 2026 and the members removed shortly before; SGLang's
// ATTENTION_BACKEND_CHOICES and linear-attention sub-backends as of August 2026.
std::vector<BackendAlias> make_aliases() {
  std::vector<BackendAlias> list;
  const auto add = [&](std::string_view origin, std::string_view note, const Names& backends,
                       std::initializer_list<std::string_view> names) {
    const std::string_view family = backends.empty() ? std::string_view() : AttentionFamily::name;
    for (const auto name : names) list.push_back({origin, name, backends, note, family});
  };
  const auto vllm = [&](std::string_view note, const Names& backends, std::initializer_list<std::string_view> names) {
    add("vllm", note, backends, names);
  };
  const auto sglang = [&](std::string_view note, const Names& backends, std::initializer_list<std::string_view> names) {
    add("sglang", note, backends, names);
  };

  vllm(kCpu, cpu_backends(), {"CPU_ATTN", "TORCH_SDPA"});
  vllm(kCuda, cuda_backends(),
       {"FLASH_ATTN", "FLASH_ATTN_DIFFKV", "FLASHINFER", "TRITON_ATTN", "TRITON_ATTN_DIFFKV", "FLEX_ATTENTION", "XFORMERS", "HPC_ATTN",
        "B12X", "TRITON_FLASHINFER", "TRITON_FLASH_ATTN"});
  vllm("trees of draft tokens on GPUs; waits for speculative trees, a custom mask serves small ones", {}, {"TREE_ATTN"});
  vllm(kQuantised, {}, {"TURBOQUANT"});
  for (const char* name : {"FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "TRITON_MLA", "TOKENSPEED_MLA", "TRTLLM_RAGGED"})
    list.push_back({"vllm", name, cuda_backends(), kCudaMla, MlaFamily::name});
  list.push_back({"vllm", "CPU_MLA", cpu_backends(), kCpuMla, MlaFamily::name});
  list.push_back({"vllm", "AMX_MLA", {"cpu_amx"}, kCpuMla, MlaFamily::name});
  vllm(kSparse, {},
       {"FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90", "FLASHINFER_MLA_SPARSE_SM120", "FLASH_ATTN_MLA_SPARSE",
        "FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41", "FLASHMLA_MEGA_ATTN_DSV41",
        "FLASHINFER_MLA_SPARSE_DSV41", "MINIMAX_M3_SPARSE", "CUTLASS_MSA", "TRITON_MSA"});
  vllm(kOther, {},
       {"ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "ROCM_AITER_MLA_SPARSE",
        "ROCM_FLASHMLA_SPARSE_DSV4", "XPU_MLA_SPARSE"});
  for (const char* name : {"MAMBA1", "MAMBA2", "LINEAR", "GDN_ATTN"})
    list.push_back({"vllm", name, {"cuda_sm80", "cpu_avx512", "cpu_generic"}, kRecurrent, RecurrentFamily::name});
  list.push_back(
      {"vllm", "SHORT_CONV", {"cuda_sm80", "cpu_avx512", "cpu_generic"}, "the short convolution of LFM2", ShortConvFamily::name});
  vllm("a layer without attention; nothing to run", {}, {"NO_ATTENTION"});
  vllm("a backend from outside; register it with register_backend() and force it by its own name", {}, {"CUSTOM"});

  sglang(kCpu, cpu_backends(), {"intel_amx", "torch_native"});
  sglang(kCuda, cuda_backends(),
         {"flashinfer", "fa3", "fa4", "triton", "flex_attention", "trtllm_mha", "hpc_ops", "minicpm_flashattn", "minicpm_flashinfer"});
  sglang("dual-chunk attention (Qwen2.5-1M) on NVIDIA GPUs; three layers over one cache, joined by PartialMerger", {},
         {"dual_chunk_flash_attn"});
  for (const char* name : {"flashinfer", "fa3", "fa4", "triton", "flashmla", "cutlass_mla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla"})
    list.push_back({"sglang", name, cuda_backends(), kCudaMla, MlaFamily::name});
  list.push_back({"sglang", "intel_amx", cpu_backends(), kCpuMla, MlaFamily::name});
  sglang(kSparse, {}, {"dsa", "nsa", "dsv4", "compressed"});
  sglang(kOther, {}, {"aiter", "wave", "ascend", "intel_xpu"});
  for (const char* name : {"gdn", "kda", "lightning", "mamba2"})
    list.push_back({"sglang", name, {"cuda_sm80", "cpu_avx512", "cpu_generic"}, kRecurrent, RecurrentFamily::name});
  return list;
}

}  // namespace

std::span<const BackendAlias> backend_aliases() {
  static const std::vector<BackendAlias> list = make_aliases();
  return list;
}

}  // namespace imbrex

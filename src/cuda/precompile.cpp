// Families of kernels, and precompile(): all of them into a cache folder, several at a time.
#include "cuda/precompile.h"

#include <algorithm>
#include <atomic>
#include <set>

#include "attention/known_mask.h"
#include "core/check.h"
#include "core/env.h"
#include "core/run_parallel.h"
#include "cuda/attention/attention_sm80.h"
#include "cuda/attention/write_kv.h"
#include "cuda/driver/cubin.h"
#include "cuda/driver/driver.h"
#include "cuda/mla/rounds.h"
#include "cuda/mla/steps.h"
#include "cuda/ops/copy_blocks.h"
#include "cuda/ops/gather.h"
#include "cuda/ops/merge_results.h"
#include "cuda/plan/plan.h"
#include "cuda/recurrent/recurrent.h"
#include "cuda/short_conv/short_conv.h"
#include "gpu/kernel_cache.h"
#include "recurrent/conv_plan.h"

namespace imbrex::cuda {
namespace {

std::vector<KernelKey> write_kv_keys(std::string_view arch, const AttentionSpec& spec, Extent) {
  if (spec.block_size == 0 || !reads(kernels_sm80, spec)) return {};
  std::vector<KernelKey> keys;
  for (const DType from : spec.new_kv_dtypes()) keys.push_back(write_kv_key(arch, spec, from));
  return keys;
}

std::vector<KernelKey> copy_blocks_keys(std::string_view arch, const AttentionSpec& spec, Extent) {
  if (spec.block_size == 0) return {};
  return {copy_blocks_key(arch)};
}

std::vector<KernelKey> merge_results_keys(std::string_view arch, const AttentionSpec&, Extent) { return {merge_results_key(arch)}; }

std::vector<KernelKey> gather_keys(std::string_view arch, const AttentionSpec&, Extent) { return {gather_key(arch)}; }

std::vector<KernelKey> sm80_keys(std::string_view arch, const AttentionSpec& spec, Extent extent) {
  return plan_kernels(kernels_sm80, arch, spec, extent);
}

std::vector<KernelKey> sm90_keys(std::string_view arch, const AttentionSpec& spec, Extent extent) {
  return plan_kernels(kernels_sm90, arch, spec, extent);
}

constexpr KernelFamily kFamilies[] = {
    {"write_kv", write_kv_keys, "sm_90a"}, {"copy_blocks", copy_blocks_keys}, {"gather", gather_keys},
    {"merge_results", merge_results_keys}, {"cuda_sm80", sm80_keys},          {"cuda_sm90", sm90_keys, "sm_90a"},
};

// The kernels of another family than attention.
struct OtherFamily {
  const char *name, *backend;  // backend: null: all of CUDA's
  // Those of a plan for the spec; none where it is of another family.
  std::vector<KernelKey> (*keys)(std::string_view arch, const LayerSpec&);
  std::vector<LayerSpec> (*sample)();  // specs that together need every kind of code
};

std::vector<KernelKey> short_conv_keys(std::string_view arch, const LayerSpec& layer) {
  const auto* const spec = std::get_if<ShortConvSpec>(&layer);
  return spec == nullptr ? std::vector<KernelKey>() : short_conv_kernels(arch, *spec);
}

std::vector<LayerSpec> short_conv_sample() {
  const std::vector<ShortConvSpec> specs = covering_short_conv_specs();
  return {specs.begin(), specs.end()};
}

std::vector<KernelKey> recurrent_keys(std::string_view arch, const LayerSpec& layer) {
  const auto* const spec = std::get_if<RecurrentSpec>(&layer);
  if (spec == nullptr) return {};
  // With multiprocessors as the largest GPUs have them, so that kernels for few heads are there too.
  std::vector<KernelKey> keys = recurrent_kernels(arch, *spec, {.num_workers = 160});
  if (spec->conv != RecurrentConv::none)
    for (KernelKey& key : short_conv_kernels(arch, conv_of(*spec))) keys.push_back(std::move(key));
  return keys;
}

std::vector<LayerSpec> recurrent_sample() {
  const std::vector<RecurrentSpec> specs = covering_recurrent_specs();
  return {specs.begin(), specs.end()};
}

std::vector<KernelKey> mla_keys(std::string_view arch, const LayerSpec& layer) {
  const auto* const spec = std::get_if<MlaSpec>(&layer);
  if (spec == nullptr) return {};
  std::vector<KernelKey> keys = mla_kernels(arch, *spec, can_expand_on_device(spec->mask));
  const AttentionSpec latent = spec->latent_spec();
  for (const DType from : latent.new_kv_dtypes()) keys.push_back(write_latents_key(arch, latent, from));
  return keys;
}

std::vector<LayerSpec> mla_sample() {
  std::vector<LayerSpec> specs;
  const auto add = [&](DType dtype, DType kv_dtype, KvFormat format) {
    specs.emplace_back(MlaSpec{.num_heads = 16, .dtype = dtype, .kv_dtype = kv_dtype, .kv_format = format});
  };
  add(DType::bf16, DType::bf16, KvFormat::latent);
  add(DType::f32, DType::f16, KvFormat::latent);
  add(DType::bf16, DType::fp8_e4m3, KvFormat::fp8_ds_mla);
  add(DType::f16, DType::fp8_e4m3, KvFormat::latent_rope);
  return specs;
}

constexpr OtherFamily kOtherFamilies[] = {{"short_conv", "cuda_sm80", short_conv_keys, short_conv_sample},
                                          {"recurrent", "cuda_sm80", recurrent_keys, recurrent_sample},
                                          {"mla", nullptr, mla_keys, mla_sample}};

// The attention that a layer runs: itself, or what a layer of latent attention is composed of.
void add_attention_of(const LayerSpec& layer, std::vector<AttentionSpec>& to) {
  if (const auto* attention = std::get_if<AttentionSpec>(&layer)) to.push_back(with_known_mask(*attention));
  const auto* const latent = std::get_if<MlaSpec>(&layer);
  if (latent == nullptr) return;
  to.push_back(latent->latent_spec());
  if (latent->absorbed || !can_expand_on_device(latent->mask)) return;
  for (const AttentionSpec& round : round_specs(*latent)) to.push_back(round);
}

PrecompiledKernel report(const ShippedKernel& shipped, const std::filesystem::path& folder, const PrecompileRequest& request) {
  const KernelKey& key = shipped.key;
  PrecompiledKernel row{.family = shipped.family, .file = key.path, .arch = key.arch, .constants = key.constants()};
  if (request.left_out) {
    row.content = content_hash(key);
    row.left_out = request.left_out(row.content);
    if (row.left_out) return row;
  }
  const std::string name = cache_name(key);
  try {
    std::optional<CompiledKernel> kernel;
    if (!env::get(env::kCudaDump)) kernel = gpu::load_cached(folder, name);
    if (!kernel) {
      kernel = compile(key);
      check(gpu::store_cached(folder, name, *kernel), "cuda.cache", "cannot write {}{}{}", gpu::cached_file(folder, name).string(),
            gpu::why_not_trusted(folder).empty() ? "" : ": of its folder, ", gpu::why_not_trusted(folder));
    }
    row.compile_ms = kernel->compile_ms;
    row.cubin_bytes = int64_t(kernel->binary.size());
    row.problems = strict_problems(*kernel);
    row.entries = precompiled_entries(*kernel);
  } catch (const Error& error) {
    if (error.code() != "cuda.compile") throw;
    row.error = error.what();
  }
  return row;
}

}  // namespace

std::vector<PrecompiledEntry> precompiled_entries(const CompiledKernel& kernel) {
  std::vector<PrecompiledEntry> entries;
  for (const EntryReport& e : entry_reports(kernel)) {
    entries.push_back({.name = e.name,
                       .registers = e.registers,
                       .spill_bytes = e.spill_store_bytes + e.spill_load_bytes,
                       .stack_bytes = e.stack_bytes,
                       .smem_bytes = e.static_smem_bytes + e.dynamic_smem_bytes});
  }
  return entries;
}

std::vector<ShippedKernel> shipped_kernels(std::string_view arch, std::span<const LayerSpec> specs, std::string_view backend) {
  std::vector<ShippedKernel> shipped;
  std::set<std::string> names;
  const auto add_keys = [&](const char* family, std::vector<KernelKey> keys) {
    for (KernelKey& key : keys)
      if (names.insert(cache_name(key)).second) shipped.push_back({family, std::move(key)});
  };
  std::vector<AttentionSpec> of_attention;
  for (const LayerSpec& layer : specs) add_attention_of(layer, of_attention);
  for (const KernelFamily& family : kFamilies) {
    const auto add = [&](std::span<const AttentionSpec> all, Extent extent) {
      for (const AttentionSpec& spec : all) add_keys(family.name, family.keys(arch, spec, extent));
    };
    if (!backend.empty()) {
      if (family.name == backend) add(of_attention, Extent::usual);
    } else if (!specs.empty()) {
      add(of_attention, Extent::all);
    } else {
      add(covering_specs(), Extent::sample);
      if (family.thorough == arch) add(thorough_specs(), Extent::usual);
    }
  }
  if (specs.empty() && backend.empty()) {
    for (const TightTile& tile : tight_tiles())
      if (tile.arch == arch) add_keys("cuda_sm80", {tile.key()});
  }
  for (const OtherFamily& family : kOtherFamilies) {
    if (!backend.empty() && family.backend != nullptr && backend != family.backend) continue;
    const std::vector<LayerSpec> sample = specs.empty() && backend.empty() ? family.sample() : std::vector<LayerSpec>();
    for (const LayerSpec& layer : sample.empty() ? specs : std::span<const LayerSpec>(sample))
      add_keys(family.name, family.keys(arch, layer));
  }
  return shipped;
}

}  // namespace imbrex::cuda

namespace imbrex {

std::string kernel_arch(const DeviceInfo& device) { return cuda::arch_of(device); }

std::vector<PrecompiledKernel> precompile(const PrecompileRequest& request) {
  std::vector<cuda::ShippedKernel> shipped;
  for (const std::string& arch : request.archs) {
    for (cuda::ShippedKernel& kernel : cuda::shipped_kernels(arch, request.specs, request.backend)) shipped.push_back(std::move(kernel));
  }
  const auto folder = request.folder.empty() ? gpu::kernel_cache_folder() : std::filesystem::path(request.folder);
  check(!folder.empty(), "cuda.cache", "no folder to write kernels to: none of {}, {} and {} is set", env::kCudaCache, env::kCacheHome,
        env::kHome);
  std::vector<PrecompiledKernel> rows(shipped.size());
  ThreadPool pool(std::max(1, request.jobs));
  std::atomic<size_t> next{0};
  run_parallel(pool.parallel_for(), [&](int) {
    for (size_t i; (i = next.fetch_add(1)) < shipped.size();) rows[i] = cuda::report(shipped[i], folder, request);
  });
  return rows;
}

KernelCompiler kernel_compiler() {
  KernelCompiler compiler{.name = {}, .why = {}, .cache_folder = gpu::kernel_cache_folder().string()};
  if (const cuda::NvrtcApi* rtc = cuda::nvrtc(&compiler.why))
    compiler.name = fmt::format("NVRTC {}.{}", rtc->version / 1000, rtc->version % 1000 / 10);
  return compiler;
}

}  // namespace imbrex

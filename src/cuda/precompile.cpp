// Families of kernels, and precompile(): all of them into a cache folder, several at a time.
#include "cuda/precompile.h"

#include <algorithm>
#include <atomic>
#include <set>

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
  // With multiprocessors as the largest GPUs have them, so that kernels for few heads are there too.
  return spec == nullptr ? std::vector<KernelKey>() : recurrent_kernels(arch, *spec, {.num_workers = 160});
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
  if (const auto* attention = std::get_if<AttentionSpec>(&layer)) to.push_back(*attention);
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

namespace {

AttentionSpec spec_of(DType q, DType kv, int dim_qk, int dim_v, int block_size = 16) {
  return {.num_q_heads = 32,
          .num_kv_heads = 8,
          .head_dim_qk = dim_qk,
          .head_dim_v = dim_v,
          .q_dtype = q,
          .kv_dtype = kv,
          .block_size = block_size};
}

}  // namespace

KernelKey TightTile::key() const { return attention_sm80_key(arch, spec, spec.q_dtype, *attention_sm80_tiles(arch, spec, regime, rows)); }

std::vector<TightTile> tight_tiles() {
  constexpr gpu::Regime kTiled[] = {gpu::kDecode, gpu::kPrefill};
  std::vector<TightTile> tiles;
  const auto add = [&](std::string_view archs, const AttentionSpec& spec, std::span<const gpu::Regime> regimes, int rows = 1) {
    for (const char* arch : {"sm_80", "sm_90a", "sm_100a", "sm_120"})
      if (archs.find(arch) != std::string_view::npos)
        for (const gpu::Regime regime : regimes) tiles.push_back({arch, spec, regime, rows});
  };
  const std::span<const gpu::Regime> both(kTiled), decode(kTiled, 1), prefill(kTiled + 1, 1);
  const AttentionSpec plain = spec_of(DType::bf16, DType::bf16, 128, 128);
  add("sm_80 sm_90a sm_100a sm_120", plain, both);
  add("sm_90a", plain, decode, 32);
  add("sm_80", spec_of(DType::bf16, DType::fp8_e4m3, 128, 128), decode);
  add("sm_90a", spec_of(DType::bf16, DType::fp8_e5m2, 80, 80), prefill);
  add("sm_90a", spec_of(DType::bf16, DType::bf16, 256, 256), prefill);
  add("sm_90a", spec_of(DType::f32, DType::f32, 128, 128), prefill);
  add("sm_90a", spec_of(DType::f32, DType::f32, 576, 512), decode);
  add("sm_100a", spec_of(DType::bf16, DType::f32, 512, 512), prefill);

  const auto latent = [](KvFormat format, DType q, DType kv) {
    AttentionSpec spec = spec_of(q, kv, 576, 512, 64);
    spec.kv_format = format, spec.num_kv_heads = 1;
    return spec;
  };
  for (const DType kv : {DType::bf16, DType::fp8_e4m3}) {
    add("sm_90a", latent(KvFormat::latent, DType::bf16, kv), both);
    add("sm_80", latent(KvFormat::latent, DType::bf16, kv), decode);
    add("sm_90a", latent(KvFormat::latent_rope, DType::bf16, kv), both);
  }
  add("sm_80", latent(KvFormat::latent_rope, DType::f16, DType::fp8_e4m3), decode);
  add("sm_80 sm_90a", latent(KvFormat::fp8_ds_mla, DType::bf16, DType::fp8_e4m3), both);
  add("sm_90a", latent(KvFormat::fp8_ds_mla, DType::f32, DType::fp8_e4m3), decode);

  AttentionSpec all_terms = plain;
  all_terms.mask.window_left = 100, all_terms.mask.custom = true;
  all_terms.score = {
      .head_scales = true, .soft_cap = 30.f, .alibi = true, .relative_buckets = 32, .relative_max_distance = 128, .sinks = true};
  add("sm_80 sm_90a", all_terms, both);

  // Positions take registers: beside scores and outputs of many rows, and beside what else a logit needs.
  const auto add_placed = [&](AttentionSpec spec, std::string_view archs = "sm_90a", bool in_decode = false) {
    spec.mask.positions = true;
    add(archs, spec, prefill);
    if (in_decode) add("sm_90a", spec, decode);
  };
  for (const int dim : {64, 96, 128}) {
    AttentionSpec window = spec_of(DType::bf16, DType::bf16, dim, dim), relative = window;
    window.mask.window_left = dim == 128 ? -1 : 100;
    relative.score = {.relative_buckets = 32, .relative_max_distance = 128};
    add_placed(window, dim == 96 ? "sm_80 sm_90a sm_100a" : "sm_90a", dim == 96);
    add_placed(relative);
  }
  add_placed(spec_of(DType::bf16, DType::fp8_e4m3, 128, 128));
  add_placed(spec_of(DType::f32, DType::f32, 128, 128));
  AttentionSpec wide = spec_of(DType::bf16, DType::bf16, 256, 256);
  wide.mask.custom = true, wide.score.alibi = true;
  add_placed(wide);
  return tiles;
}

std::vector<AttentionSpec> thorough_specs() {
  std::vector<AttentionSpec> specs;
  constexpr DType kQ[] = {DType::bf16, DType::f16, DType::f32},
                  kKv[] = {DType::bf16, DType::f16, DType::f32, DType::fp8_e4m3, DType::fp8_e5m2};
  for (const DType q : kQ)
    for (const DType kv : kKv) specs.push_back(spec_of(q, kv, 128, 128));
  constexpr int kDims[][2] = {{64, 64}, {80, 80}, {96, 96}, {192, 128}, {256, 256}};
  for (const auto& dims : kDims)
    for (const DType kv : {DType::bf16, DType::fp8_e4m3}) specs.push_back(spec_of(DType::bf16, kv, dims[0], dims[1]));
  for (const int dim : {72, 112, 192}) specs.push_back(spec_of(DType::bf16, DType::bf16, dim, dim));
  for (const int dim : {64, 256}) specs.push_back(spec_of(DType::fp8_e4m3, DType::fp8_e4m3, dim, dim));
  for (const int dim : {64, 128, 256}) specs.push_back(spec_of(DType::bf16, DType::bf16, dim, dim, 1));
  for (const DType q : {DType::bf16, DType::fp8_e4m3}) specs.push_back(spec_of(q, DType::fp8_e4m3, 128, 128, 1));
  // Tiles as large as logits that need registers leave room for.
  for (const int dim : {64, 256}) {
    for (const ScoreMod& score : {ScoreMod{.soft_cap = 50.f}, ScoreMod{.alibi = true}}) {
      specs.push_back(spec_of(DType::bf16, DType::bf16, dim, dim));
      specs.back().score = score;
      if (score.soft_cap > 0) specs.back().mask.window_left = 4095;
    }
  }
  specs.push_back(spec_of(DType::bf16, DType::fp8_e4m3, 64, 64));
  specs.back().score.soft_cap = 50.f;
  specs.push_back(spec_of(DType::bf16, DType::fp8_e4m3, 64, 64, 1));
  specs.back().mask.custom = true;
  specs.push_back(spec_of(DType::bf16, DType::bf16, 256, 256));
  specs.back().mask.custom = true;
  specs.push_back(spec_of(DType::bf16, DType::bf16, 64, 64));
  specs.back().num_q_heads = 66, specs.back().num_kv_heads = 2;  // of each warpgroup's rows, about a half
  // Latents: a half of the values' dims is one product or two, and all that logits and masks can need besides.
  const auto add_latent = [&](DType type, int dim_v, int q_heads, int block_size) -> AttentionSpec& {
    AttentionSpec& spec = specs.emplace_back(spec_of(type, type, dim_v + 64, dim_v, block_size));
    spec.kv_format = KvFormat::latent, spec.num_q_heads = q_heads, spec.num_kv_heads = 1;
    return spec;
  };
  add_latent(DType::bf16, 512, 128, 64);
  add_latent(DType::bf16, 512, 64, 64);
  add_latent(DType::f16, 384, 20, 16).score.sinks = true;
  add_latent(DType::f16, 256, 16, 1);
  add_latent(DType::bf16, 384, 20, 16).score = {.soft_cap = 50.f, .sinks = true};
  AttentionSpec& all_terms = add_latent(DType::bf16, 512, 16, 1);
  all_terms.mask.window_left = 4095, all_terms.score = {.head_scales = true, .alibi = true};
  // Of few rows besides: bytes, records, and a mask that needs registers.
  add_latent(DType::bf16, 512, 128, 64).kv_dtype = DType::fp8_e4m3;
  add_latent(DType::f16, 256, 16, 16).kv_dtype = DType::fp8_e4m3;
  AttentionSpec& records = add_latent(DType::bf16, 512, 16, 64);
  records.kv_format = KvFormat::fp8_ds_mla, records.kv_dtype = DType::fp8_e4m3;
  AttentionSpec& masked = add_latent(DType::bf16, 512, 32, 64);
  masked.mask = {.custom = true, .positions = true}, masked.score = {.soft_cap = 50.f, .alibi = true};
  return specs;
}

static auto with_tree_drafts(auto spec) { return spec.num_drafts = 4, spec.tree_drafts = true, spec; }

std::vector<ShortConvSpec> covering_short_conv_specs() {
  constexpr ShortConvForm plain = ShortConvForm::plain;
  constexpr ShortConvActivation silu = ShortConvActivation::silu;
  std::vector<ShortConvSpec> specs{{.width = 3, .dtype = DType::bf16},
                                   {.width = 3, .bias = true, .dtype = DType::bf16},
                                   {.width = 5, .bias = true, .dtype = DType::bf16},
                                   {.width = 8, .bias = true, .dtype = DType::bf16},
                                   {.width = 3, .bias = true, .dtype = DType::f16},
                                   {.width = 4, .bias = true, .dtype = DType::f16},
                                   {.width = 8, .bias = true, .dtype = DType::f16},
                                   {.width = 2, .dtype = DType::f32},
                                   {.width = 5, .bias = true, .dtype = DType::f32},
                                   {.width = 8, .bias = true, .dtype = DType::f32},
                                   {.width = 4, .dtype = DType::bf16, .form = plain, .activation = silu},
                                   {.width = 4, .bias = true, .dtype = DType::bf16, .form = plain, .activation = silu},
                                   {.width = 8, .bias = true, .dtype = DType::bf16, .form = plain, .activation = silu},
                                   {.width = 4, .bias = true, .dtype = DType::f16, .form = plain},
                                   {.width = 4, .dtype = DType::f32, .form = plain, .activation = silu},
                                   {.width = 5, .bias = true, .dtype = DType::f32, .form = plain, .activation = silu},
                                   {.width = 8, .bias = true, .dtype = DType::f32, .form = plain, .activation = silu}};
  for (const size_t of : {0, 3, 11, 13, 16}) specs.push_back(with_tree_drafts(specs[of]));
  return specs;
}

std::vector<RecurrentSpec> covering_recurrent_specs() {
  std::vector<RecurrentSpec> specs;
  const auto add = [&](int dim_k, int dim_v, DType dtype, DType state, StateLayout layout) -> RecurrentSpec& {
    RecurrentSpec& spec = specs.emplace_back();
    spec.num_k_heads = 4, spec.num_v_heads = 16, spec.head_dim_k = dim_k, spec.head_dim_v = dim_v;
    spec.dtype = dtype, spec.state_dtype = state, spec.layout = layout;
    return spec;
  };
  const auto delta = [](RecurrentSpec& spec) -> RecurrentSpec& { return spec.delta = spec.sigmoid_beta = spec.qk_norm = true, spec; };
  // Chunks, with the delta rule and without, of norms and not, and layers that have none.
  delta(add(128, 128, DType::bf16, DType::f32, StateLayout::v_first));
  delta(add(128, 128, DType::f16, DType::bf16, StateLayout::k_first));
  delta(add(64, 64, DType::bf16, DType::f16, StateLayout::v_first));
  add(128, 64, DType::bf16, DType::f32, StateLayout::v_first);
  add(128, 64, DType::bf16, DType::f16, StateLayout::k_first).qk_norm = true;
  add(64, 128, DType::f16, DType::f32, StateLayout::k_first);
  delta(add(128, 128, DType::bf16, DType::f32, StateLayout::v_first)).channel_gate = true;  // KDA
  add(256, 256, DType::f32, DType::f32, StateLayout::k_first).channel_gate = true;
  add(200, 130, DType::bf16, DType::f16, StateLayout::v_first).channel_rates = true;
  add(33, 31, DType::f32, DType::bf16, StateLayout::k_first).channel_rates = true;
  add(7, 5, DType::f16, DType::f32, StateLayout::v_first);
  add(16, 1, DType::bf16, DType::f32, StateLayout::v_first).channel_rates = true;
  add(256, 1, DType::f32, DType::f16, StateLayout::v_first);
  add(100, 1, DType::f16, DType::bf16, StateLayout::v_first);
  for (const size_t of : {0, 4, 6, 7, 8, 9, 11, 12, 13}) specs.push_back(with_tree_drafts(specs[of]));
  // Gates and norms of outputs: of a head, of more and more of them, and gates alone.
  for (const int heads : {1, 128, 1 << 10, 1 << 13, 1 << 14}) {
    RecurrentSpec& spec = add(16, 1, heads == 128 ? DType::f32 : DType::bf16, DType::f32, StateLayout::v_first);
    spec.num_k_heads = 1, spec.num_v_heads = heads, spec.norm_groups = 1;
    spec.out_gate = OutputGate::silu, spec.out_norm = heads == 1 ? OutputNorm::before_gate : OutputNorm::after_gate;
  }
  add(16, 1, DType::f16, DType::f32, StateLayout::v_first).out_gate = OutputGate::sigmoid;
  return specs;
}

std::vector<AttentionSpec> covering_specs() {
  std::vector<AttentionSpec> specs;
  const auto add = [&](DType q, DType kv, int dim_qk, int dim_v) { specs.push_back(spec_of(q, kv, dim_qk, dim_v)); };
  // Copied as it is, converted, widened from bytes, and the planes of f32; narrow, odd, unequal and wide heads.
  add(DType::bf16, DType::bf16, 128, 128);
  add(DType::bf16, DType::f32, 128, 128);
  specs.back().mask = {.custom = true, .positions = true}, specs.back().score = {.alibi = true};
  add(DType::bf16, DType::fp8_e4m3, 128, 128);
  add(DType::f16, DType::f16, 64, 64);
  add(DType::f16, DType::fp8_e5m2, 128, 128);
  specs.back().mask = {.chunk = 8192}, specs.back().score = {.head_scales = true};
  add(DType::fp8_e4m3, DType::fp8_e4m3, 128, 128);
  add(DType::f32, DType::f32, 128, 128);
  add(DType::f32, DType::bf16, 64, 64);
  specs.back().mask = {.window_left = 1023, .positions = true};
  add(DType::bf16, DType::fp8_e4m3, 80, 80);
  add(DType::bf16, DType::bf16, 192, 128);
  add(DType::bf16, DType::bf16, 256, 256);
  add(DType::bf16, DType::bf16, 512, 512);
  add(DType::bf16, DType::bf16, 576, 512);
  specs.back().kv_format = KvFormat::latent;
  specs.back().num_kv_heads = 1, specs.back().block_size = 64;
  for (const KvFormat format : {KvFormat::latent_rope, KvFormat::fp8_ds_mla}) {
    add(DType::bf16, DType::fp8_e4m3, 576, 512);
    specs.back().kv_format = format;
    specs.back().num_kv_heads = 1, specs.back().block_size = 64;
  }
  const auto with = [&](const Mask& mask, const ScoreMod& score, int block_size = 16) {
    add(DType::bf16, DType::bf16, 128, 128);
    specs.back().mask = mask;
    specs.back().score = score;
    specs.back().block_size = block_size;
  };
  with({.window_left = 1023}, {.soft_cap = 50.f, .sinks = true});
  with({.custom = true}, {.alibi = true});
  with({.causal = false}, {.relative_buckets = 32, .relative_max_distance = 128, .relative_bidirectional = true}, 0);
  return specs;
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

// The CUDA backends: what each refuses, and the table of kernels that it hands to the plan.
#include "imbrex/attention.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

#include "attention/known_mask.h"
#include "attention/kv_codec.h"
#include "attention/plan_checks.h"
#include "core/check.h"
#include "cuda/attention/attention_sm80.h"
#include "cuda/attention/attention_sm90.h"
#include "cuda/attention/attention_sm90_decode.h"
#include "cuda/attention/attention_sm90_fp8.h"
#include "cuda/attention/attention_sm90_latent.h"
#include "cuda/attention/attention_sm90_verify.h"
#include "cuda/attention/expressions.h"
#include "cuda/attention/flat_kv.h"
#include "cuda/attention/kernel_choices.h"
#include "cuda/attention/latent_kernels.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/plan/plan.h"
#include "family/begin_plan.h"

namespace imbrex {
namespace cuda {
namespace {

constexpr int kDecodeRows = 16, kVerifyRows = 64;

// Latents alone have a kernel of long verify: to others all of it is verify, whose tile leaves nothing to that regime.
bool is_verify(Regime regime) { return regime == kVerify || regime == kLongVerify; }

// Where the larger tile of verify does not fit, verify steps use that of decode.
std::optional<AttentionTiles> sm80_tiles(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  if (regime == kPrefill) return attention_sm80_tiles(arch, spec, kPrefill);
  const auto larger = is_verify(regime) ? attention_sm80_tiles(arch, spec, kVerify, kVerifyRows) : std::nullopt;
  return larger ? larger : attention_sm80_tiles(arch, spec, kDecode);
}

RegimeKernel sm80_kernel(const std::optional<AttentionTiles>& tiles) {
  if (!tiles) return {};
  return {.entry = "attention_sm80",
          .tile = {.rows = tiles->item_rows, .keys = tiles->keys},
          .threads = unsigned(tiles->threads()),
          .joins_pieces = tiles->key_warps > 1 || tiles->whole_items};
}

RegimeKernel sm80_kernel(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  return sm80_kernel(sm80_tiles(arch, spec, regime));
}

KernelKey sm80_attention(std::string_view arch, const AttentionSpec& spec, Regime regime, DType out) {
  return attention_sm80_key(arch, spec, out, *sm80_tiles(arch, spec, regime));
}

RegimeKernel sm80_sharing_kernel(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  return regime == kDecode ? sm80_kernel(attention_sm80_sharing_tiles(arch, spec)) : RegimeKernel{};
}

KernelKey sm80_sharing_attention(std::string_view arch, const AttentionSpec& spec, Regime, DType out) {
  return sharing(attention_sm80_key(arch, spec, out, *attention_sm80_sharing_tiles(arch, spec)));
}

// cuda_sm90 runs each regime with a kernel of its own where that takes the layer, and as cuda_sm80 does where not.
struct Sm90Prefill {
  const char* entry;
  std::vector<Reason> (*refusals)(const AttentionSpec&);
  Sm90Tiles (*tiles)(const AttentionSpec&);
  KernelKey (*key)(std::string_view arch, const AttentionSpec&, DType out);
  MakeMaps* maps;
  KernelKey (*flat_key)(std::string_view arch, const AttentionSpec&, DType out);
  MakeMaps* flat_maps;
};

const Sm90Prefill& sm90_prefill(const AttentionSpec& spec) {
  static constexpr Sm90Prefill kWords{"attention_sm90",    attention_sm90_refusals, attention_sm90_tiles,    attention_sm90_key,
                                      attention_sm90_maps, attention_sm90_flat_key, attention_sm90_flat_maps};
  static constexpr Sm90Prefill kBytes{"attention_sm90_fp8",        attention_sm90_fp8_refusals, attention_sm90_fp8_tiles,
                                      attention_sm90_fp8_key,      attention_sm90_fp8_maps,     attention_sm90_fp8_flat_key,
                                      attention_sm90_fp8_flat_maps};
  return spec.q_dtype == DType::fp8_e4m3 ? kBytes : kWords;
}

// Whether prefill has a kernel of its own, which latents of many dims do not.
bool has_sm90_prefill(const AttentionSpec& spec) { return sm90_prefill(spec).refusals(spec).empty() && !runs_sm90_latents("sm_90a", spec); }

std::optional<AttentionTiles> sm90_decode_tiles(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  if (regime == kDecode) return attention_sm90_decode_tiles(arch, spec, kDecodeRows);
  // Steps of more rows than these go to prefill, which has to be as fast.
  return is_verify(regime) && has_sm90_prefill(spec) ? attention_sm90_decode_tiles(arch, spec, 2 * kDecodeRows) : std::nullopt;
}

// Steps of more rows than decode's kernels take, and tokens of more q heads.
std::optional<Sm90VerifyTiles> sm90_verify_tiles(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  if (regime == kPrefill || (regime == kDecode && spec.group_size() <= kDecodeRows)) return std::nullopt;
  const auto tiles = attention_sm90_verify_tiles(arch, spec);
  // With one crew, a single warp widens all keys: with more dims than these that takes longer than decode's or prefill's kernel.
  constexpr int kFewDims = 64;
  const bool slow = tiles && widens(spec) && tiles->rows > kTeamRows && std::max(spec.head_dim_qk, spec.head_dim_v) > kFewDims;
  return slow && is_verify(regime) ? std::nullopt : tiles;
}

// What widens or copies rows is no faster alone.
bool shares_pace(const AttentionSpec& spec) { return !is_fp8(spec.kv_dtype) && !has_small_pages(spec); }

RegimeKernel sm90_decode_kernel(const AttentionSpec& spec, const AttentionTiles& tiles) {
  return {.entry = "attention_sm90_decode",
          .tile = {.rows = tiles.rows,
                   .keys = tiles.keys,
                   .runs = true,
                   .most_in_run = attention_sm90_decode_most_in_run(spec, tiles),
                   .blocks = tiles.blocks,
                   .blocks_each = shares_pace(spec) ? tiles.blocks : 1},
          .threads = attention_sm90_decode_threads(tiles),
          .maps = attention_sm90_decode_maps,
          .joins_pieces = true};
}

RegimeKernel sm90_kernel(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  if (arch != "sm_90a") return {};
  if (const auto kernel = sm90_latent_kernel(arch, spec, regime)) return *kernel;
  if (regime == kPrefill && has_sm90_prefill(spec)) {
    const Sm90Prefill& kernel = sm90_prefill(spec);
    const Sm90Tiles tiles = kernel.tiles(spec);
    return {.entry = kernel.entry,
            .tile = {.rows = tiles.item_rows(),
                     .keys = tiles.keys,
                     .runs = true,
                     .most_in_run = kMostInPrefillRun,
                     .blocks = 1,
                     .cluster = tiles.cluster * tiles.row_blocks,
                     .merged = true},
            .threads = tiles.threads(),
            .cluster = unsigned(tiles.cluster),
            .row_blocks = tiles.row_blocks,
            .run_sums = tiles.teams * kRunLevels * run_node_floats(spec.head_dim_v),
            .mask_teams = reads_mask_bits(spec) ? tiles.teams : 0,
            .maps = kernel.maps};
  }
  if (const auto tiles = sm90_verify_tiles(arch, spec, regime)) {
    return {.entry = "attention_sm90_verify",
            .tile = {.rows = tiles->rows,
                     .keys = tiles->keys,
                     .runs = true,
                     .blocks = tiles->crews,
                     .blocks_each = shares_pace(spec) ? tiles->crews : 1,
                     .tiles_each = tiles->each,
                     .merged = true},
            .threads = tiles->threads,
            .run_sums = attention_sm90_verify_run_sums(spec),
            .maps = attention_sm90_verify_maps};
  }
  if (const auto tiles = sm90_decode_tiles(arch, spec, regime)) return sm90_decode_kernel(spec, *tiles);
  return sm80_kernel(arch, spec, regime);
}

KernelKey sm90_attention(std::string_view arch, const AttentionSpec& spec, Regime regime, DType out) {
  if (auto key = sm90_latent_attention(arch, spec, regime, out, true)) return *std::move(key);
  if (regime == kPrefill && has_sm90_prefill(spec)) return sm90_prefill(spec).key(arch, spec, out);
  if (const auto tiles = sm90_verify_tiles(arch, spec, regime)) return attention_sm90_verify_key(arch, spec, out, *tiles, true);
  if (const auto tiles = sm90_decode_tiles(arch, spec, regime)) return attention_sm90_decode_key(arch, spec, out, *tiles, true);
  return sm80_attention(arch, spec, regime, out);
}

// The tiles of prefill without maps, where TMA cannot read the tensors. (Decode and verify have a variant that needs no maps.) The kernel
// of cuda_sm80 runs the same items, a part of their rows at a time, with keys that begin where the items' do. It cannot fold runs of
// pieces, and no result may depend on how many pieces a run has: so one thread block computes all keys of an item without pieces.
AttentionTiles mapless_prefill_tiles(std::string_view arch, const AttentionSpec& spec) {
  AttentionTiles tiles = *sm80_tiles(arch, spec, kPrefill);
  const Sm90Tiles items = sm90_prefill(spec).tiles(spec);
  tiles.item_rows = items.item_rows();
  tiles.keys = std::gcd(tiles.keys, items.keys);
  tiles.whole_items = true;
  return tiles;
}

bool takes_mapless_prefill(const AttentionSpec& spec, Regime regime) { return regime == kPrefill && has_sm90_prefill(spec); }

RegimeKernel mapless_kernel(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  return takes_mapless_prefill(spec, regime) ? sm80_kernel(mapless_prefill_tiles(arch, spec)) : sm90_kernel(arch, spec, regime);
}

KernelKey mapless_attention(std::string_view arch, const AttentionSpec& spec, Regime regime, DType out) {
  if (auto key = sm90_latent_attention(arch, spec, regime, out, false)) return *std::move(key);
  if (takes_mapless_prefill(spec, regime)) return attention_sm80_key(arch, spec, out, mapless_prefill_tiles(arch, spec));
  if (const auto tiles = sm90_verify_tiles(arch, spec, regime)) return attention_sm90_verify_key(arch, spec, out, *tiles, false);
  return attention_sm90_decode_key(arch, spec, out, *sm90_decode_tiles(arch, spec, regime), false);
}

// Items that several requests share: in the kernel of decode, or as cuda_sm80 has them where decode is left to that.
std::optional<AttentionTiles> sm90_sharing_tiles(std::string_view arch, const AttentionSpec& spec) {
  const char* const entry = sm90_kernel(arch, spec, kDecode).entry;
  const bool own = entry != nullptr && std::string_view(entry) == "attention_sm90_decode";
  return own ? attention_sm90_decode_sharing_tiles(arch, spec) : std::nullopt;
}

RegimeKernel sm90_sharing_kernel(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  if (regime != kDecode) return {};
  if (const auto tiles = sm90_sharing_tiles(arch, spec)) return sm90_decode_kernel(spec, *tiles);
  const char* const entry = sm90_kernel(arch, spec, kDecode).entry;
  return entry != nullptr && std::string_view(entry) == "attention_sm80" ? sm80_sharing_kernel(arch, spec, kDecode) : RegimeKernel{};
}

KernelKey sm90_sharing_attention(std::string_view arch, const AttentionSpec& spec, Regime regime, DType out) {
  if (const auto tiles = sm90_sharing_tiles(arch, spec)) return sharing(attention_sm90_decode_key(arch, spec, out, *tiles, true));
  return sm80_sharing_attention(arch, spec, regime, out);
}

KernelKey mapless_sharing_attention(std::string_view arch, const AttentionSpec& spec, Regime, DType out) {
  return sharing(attention_sm90_decode_key(arch, spec, out, *sm90_sharing_tiles(arch, spec), false));
}

// Over flat keys: prefill alone, and the same items too.
RegimeKernel flat_kernel(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  if (arch != "sm_90a" || regime != kPrefill || !has_sm90_prefill(spec) || !flattens(spec)) return {};
  RegimeKernel kernel = sm90_kernel(arch, spec, regime);
  const Sm90Tiles tiles = sm90_prefill(spec).tiles(spec).over_flat();
  kernel.cluster = unsigned(tiles.cluster), kernel.row_blocks = tiles.row_blocks;
  kernel.maps = sm90_prefill(spec).flat_maps;
  return kernel;
}

KernelKey flat_attention(std::string_view arch, const AttentionSpec& spec, Regime, DType out) {
  return sm90_prefill(spec).flat_key(arch, spec, out);
}

// Where there are few tasks: latents alone.
template <bool fewest>
RegimeKernel few_tasks_kernel(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  return sm90_few_tasks_kernel(arch, spec, regime, fewest);
}

template <bool fewest>
KernelKey few_tasks_attention(std::string_view arch, const AttentionSpec& spec, Regime regime, DType out) {
  return sm90_few_tasks_attention(arch, spec, regime, out, fewest);
}

// Of results of any of these kernels.
KernelKey sm90_merge_key(std::string_view arch, const AttentionSpec& spec, DType out) {
  KernelKey key = merge_key(arch, spec, out);
  std::ranges::find(key.config, std::string_view("kShortSums"), &Constant::name)->value =
      std::ranges::any_of(kRegimes, [&](Regime regime) { return sm90_kernel(arch, spec, regime).short_sums; });
  return key;
}

constexpr int kLeastSm80 = 80;

// Expressions that have more tensors than a launch has room for.
std::vector<Reason> score_mod_refusals(const AttentionSpec& spec) {
  const size_t tensors = spec.score_mod.empty() ? 0 : spec.score_mod.tensors().size();
  if (tensors <= kMostScoreTensors) return {};
  return {{"spec.score_mod", fmt::format("{} tensors at most", kMostScoreTensors), fmt::format("{}", tensors)}};
}

// Dimensions whose tiles the shared memory of the device does not hold.
std::vector<Reason> sm80_refusals(const AttentionSpec& spec, const DeviceInfo& device) {
  // Records are widened to bf16, which f16 queries cannot be multiplied by, and what holds a record is too wide for products of fp8.
  if (spec.kv_format == KvFormat::fp8_ds_mla && spec.q_dtype != DType::bf16 && spec.q_dtype != DType::f32)
    return {{"spec.q_dtype", "bf16 or f32", to_string(spec.q_dtype)}};
  if (auto reasons = score_mod_refusals(spec); !reasons.empty()) return reasons;
  if (device.sm < kLeastSm80) return {};
  const std::string arch = arch_of(device);
  if (std::all_of(std::begin(kRegimes), std::end(kRegimes), [&](Regime regime) { return sm80_tiles(arch, spec, regime).has_value(); }))
    return {};
  return {{"spec.head_dim_qk",
           fmt::format("dimensions of which {} tiles fit {} KiB of shared memory", to_string(spec.q_dtype), device.max_smem_bytes >> 10),
           spec.head_dim_qk == spec.head_dim_v ? fmt::format("{}", spec.head_dim_qk)
                                               : fmt::format("{} and {}", spec.head_dim_qk, spec.head_dim_v)}};
}

bool sm80_reads(KvFormat format) { return format == KvFormat::fp8_ds_mla || format == KvFormat::latent_rope; }
bool sm90_reads(KvFormat format) { return format == KvFormat::fp8_ds_mla; }

// Why none of the kernels of cuda_sm90 takes a layer.
std::vector<Reason> sm90_refusals(const AttentionSpec& spec, const DeviceInfo&) {
  if (auto reasons = score_mod_refusals(spec); !reasons.empty()) return reasons;
  const bool few_rows = attention_sm90_decode_tiles("sm_90a", spec, kDecodeRows) || attention_sm90_verify_tiles("sm_90a", spec);
  if (few_rows || runs_sm90_latents("sm_90a", spec)) return {};
  std::vector<Reason> reasons = sm90_prefill(spec).refusals(spec);
  // Kernels for latents take their dims and every number of heads: where there is another reason, it is that one.
  const auto is_met = [](const Reason& reason) { return reason.code == "spec.head_dim_qk" || reason.code == "spec.num_q_heads"; };
  if (has_latent_dims(spec) && codec_of(spec).values_in_keys &&
      (spec.kv_format == KvFormat::latent_rope || !std::ranges::all_of(reasons, is_met)))
    std::erase_if(reasons, is_met);
  return reasons;
}

}  // namespace

const AttentionKernels kernels_sm80_sharing{"cuda_sm80", sm80_sharing_kernel, sm80_sharing_attention, merge_key};
const AttentionKernels kernels_sm80{"cuda_sm80", sm80_kernel, sm80_attention,        merge_key, nullptr,
                                    nullptr,     {},          &kernels_sm80_sharing, sm80_reads};
const AttentionKernels kernels_mapless{"cuda_sm90", mapless_kernel, mapless_attention, merge_key};
const AttentionKernels kernels_mapless_sharing{"cuda_sm90", sm90_sharing_kernel, mapless_sharing_attention, merge_key};
const AttentionKernels kernels_sm90_sharing{"cuda_sm90", sm90_sharing_kernel, sm90_sharing_attention, merge_key, &kernels_mapless_sharing};
const AttentionKernels kernels_flat{"cuda_sm90", flat_kernel, flat_attention, merge_key};
const AttentionKernels kernels_few_tasks{"cuda_sm90", few_tasks_kernel<false>, few_tasks_attention<false>, merge_key};
const AttentionKernels kernels_fewest_tasks{"cuda_sm90", few_tasks_kernel<true>, few_tasks_attention<true>, merge_key};
constexpr std::array kFewTasks{&kernels_few_tasks, &kernels_fewest_tasks};
const AttentionKernels kernels_sm90{"cuda_sm90",   sm90_kernel, sm90_attention,        sm90_merge_key, &kernels_mapless,
                                    &kernels_flat, kFewTasks,   &kernels_sm90_sharing, sm90_reads};

bool reads(const AttentionKernels& kernels, const AttentionSpec& spec) {
  return codec_of(spec).strided || (kernels.reads_format != nullptr && kernels.reads_format(spec.kv_format));
}

}  // namespace cuda

namespace {

// Those that kernels read: "strided, latent or fp8_ds_mla".
std::string formats_of(const cuda::AttentionKernels& kernels) {
  std::vector<std::string_view> names;
  AttentionSpec spec;
  for (const KvFormat format : kv_formats()) {
    spec.kv_format = format;
    if (reads(kernels, spec)) names.push_back(codec_of(format).name);
  }
  const std::string_view last = names.back();
  names.pop_back();
  return fmt::format("{} or {}", fmt::join(names, ", "), last);
}

class CudaBackend final : public BackendOf<AttentionFamily> {
 public:
  using Refusals = std::vector<Reason>(const AttentionSpec&, const DeviceInfo&);
  struct Sm {
    int least, most;  // compute capability, times ten
    std::string str() const { return least == most ? fmt::format("{}", least) : fmt::format("{} or more", least); }
  };
  // `refusals`: what the kernels cannot run, whatever the device and the cache's format are.
  CudaBackend(const cuda::AttentionKernels& kernels, std::string_view description, Sm sm, Refusals* refusals)
      : kernels_(kernels), description_(description), sm_(sm), refusals_(refusals) {}
  std::string_view name() const override { return kernels_.backend; }
  std::string_view description() const override { return description_; }

  std::vector<Reason> unsupported(const AttentionSpec& given, const DeviceInfo& device) const override {
    const AttentionSpec spec = with_known_mask(given);
    std::vector<Reason> reasons;
    if (device.device.type != DeviceType::cuda) {
      reasons.push_back({"device.type", "cuda", to_string(device.device.type)});
    } else if (device.sm < sm_.least || device.sm > sm_.most) {
      reasons.push_back({"device.sm", sm_.str(), fmt::format("{}", device.sm)});
    }
    if (!reads(kernels_, spec)) reasons.push_back({"spec.kv_format", formats_of(kernels_), to_string(spec.kv_format)});
    std::ranges::move(refusals_(spec, device), std::back_inserter(reasons));
    return reasons;
  }

  std::unique_ptr<AttentionPlan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options);
    return std::make_unique<cuda::Plan>(kernels_, with_known_mask(spec), device, options);
  }

  int64_t workspace_bytes(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    check_request(*this, spec.str(), unsupported(spec, device), device, options);
    return int64_t(cuda::outline(kernels_, with_known_mask(spec), device, options).scratch_bytes);
  }

  std::vector<KernelChoice> kernel_choices(const AttentionSpec& spec, const DeviceInfo& device) const override {
    check_request(*this, spec.str(), unsupported(spec, device), device, {});
    return cuda::kernel_choices(kernels_, with_known_mask(spec), device);
  }

 private:
  const cuda::AttentionKernels& kernels_;
  std::string_view description_;
  Sm sm_;
  Refusals* refusals_;
};

}  // namespace

const BackendOf<AttentionFamily>& cuda_sm80() {
  static const CudaBackend backend(cuda::kernels_sm80, "tensor-core products (mma.sync) on every NVIDIA GPU since Ampere",
                                   {.least = cuda::kLeastSm80, .most = std::numeric_limits<int>::max()}, cuda::sm80_refusals);
  return backend;
}

const BackendOf<AttentionFamily>& cuda_sm90() {
  static const CudaBackend backend(cuda::kernels_sm90, "prefill with wgmma, decode and verify with TMA on Hopper, the rest as in cuda_sm80",
                                   {.least = 90, .most = 90}, cuda::sm90_refusals);
  return backend;
}

}  // namespace imbrex

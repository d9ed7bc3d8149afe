// See steps.h.
#include "cuda/mla/steps.h"

#include <algorithm>

#include "attention/kv_codec.h"
#include "core/check.h"
#include "core/tensor_layout.h"
#include "cuda/attention/kv_side.h"

namespace imbrex::cuda {
namespace {

constexpr int64_t kMostBlocks = 1 << 13;  // of a launch; blocks take rows in turn
constexpr int kMlaWarps = kMlaThreads / 32;

enum LatentFormat : int { kPlainLatents, kDsMlaRecords, kRopeInTensor };  // as in gather_latents.cu
LatentFormat format_of(KvFormat format) {
  return format == KvFormat::fp8_ds_mla ? kDsMlaRecords : format == KvFormat::latent_rope ? kRopeInTensor : kPlainLatents;
}

LaunchShape shape_of(int64_t units, int64_t of_block) {
  return {.grid_x = unsigned(std::clamp<int64_t>((units + of_block - 1) / of_block, 1, kMostBlocks)), .threads = kMlaThreads};
}

LatentSide side_of(const KvSide& side) {
  return {.data = side.data,
          .block_stride = side.block_stride,
          .token_stride = side.token_stride,
          .dim_stride = side.dim_stride,
          .scale_there = side.scales,
          .scale = side.scale};
}

}  // namespace

KernelKey gather_latents_key(std::string_view arch, const MlaSpec& spec) {
  return {"gather_latents.cu",
          std::string(arch),
          {{"kFrom", int(spec.kv_dtype)}, {"kTo", int(spec.dtype)}, {"kLatentFormat", int(format_of(spec.kv_format))}}};
}
KernelKey copy_rows_key(std::string_view arch) { return {"copy_rows.cu", std::string(arch), {}}; }
KernelKey add_parts_key(std::string_view arch) { return {"add_parts.cu", std::string(arch), {}}; }

std::vector<KernelKey> mla_kernels(std::string_view arch, const MlaSpec& spec, bool may_expand) {
  if (spec.absorbed) return {};
  std::vector<KernelKey> keys{copy_rows_key(arch)};
  if (may_expand) keys.insert(keys.end(), {gather_latents_key(arch, spec), add_parts_key(arch)});
  return keys;
}

MlaSteps::MlaSteps(const std::shared_ptr<const Context>& context, std::string_view arch, const MlaSpec& spec, bool may_expand)
    : spec_(spec) {
  for (const KernelKey& key : mla_kernels(arch, spec, may_expand)) modules_.push_back(Module::load(context, key));
  copy_16_ = modules_[0]->kernel("copy_rows_16"), copy_2_ = modules_[0]->kernel("copy_rows_2");
  if (!may_expand) return;
  gather_aligned_ = modules_[1]->kernel("gather_latents_aligned"), gather_unaligned_ = modules_[1]->kernel("gather_latents_unaligned");
  add_ = modules_[2]->kernel("add_parts");
}

void MlaSteps::copy_rows(const TensorView& from, const TensorView& to, Tokens tokens, const RangeList<TokenRows>& list, int num_rows,
                         const LengthsThere& lengths, CUstream stream) const {
  const int64_t size = size_of(from.dtype), dim = from.rank == 3 ? from.size(2) : 1;
  if (num_rows == 0 || dim == 0) return;
  const CopyRowsParams params{.from = from.as<const char>(),
                              .to = to.as<char>(),
                              .from_row = byte_stride(from, 0),
                              .from_head = byte_stride(from, 1),
                              .to_row = byte_stride(to, 0),
                              .to_head = byte_stride(to, 1),
                              .ranges = list.ranges,
                              .num_ranges = list.count,
                              .from_tokens = tokens == Tokens::from,
                              .num_rows = num_rows,
                              .num_heads = int(from.size(1)),
                              .bytes = int(dim * size),
                              .lengths = lengths};
  const uint64_t all = uint64_t(params.from_row | params.from_head | params.to_row | params.to_head | params.bytes) |
                       reinterpret_cast<uintptr_t>(from.data) | reinterpret_cast<uintptr_t>(to.data);
  const bool wide = all % 16 == 0;
  const int64_t words = params.bytes / (wide ? 16 : 2) * int64_t(params.num_heads) * num_rows;
  (wide ? copy_16_ : copy_2_).launch(shape_of(words, kMlaThreads), stream, params);
}

void MlaSteps::gather(const KvCache& cache, const RoundKeys& keys, const TensorView& latents, const TensorView& k, CUstream stream) const {
  const AttentionSpec attention = spec_.latent_spec();
  AttentionParams sides{};
  set_sides(attention, with_values(attention, cache), sides);
  const int64_t unit = is_fp8(spec_.kv_dtype) && spec_.kv_format != KvFormat::fp8_ds_mla ? 8 : 16;  // as load_eight() reads
  const bool aligned = is_aligned(cache.k, unit) && (cache.k_rope.empty() || is_aligned(cache.k_rope, unit));
  const GatherLatentsParams params{.latents = side_of(sides.k),
                                   .rope = side_of(sides.v),
                                   .block_ids = keys.block_ids,
                                   .block_starts = keys.block_starts,
                                   .ranges = keys.list.ranges,
                                   .num_ranges = keys.list.count,
                                   .num_rows = keys.num_keys,
                                   .block_size = spec_.block_size,
                                   .rank = spec_.kv_lora_rank,
                                   .rope_dim = spec_.qk_rope_dim,
                                   .num_heads = int(k.size(1)),
                                   .to = latents.as<char>(),
                                   .to_rope = k.as<char>() + spec_.qk_nope_dim * size_of(k.dtype),
                                   .to_rope_token = byte_stride(k, 0),
                                   .to_rope_head = byte_stride(k, 1)};
  (aligned ? gather_aligned_ : gather_unaligned_).launch(shape_of(keys.num_keys, kMlaWarps), stream, params);
}

void MlaSteps::add(const PartialResult& part, const PartialResult& sum, const RangeList<TokenRows>& list, int num_rows,
                   const TensorView& sinks, const TensorView& out, const TensorView& lse, CUstream stream) const {
  if (num_rows == 0) return;
  const AddPartsParams params{.part = part.out.as<const float>(),
                              .part_lse = part.lse.as<const float>(),
                              .sum = sum.out.as<float>(),
                              .sum_lse = sum.lse.as<float>(),
                              .sinks = sinks.as<const float>(),
                              .out = out.as<char>(),
                              .lse = lse.as<float>(),
                              .out_token = byte_stride(out, 0),
                              .out_head = byte_stride(out, 1),
                              .lse_token = lse.empty() ? 0 : lse.stride(0),
                              .lse_head = lse.empty() ? 0 : lse.stride(1),
                              .sink_stride = sinks.empty() ? 0 : sinks.stride(0),
                              .ranges = list.ranges,
                              .num_ranges = list.count,
                              .num_rows = num_rows,
                              .num_heads = int(part.out.size(1)),
                              .dim = int(part.out.size(2)),
                              .out_type = int(out.dtype)};
  add_.launch(shape_of(int64_t(num_rows) * params.num_heads, kMlaWarps), stream, params);
}

}  // namespace imbrex::cuda

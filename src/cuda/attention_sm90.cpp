// See attention_sm90.h.
#include "cuda/attention_sm90.h"

#include <algorithm>
#include <bit>

#include "core/check.h"
#include "cuda/attention_constants.h"
#include "cuda/params.h"
#include "cuda/tensor_map.h"

namespace imbrex::cuda {
int attention_sm90_tile_keys(const AttentionSpec& spec) { return spec.head_dim_v > 128 ? 64 : 128; }

std::vector<Reason> attention_sm90_refusals(const AttentionSpec& spec) {
  constexpr int kLeastPage = 8;   // rows of a box: the swizzle repeats after so many
  constexpr int kMostGroup = 64;  // rows of a warpgroup: it takes whole tokens
  const int dim = spec.head_dim_v, tile = attention_sm90_tile_keys(spec), page = spec.block_size, group = spec.group_size();
  std::vector<Reason> reasons;
  const auto need = [&](bool met, const char* code, std::string wanted, std::string actual) {
    if (!met) reasons.push_back({code, std::move(wanted), std::move(actual)});
  };
  need(spec.q_dtype == DType::bf16 || spec.q_dtype == DType::f16, "spec.q_dtype", "bf16 or f16", to_string(spec.q_dtype));
  need(spec.kv_dtype == spec.q_dtype, "spec.kv_dtype", fmt::format("{}, as the queries", to_string(spec.q_dtype)),
       to_string(spec.kv_dtype));
  need(spec.head_dim_qk == dim && (dim == 64 || dim == 128 || dim == 256), "spec.head_dim_qk", "64, 128 or 256, for keys and values",
       fmt::format("{} and {}", spec.head_dim_qk, dim));
  need(std::has_single_bit(unsigned(group)) && group <= kMostGroup, "spec.num_q_heads",
       fmt::format("a power of two up to {} for each kv head", kMostGroup), fmt::format("{}", group));
  need(page == 0 || page % tile == 0 || (page >= kLeastPage && tile % page == 0), "spec.block_size",
       fmt::format("a divisor of {} from {} on, or a multiple of it", tile, kLeastPage), fmt::format("{}", page));
  need(!spec.mask.custom, "spec.mask.custom", "no custom mask", "a custom mask");
  need(spec.score.relative_buckets == 0, "spec.score.relative_buckets", "0", fmt::format("{}", spec.score.relative_buckets));
  return reasons;
}

KernelKey attention_sm90_key(std::string_view arch, const AttentionSpec& spec, DType out) {
  return {"attention_sm90.cu", std::string(arch),
          attention_constants(
              spec, out, {{"kTileRows", kSm90TileRows}, {"kTileKeys", attention_sm90_tile_keys(spec)}, {"kKeyWarps", 1}, {"kStages", 2}})};
}

bool attention_sm90_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  if (q.stride(2) != 1) return false;
  const uint64_t size = uint64_t(size_of(q.dtype));
  const uint64_t sizes[3] = {uint64_t(q.size(2)), uint64_t(q.size(1)), uint64_t(q.size(0))};
  const uint64_t strides[2] = {uint64_t(q.stride(1)) * size, uint64_t(q.stride(0)) * size};
  const uint32_t group = uint32_t(spec.group_size()), box[3] = {uint32_t(kTensorMapLine / size), group, 64 / group};
  const int tile = attention_sm90_tile_keys(spec);
  return encode_tensor_map(maps.q, q.dtype, q.data, 3, sizes, strides, box) && encode_kv_map(maps.k, kv.k, tile) &&
         encode_kv_map(maps.v, kv.v, tile);
}

}  // namespace imbrex::cuda

// See attention_sm90_fp8.h.
#include "cuda/attention_sm90_fp8.h"

#include "core/check.h"
#include "cuda/attention_constants.h"
#include "cuda/tensor_map.h"

namespace imbrex::cuda {
// As many scores as registers have room for, beside the output and what logits need.
Sm90Tiles attention_sm90_fp8_tiles(const AttentionSpec& spec) {
  constexpr int kTeams = 2;
  return {.teams = kTeams,
          .rows = kTeams * sm90_team_rows(spec),
          .keys = has_plain_logits(spec) ? 192 : 128,
          .stages = 2,
          .cluster = attention_sm90_cluster(spec)};
}

std::vector<Reason> attention_sm90_fp8_refusals(const AttentionSpec& spec) {
  const int dim = spec.head_dim_v, group = spec.group_size();
  std::vector<Reason> reasons;
  const auto need = [&](bool met, const char* code, std::string wanted, std::string actual) {
    if (!met) reasons.push_back({code, std::move(wanted), std::move(actual)});
  };
  need(spec.q_dtype == DType::fp8_e4m3, "spec.q_dtype", to_string(DType::fp8_e4m3), to_string(spec.q_dtype));
  need(spec.kv_dtype == DType::fp8_e4m3, "spec.kv_dtype", to_string(DType::fp8_e4m3), to_string(spec.kv_dtype));
  need(spec.head_dim_qk == dim && (dim == 64 || dim == 128), "spec.head_dim_qk", "64 or 128, for keys and values",
       fmt::format("{} and {}", spec.head_dim_qk, dim));
  need(group <= kTeamRows, "spec.num_q_heads", fmt::format("{} for each kv head at most", kTeamRows), fmt::format("{}", group));
  need(!has_small_pages(spec), "spec.block_size", fmt::format("a multiple of {}", kLeastBoxKeys), fmt::format("{}", spec.block_size));
  need(!spec.mask.custom, "spec.mask.custom", "no custom mask", "a custom mask");
  need(spec.score.relative_buckets == 0, "spec.score.relative_buckets", "0", fmt::format("{}", spec.score.relative_buckets));
  return reasons;
}

KernelKey attention_sm90_fp8_key(std::string_view arch, const AttentionSpec& spec, DType out) {
  return sm90_prefill_key("attention_sm90_fp8.cu", arch, spec, out, attention_sm90_fp8_tiles(spec));
}

bool attention_sm90_fp8_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  if (q.stride(2) != 1) return false;
  const uint64_t sizes[3] = {uint64_t(q.size(2)), uint64_t(q.size(1)), uint64_t(q.size(0))};
  const uint64_t strides[2] = {uint64_t(q.stride(1)), uint64_t(q.stride(0))};
  const int width = spec.head_dim_v;
  const Sm90Tiles tiles = attention_sm90_fp8_tiles(spec);
  const uint32_t group = uint32_t(spec.group_size()), box[3] = {uint32_t(width), group, kTeamRows / group};
  return encode_tensor_map(maps.q, q.dtype, q.data, 3, sizes, strides, box) &&
         encode_kv_map(maps.k, kv.k, tiles.keys, width, tiles.cluster) && encode_kv_map(maps.v, kv.v, tiles.keys, width, tiles.cluster);
}

}  // namespace imbrex::cuda

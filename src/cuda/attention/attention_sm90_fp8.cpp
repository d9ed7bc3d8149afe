// See attention_sm90_fp8.h.
#include "cuda/attention/attention_sm90_fp8.h"

#include "core/check.h"
#include "cuda/attention/attention_constants.h"
#include "cuda/attention/flat_kv.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

bool encode_maps(const AttentionSpec& spec, const Sm90Tiles& tiles, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  const int width = sm90_fp8_chunk(spec.head_dim_v);
  return encode_query_map(maps.q, spec, q, kTeamRows, width) && encode_kv_map(maps.k, kv.k, tiles.keys, width, tiles.cluster) &&
         encode_kv_map(maps.v, kv.v, tiles.keys, width, tiles.cluster);
}

}  // namespace

// The tiles have as many scores as registers have room for, beside the output and what logits need.
Sm90Tiles attention_sm90_fp8_tiles(const AttentionSpec& spec) {
  constexpr int kTeams = 2;
  const int dim = spec.head_dim_v;
  const bool plain = has_plain_logits(spec);
  const int keys = dim <= 128 ? (plain ? 192 : 128) : !plain ? 64 : dim <= 192 ? 128 : 96;
  return {.teams = kTeams,
          .rows = kTeams * sm90_team_rows(spec),
          .keys = keys,
          .stages = 2,
          .cluster = attention_sm90_cluster(spec),
          .row_blocks = flattens(spec) ? attention_sm90_cluster(flat_spec(spec)) : 1};
}

std::vector<Reason> attention_sm90_fp8_refusals(const AttentionSpec& spec) {
  constexpr int kDimUnit = 16, kMostDims = 256;
  const int dim = spec.head_dim_v, group = spec.group_size();
  const bool dims = spec.head_dim_qk == dim && dim % kDimUnit == 0 && dim <= kMostDims;
  std::vector<Reason> reasons;
  const auto need = [&](bool met, const char* code, std::string wanted, std::string actual) {
    if (!met) reasons.push_back({code, std::move(wanted), std::move(actual)});
  };
  need(spec.q_dtype == DType::fp8_e4m3, "spec.q_dtype", to_string(DType::fp8_e4m3), to_string(spec.q_dtype));
  need(spec.kv_dtype == DType::fp8_e4m3, "spec.kv_dtype", to_string(DType::fp8_e4m3), to_string(spec.kv_dtype));
  need(dims, "spec.head_dim_qk", fmt::format("the same multiple of {} up to {} for keys and values", kDimUnit, kMostDims),
       fmt::format("{} and {}", spec.head_dim_qk, dim));
  need(group <= kTeamRows, "spec.num_q_heads", fmt::format("{} for each kv head at most", kTeamRows), fmt::format("{}", group));
  need(!spec.mask.custom, "spec.mask.custom", "no custom mask", "a custom mask");
  need(spec.mask_mod.empty(), "spec.mask_mod", "none", spec.mask_mod.str());
  need(spec.score_mod.empty(), "spec.score_mod", "none", spec.score_mod.str());
  need(!spec.mask.tree, "spec.mask.tree", "no tree of drafts", "a tree");
  need(!spec.mask.positions, "spec.mask.positions", "positions aligned at the bottom right", "given positions");
  need(spec.score.relative_buckets == 0, "spec.score.relative_buckets", "0", fmt::format("{}", spec.score.relative_buckets));
  need(!spec.score.alibi_sqrt, "spec.score.alibi_sqrt", "false", "true");  // distances are added to a tile at a time, by their sum
  return reasons;
}

KernelKey attention_sm90_fp8_key(std::string_view arch, const AttentionSpec& spec, DType out) {
  return sm90_prefill_key("attention_sm90_fp8.cu", arch, spec, out, attention_sm90_fp8_tiles(spec));
}

KernelKey attention_sm90_fp8_flat_key(std::string_view arch, const AttentionSpec& spec, DType out) {
  return sm90_prefill_key("attention_sm90_fp8.cu", arch, flat_spec(spec), out, attention_sm90_fp8_tiles(spec).over_flat());
}

bool attention_sm90_fp8_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  if (!has_small_pages(spec)) return encode_maps(spec, attention_sm90_fp8_tiles(spec), q, kv, maps);
  return encode_query_map(maps.q, spec, q, kTeamRows, sm90_fp8_chunk(spec.head_dim_v)) && has_aligned_rows(kv.k) && has_aligned_rows(kv.v);
}

bool attention_sm90_fp8_flat_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& flat, AttentionMaps& maps) {
  return encode_maps(spec, attention_sm90_fp8_tiles(spec).over_flat(), q, flat, maps);
}

}  // namespace imbrex::cuda

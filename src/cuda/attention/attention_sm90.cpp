// See attention_sm90.h.
#include "cuda/attention/attention_sm90.h"

#include <algorithm>

#include "attention/mask_mod_stretches.h"
#include "core/check.h"
#include "cuda/attention/attention_constants.h"
#include "cuda/attention/expressions.h"
#include "cuda/attention/flat_kv.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

constexpr int kWidenedParts = 4;  // in which attention_sm90_widen.cuh loads a tile

// As the kernel for a spec whose mask it reads as bits has it: wherever the bits come from.
AttentionSpec with_mask_bits(AttentionSpec spec) {
  spec.mask.custom = reads_mask_bits(spec);
  spec.mask_mod = {};
  return spec;
}

// Keys of a tile whose logits a score_mod changes: elements of tensors that are loaded for each score, several at a time, take registers,
// and so do long expressions.
int keys_beside_score_mod(const AttentionSpec& spec) {
  constexpr size_t kShort = 32, kLong = 96;  // operations
  const size_t operations = spec.score_mod.nodes().size();
  if (operations > kShort) return operations > kLong ? 64 : 80;
  const ScoreParts parts = score_parts_of(spec);
  return parts.columns.size() > 1 || loads_for_each_key(spec.score_mod, parts) ? 80 : 128;
}

}  // namespace

bool reads_mask_bits(const AttentionSpec& spec) { return spec.mask.custom || !spec.mask_mod.empty(); }

bool widens(const AttentionSpec& spec) { return is_fp8(spec.kv_dtype) && !is_fp8(spec.q_dtype); }

int attention_sm90_cluster(const AttentionSpec& spec) {
  const bool plain_mask = !has_window(spec.mask) && !reads_mask_bits(spec);
  return has_plain_logits(spec) && plain_mask && spec.num_kv_heads % 2 == 0 && !has_small_pages(spec) && !widens(spec) ? 2 : 1;
}

int sm90_team_rows(const AttentionSpec& spec) { return kTeamRows / spec.group_size() * spec.group_size(); }

// The tiles that ran fastest of those that shared memory and registers hold, or the largest ones where logits need registers.
Sm90Tiles attention_sm90_tiles(const AttentionSpec& spec) {
  const ScoreMod& score = spec.score;
  const bool caps = score.soft_cap > 0, more = score.alibi && (caps || score.head_scales || has_window(spec.mask));
  Sm90Tiles tiles{.teams = 2, .rows = 0, .keys = 128, .stages = 2, .cluster = attention_sm90_cluster(spec)};
  const bool masked = reads_mask_bits(spec);
  if (spec.head_dim_qk <= 64) {
    // Warps that widen take whole pages of a quarter of a tile; that, copies of rows and masks need registers that three warpgroups do not
    // leave.
    const bool two = masked || (widens(spec) && !has_plain_logits(spec)) || (caps && has_small_pages(spec));
    tiles.stages = 3, tiles.teams = two ? 2 : 3, tiles.keys = two || !caps ? 128 : more ? 80 : 96;
  }
  if (!spec.score_mod.empty()) {
    const int most = keys_beside_score_mod(spec);
    tiles.teams = 2, tiles.keys = most < 128 && (masked || widens(spec)) ? 64 : most;  // words of bits, and whole pages of a quarter
  }
  if (spec.head_dim_v > 128) tiles.keys = masked || score.alibi || !spec.score_mod.empty() ? 64 : 80;
  if (widens(spec) && spec.head_dim_qk > 128) tiles.keys = 64;  // beside the bytes
  tiles.rows = tiles.teams * sm90_team_rows(spec);
  if (flattens(spec)) tiles.row_blocks = attention_sm90_cluster(flat_spec(spec));
  return tiles;
}

std::vector<Reason> attention_sm90_refusals(const AttentionSpec& spec) {
  constexpr int kDimUnit = 8, kMostDims = 256;
  const int qk = spec.head_dim_qk, v = spec.head_dim_v, group = spec.group_size();
  const bool dims = qk == v ? v <= kMostDims && v % kDimUnit == 0 : qk == 192 && v == 128 && !widens(spec);
  std::vector<Reason> reasons;
  const auto need = [&](bool met, const char* code, std::string wanted, std::string actual) {
    if (!met) reasons.push_back({code, std::move(wanted), std::move(actual)});
  };
  need(spec.q_dtype == DType::bf16 || spec.q_dtype == DType::f16, "spec.q_dtype", "bf16 or f16", to_string(spec.q_dtype));
  need(spec.kv_dtype == spec.q_dtype || spec.kv_dtype == DType::fp8_e4m3, "spec.kv_dtype",
       fmt::format("{}, as the queries, or {}", to_string(spec.q_dtype), to_string(DType::fp8_e4m3)), to_string(spec.kv_dtype));
  need(dims, "spec.head_dim_qk", fmt::format("the same multiple of {} up to {} for keys and values, or 192 and 128", kDimUnit, kMostDims),
       fmt::format("{} and {}", qk, v));
  need(group <= kTeamRows, "spec.num_q_heads", fmt::format("{} for each kv head at most", kTeamRows), fmt::format("{}", group));
  need(mask_mod_heads(spec) == 1, "spec.mask_mod", "a mask that is the same for all heads", spec.mask_mod.str());
  need(!spec.mask.positions, "spec.mask.positions", "positions aligned at the bottom right", "given positions");
  AttentionSpec without = spec;
  without.score_mod = {};
  need(spec.score_mod.empty() || has_plain_logits(without), "spec.score_mod", "no score_mod beside what else a logit becomes",
       spec.score_mod.str());
  // Registers again: with 64 dims a thread block has three warpgroups.
  need(!spec.mask.tree || (has_plain_logits(spec) && !(has_window(spec.mask) && v <= kSm90ChunkDims)), "spec.mask.tree",
       fmt::format("no tree beside logits other than q.k times a scale, or beside a window with {} dims or fewer", kSm90ChunkDims),
       "a tree");
  need(spec.score.relative_buckets == 0, "spec.score.relative_buckets", "0", fmt::format("{}", spec.score.relative_buckets));
  need(!spec.score.alibi_sqrt, "spec.score.alibi_sqrt", "false", "true");  // distances are added to a tile at a time, by their sum
  return reasons;
}

KernelKey sm90_prefill_key(const char* path, std::string_view arch, const AttentionSpec& spec, DType out, const Sm90Tiles& tiles,
                           bool from_bytes) {
  return {path, std::string(arch),
          attention_constants(spec, out,
                              {{"kTileRows", tiles.rows},
                               {"kItemRows", tiles.item_rows()},
                               {"kTileKeys", tiles.keys},
                               {"kKeyWarps", 1},
                               {"kFromBytes", from_bytes},
                               {"kStages", tiles.stages}},
                              tiles.cluster),
          expression_functions(spec)};
}

KernelKey attention_sm90_key(std::string_view arch, const AttentionSpec& given, DType out) {
  const AttentionSpec spec = with_mask_bits(given);
  KernelKey key = sm90_prefill_key("attention_sm90.cu", arch, spec, out, attention_sm90_tiles(spec), widens(spec));
  add_score_parts(spec, key);
  return key;
}

KernelKey attention_sm90_flat_key(std::string_view arch, const AttentionSpec& given, DType out) {
  const AttentionSpec spec = with_mask_bits(given);
  KernelKey key = sm90_prefill_key("attention_sm90.cu", arch, flat_spec(spec), out, attention_sm90_tiles(spec).over_flat(), widens(spec));
  add_score_parts(spec, key);
  return key;
}

KernelKey pack_mask_key(std::string_view arch, const AttentionSpec& given) {
  AttentionSpec spec = given;
  spec.mask.custom = true, spec.score_mod = {};
  return sm90_prefill_key("pack_mask.cu", arch, spec, spec.q_dtype, attention_sm90_tiles(given), widens(spec));
}

bool encode_query_map(CUtensorMap& map, const AttentionSpec& spec, const TensorView& q, int rows, int width) {
  if (q.stride(2) != 1) return false;
  const uint64_t size = uint64_t(size_of(q.dtype));
  const uint64_t sizes[3] = {uint64_t(q.size(2)), uint64_t(q.size(1)), uint64_t(q.size(0))};
  const uint64_t strides[2] = {uint64_t(q.stride(1)) * size, uint64_t(q.stride(0)) * size};
  const uint32_t heads = uint32_t(std::min(spec.group_size(), rows)),
                 box[3] = {uint32_t(uint64_t(width) / size), heads, uint32_t(rows) / heads};
  return encode_tensor_map(map, q.dtype, q.data, 3, sizes, strides, box);
}

bool attention_sm90_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  if (!encode_query_map(maps.q, spec, q, kTeamRows)) return false;
  if (has_small_pages(spec)) return has_aligned_rows(kv.k) && has_aligned_rows(kv.v);
  const Sm90Tiles tiles = attention_sm90_tiles(spec);
  const auto encode = [&](CUtensorMap& map, const TensorView& side, int dim) {
    const int width = widens(spec) && dim <= kTensorMapLine / 2 ? kTensorMapLine / 2 : kTensorMapLine;
    return encode_kv_map(map, side, tiles.keys, width, widens(spec) ? kWidenedParts : tiles.cluster);
  };
  return encode(maps.k, kv.k, spec.head_dim_qk) && encode(maps.v, kv.v, spec.head_dim_v);
}

bool attention_sm90_flat_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& flat, AttentionMaps& maps) {
  const Sm90Tiles tiles = attention_sm90_tiles(spec).over_flat();
  const auto encode = [&](CUtensorMap& map, const TensorView& side) {
    return encode_kv_map(map, side, tiles.keys, kTensorMapLine, tiles.cluster);
  };
  return encode_query_map(maps.q, spec, q, kTeamRows) && encode(maps.k, flat.k) && encode(maps.v, flat.v);
}

}  // namespace imbrex::cuda

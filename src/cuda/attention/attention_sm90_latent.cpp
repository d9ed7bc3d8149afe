// See attention_sm90_latent.h.
#include "cuda/attention/attention_sm90_latent.h"

#include <algorithm>

#include "cuda/attention/attention_constants.h"
#include "cuda/attention/attention_sm90_latent_spread.h"
#include "cuda/attention/expressions.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

constexpr int kLatentTileKeys = 32;

bool runs_latent(std::string_view arch, const AttentionSpec& spec) {
  return arch == "sm_90a" && spec.kv_format == KvFormat::latent && spec.kv_dtype == spec.q_dtype && has_latent_dims(spec) &&
         !has_expressions(spec) && !spec.mask.custom && !spec.mask.positions && spec.score.relative_buckets == 0 &&
         !(spec.score.alibi && (spec.score.alibi_sqrt || spec.mask.tree));
}

// Tiles of keys that shared memory holds beside queries that registers do not, weights with what belongs to them, barriers and items.
int num_stages(const AttentionSpec& spec) {
  constexpr int kMostStages = 8, kRowState = 12, kWeights = kLatentWeightSlots * kTeamRows * (kLatentTileKeys * 2 + kRowState);
  const int chunks = sm90_chunks(spec.head_dim_qk), left = chunks - latent_kept_chunks(chunks);
  const int room = kSm90SharedMemory - left * kTeamRows * kTensorMapLine - kWeights - kSm90SharedUnit;
  return std::min(room / latent_stage_bytes(chunks * kLatentTileKeys * kTensorMapLine, spec.head_dim_v), kMostStages);
}

}  // namespace

bool has_latent_dims(const AttentionSpec& spec) {
  constexpr int kDepth = 16;        // dims of a product
  constexpr int kOthersDims = 256;  // up to which other kernels take keys with values in them
  const int qk = spec.head_dim_qk, v = spec.head_dim_v;
  return (spec.q_dtype == DType::bf16 || spec.q_dtype == DType::f16) && (v == 256 || v == 384 || v == 512) && qk % kDepth == 0 &&
         qk > kOthersDims && qk <= v + kSm90ChunkDims;
}

bool has_wide_latent_items(const AttentionSpec& spec, Regime regime) { return regime == kPrefill && spec.group_size() <= kTeamRows; }

std::optional<Sm90LatentTiles> attention_sm90_latent_tiles(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  if (!runs_latent(arch, spec)) return std::nullopt;
  // At the end of each piece of a run the sums of all its rows are written, or read and folded, while no product is computed. The more rows
  // there are, the longer that takes, and the less of it is hidden behind the loads of keys: so pieces are longer.
  constexpr int kSplitCost = 10;  // fitted to an H100: 16, 64 and 128 q heads, a request of 1k to 128k keys
  const int group = spec.group_size(), rows = has_wide_latent_items(spec, regime) ? 2 * (kTeamRows / group * group) : kTeamRows,
            piece = std::max(group, rows) > kTeamRows ? 1024
                    : group > kTeamRows / 4           ? 512
                                                      : 256;
  return Sm90LatentTiles{.rows = rows, .keys = kLatentTileKeys, .stages = num_stages(spec), .least_piece = piece, .split_cost = kSplitCost};
}

unsigned attention_sm90_latent_cluster(const AttentionSpec& spec, Regime regime) {
  const int tasks = has_wide_latent_items(spec, regime) ? 2 : (spec.group_size() + kTeamRows - 1) / kTeamRows;
  return tasks == 2 ? 2 : 1;
}

int64_t attention_sm90_latent_run_sums(const AttentionSpec& spec, Regime regime) {
  constexpr int kTeams = 2;  // warpgroups that share out the output's dims
  const int64_t each = kLatentLevels * (kTeamRows / 16) * short_node_words(spec.head_dim_v / kTeams);
  // attention_sm90_latent_spread.cu has its nodes in the same memory: with more dims than registers hold twice, those of all levels.
  const auto spread = attention_sm90_latent_spread("sm_90a", spec, regime, false);
  const int levels = spread && spread->own_dims > kLatentSpreadDims ? kLatentPairLevels + 1 : kLatentPairLevels;
  const int64_t of_spread = spread ? levels * run_node_floats(spread->own_dims) : 0;
  return kTeams * std::max(each, of_spread);
}

KernelKey latent_kernel_key(const char* path, std::string_view arch, const AttentionSpec& spec, DType out, int rows, int keys, int stages,
                            bool maps, int width) {
  return {path, std::string(arch),
          attention_constants(spec, out,
                              {{"kTileRows", std::min(rows, kTeamRows)},
                               {"kItemRows", rows},
                               {"kTileKeys", keys},
                               {"kKeyWarps", 0},
                               {"kStages", stages},
                               {"kBlocks", 1},
                               {"kKWidth", width},
                               {"kVWidth", kTensorMapLine},
                               {"kMaps", maps}})};
}

KernelKey attention_sm90_latent_key(std::string_view arch, const AttentionSpec& spec, DType out, const Sm90LatentTiles& tiles, bool maps) {
  return latent_kernel_key("attention_sm90_latent.cu", arch, spec, out, tiles.rows, tiles.keys, tiles.stages, maps);
}

bool attention_sm90_latent_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  if (!encode_query_map(maps.q, spec, q, kTeamRows)) return false;
  return has_small_pages(spec) ? has_aligned_rows(kv.k) : encode_kv_map(maps.k, kv.k, kLatentTileKeys);
}

}  // namespace imbrex::cuda

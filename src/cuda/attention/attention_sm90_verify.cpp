// See attention_sm90_verify.h.
#include "cuda/attention/attention_sm90_verify.h"

#include <algorithm>

#include "attention/kv_codec.h"
#include "cuda/attention/attention_constants.h"
#include "cuda/attention/expressions.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

constexpr int kMostStages = 6, kMostWidenedStages = 4, kBytesStages = 2;
constexpr int kWarpgroup = 128;  // threads

// The keys of a tile: more where products are short, and a turn is mostly waiting.
int tile_keys(const AttentionSpec& spec, int rows) {
  return std::max(spec.head_dim_qk, spec.head_dim_v) <= 64 && rows > kTeamRows ? 128 : 64;
}

bool shares_dims(const AttentionSpec& spec) { return spec.head_dim_v > 2 * kSm90ChunkDims; }

// What hides keys of a tree of drafts, or as a mask_mod says, takes registers, which ptxas finds beside few other things.
bool has_registers_to_hide(const AttentionSpec& spec, int rows) {
  if (!has_plain_logits(spec) || widens(spec)) return false;
  return std::max(spec.head_dim_qk, spec.head_dim_v) <= kSm90ChunkDims || rows == kTeamRows;
}

bool runs(std::string_view arch, const AttentionSpec& spec, int rows) {
  constexpr int kDimUnit = 8, kMostDims = 256;
  const auto takes = [](int dims) { return dims % kDimUnit == 0 && dims <= kMostDims; };
  return arch == "sm_90a" && (spec.q_dtype == DType::bf16 || spec.q_dtype == DType::f16) &&
         (spec.kv_dtype == spec.q_dtype || spec.kv_dtype == DType::fp8_e4m3) && codec_of(spec).strided && spec.score_mod.empty() &&
         takes(spec.head_dim_qk) && takes(spec.head_dim_v) && (spec.head_dim_qk <= 2 * kSm90ChunkDims || shares_dims(spec)) &&
         spec.group_size() <= rows && !spec.mask.custom && !spec.mask.positions && (!spec.mask.tree || has_registers_to_hide(spec, rows)) &&
         (spec.mask_mod.empty() || (has_registers_to_hide(spec, rows) && !shares_dims(spec))) && spec.score.relative_buckets == 0 &&
         !spec.score.alibi_sqrt;
}

}  // namespace

std::optional<Sm90VerifyTiles> attention_sm90_verify_tiles(std::string_view arch, const AttentionSpec& spec) {
  // Rows for eight tokens: of a larger group two warpgroups have them.
  const bool two = !shares_dims(spec) && spec.group_size() > kTeamRows / 8;
  Sm90VerifyTiles tiles{.rows = two ? 2 * kTeamRows : kTeamRows, .crews = two || shares_dims(spec) ? 1 : 2, .threads = 0};
  if (!runs(arch, spec, tiles.rows)) return std::nullopt;
  // A second tile reads the keys once more. Of groups of 5 to 8, 16 tokens have two, which take less than prefill's one. In smaller groups
  // 18 tokens, in larger ones 9 and 11 took 1.2 times as long, since the second tile has so few rows.
  if (tiles.crews == 2 && spec.group_size() > kTeamRows / 16) tiles.each = 2;
  tiles.keys = tile_keys(spec, tiles.rows);
  // The shared memory of the kernel: queries, bytes that are to be widened, and room for barriers and items.
  const auto lines = [](int dims) { return (dims + kTensorMapLine - 1) / kTensorMapLine; };
  const int q_places = widens(spec) ? 1 : 2;
  const int bytes = widens(spec) ? kBytesStages * tiles.keys * kTensorMapLine * (lines(spec.head_dim_qk) + lines(spec.head_dim_v)) : 0;
  const int line = tiles.keys * kTensorMapLine, k = line * sm90_chunks(spec.head_dim_qk),
            v = line * (shares_dims(spec) ? 4 : sm90_chunks(spec.head_dim_v));
  const int room = kSm90SharedMemory / tiles.crews / kSm90SharedUnit * kSm90SharedUnit -
                   q_places * tiles.rows * kTensorMapLine * sm90_chunks(spec.head_dim_qk) - bytes - kSm90SharedUnit;
  tiles.stages = tiles.value_stages = std::min(room / (k + v), widens(spec) ? kMostWidenedStages : kMostStages);
  // Values stay half a turn longer. Beside what widens bytes, there are no registers for rings of two sizes.
  if (!widens(spec) && tiles.stages < kMostStages && room - tiles.stages * (k + v) >= v) ++tiles.value_stages;
  // With two crews, the warps that load and the warps that widen are a warpgroup each.
  tiles.threads = unsigned(kWarpgroup * (2 + (widens(spec) ? tiles.crews : 1)));
  return tiles;
}

int64_t attention_sm90_verify_run_sums(const AttentionSpec& spec) {
  const int levels = kVerifyLevels + (shares_dims(spec) && spec.score.alibi);
  return 2 * levels * run_node_floats(std::min(spec.head_dim_v, 2 * kSm90ChunkDims));
}

KernelKey attention_sm90_verify_key(std::string_view arch, const AttentionSpec& spec, DType out, const Sm90VerifyTiles& tiles, bool maps) {
  return {"attention_sm90_verify.cu", std::string(arch),
          attention_constants(spec, out,
                              {{"kTileRows", tiles.rows},
                               {"kItemRows", tiles.rows},
                               {"kTileKeys", tiles.keys},
                               {"kKeyWarps", 0},
                               {"kStages", tiles.stages},
                               {"kValueStages", tiles.value_stages},
                               {"kBlocks", tiles.crews},
                               {"kFromBytes", widens(spec)},
                               {"kKWidth", kTensorMapLine},
                               {"kVWidth", kTensorMapLine},
                               {"kMaps", maps}}),
          expression_functions(spec)};
}

bool attention_sm90_verify_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  const Sm90VerifyTiles tiles = *attention_sm90_verify_tiles("sm_90a", spec);
  if (!encode_query_map(maps.q, spec, q, tiles.rows)) return false;
  if (has_small_pages(spec)) return has_aligned_rows(kv.k) && has_aligned_rows(kv.v);
  return encode_kv_map(maps.k, kv.k, tiles.keys) && encode_kv_map(maps.v, kv.v, tiles.keys);
}

}  // namespace imbrex::cuda

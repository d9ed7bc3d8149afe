// See attention_sm90_latent_decode.h.
#include "cuda/attention/attention_sm90_latent_decode.h"

#include <algorithm>

#include "attention/ds_mla.h"
#include "cuda/attention/attention_sm90_latent.h"
#include "cuda/attention/expressions.h"
#include "cuda/attention/kv_side.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

constexpr int kTileKeys = 64, kFewRows = 16, kMoreRows = 32;
constexpr int kSplitCost = 10;   // as that of attention_sm90_latent.cpp
constexpr int kGroupChunks = 3;  // as in attention_sm90_latent_decode_load.cuh

bool runs_few_rows(std::string_view arch, const AttentionSpec& spec) {
  const bool latent = spec.kv_format == KvFormat::latent && (spec.kv_dtype == spec.q_dtype || spec.kv_dtype == DType::fp8_e4m3);
  const bool records = spec.kv_format == KvFormat::fp8_ds_mla && spec.q_dtype == DType::bf16;
  return arch == "sm_90a" && (latent || records) && has_latent_dims(spec) && !has_expressions(spec);
}

// Tiles of bytes, or groups of chunks, that shared memory holds beside queries, weights, scores that teams exchange (of bytes they have
// weights of two tiles instead), and sums.
int num_stages(const AttentionSpec& spec, int rows) {
  constexpr int kMostStages = 8, kScoreBytes = 256, kStateBytes = 68;  // of a row
  const int weights = widens(spec) ? 4 * kTensorMapLine : kTensorMapLine, scores = widens(spec) ? 0 : kScoreBytes;
  const int rest = widens(spec) ? 3584 : 512;
  const int room = kSm90SharedMemory - rows * (sm90_chunks(spec.head_dim_qk) * kTensorMapLine + weights + scores + kStateBytes) - rest;
  const int chunks = widens(spec) ? 1 : kGroupChunks;
  return std::min(room / (kTileKeys * chunks * attention_sm90_latent_decode_width(spec)), kMostStages);
}

// Keys with a dimension of heads, which records do not have.
TensorView with_heads(TensorView keys, const AttentionSpec& spec) {
  if (spec.kv_format != KvFormat::fp8_ds_mla) return keys;
  const int dims = keys.rank++;
  keys.sizes[size_t(dims)] = keys.sizes[size_t(dims - 1)], keys.strides[size_t(dims)] = keys.strides[size_t(dims - 1)];
  keys.sizes[size_t(dims - 1)] = 1, keys.strides[size_t(dims - 1)] = keys.strides[size_t(dims)] * keys.sizes[size_t(dims)];
  return keys;
}

template <int rows>
bool make_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  if (!encode_query_map(maps.q, spec, q, rows)) return false;
  if (has_small_pages(spec)) return has_aligned_rows(kv.k);
  return encode_kv_map(maps.k, with_heads(kv.k, spec), kTileKeys, attention_sm90_latent_decode_width(spec));
}

}  // namespace

int attention_sm90_latent_decode_width(const AttentionSpec& spec) {
  if (!widens(spec)) return kTensorMapLine;
  constexpr int kUnit = 16;
  const int record = spec.kv_format == KvFormat::fp8_ds_mla ? kDsMlaBytes : spec.head_dim_qk;
  return record / kUnit % 2 != 0 ? record : record + kUnit;
}

std::optional<Sm90LatentDecodeTiles> attention_sm90_latent_decode_tiles(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  if (!runs_few_rows(arch, spec)) return std::nullopt;
  const int group = spec.group_size(), rows = regime == kDecode && group <= kFewRows ? kFewRows : kMoreRows;
  // Verify is left to kernels of more rows where decode has as many as here.
  const bool others = regime == kPrefill || regime == kLongVerify || group > rows || (regime == kVerify && group > kFewRows);
  if (others && attention_sm90_latent_tiles(arch, spec, regime)) return std::nullopt;
  const int piece = rows == kFewRows ? 256 : 512;
  return Sm90LatentDecodeTiles{
      .rows = rows, .keys = kTileKeys, .stages = num_stages(spec, rows), .least_piece = piece, .split_cost = kSplitCost, .threads = 384};
}

int64_t attention_sm90_latent_decode_run_sums(const AttentionSpec& spec, const Sm90LatentDecodeTiles& tiles) {
  const int more = spec.kv_format == KvFormat::fp8_ds_mla && tiles.rows > kFewRows ? 1 : 0;  // no level is in registers
  return (kLatentDecodeLevels + more) * latent_decode_node_floats(spec.head_dim_v, tiles.rows);
}

KernelKey attention_sm90_latent_decode_key(std::string_view arch, const AttentionSpec& spec, DType out, const Sm90LatentDecodeTiles& tiles,
                                           bool maps) {
  KernelKey key = latent_kernel_key("attention_sm90_latent_decode.cu", arch, spec, out, tiles.rows, tiles.keys, tiles.stages, maps,
                                    attention_sm90_latent_decode_width(spec));
  key.config.push_back({"kOwnDims", spec.head_dim_v});
  return key;
}

MakeMaps* attention_sm90_latent_decode_maps(const Sm90LatentDecodeTiles& tiles) {
  return tiles.rows == kFewRows ? make_maps<kFewRows> : make_maps<kMoreRows>;
}

}  // namespace imbrex::cuda

// See attention_sm90_latent_pair.h.
#include "cuda/attention/attention_sm90_latent_pair.h"

#include <algorithm>

#include "cuda/attention/attention_constants.h"
#include "cuda/attention/attention_sm90_latent.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

constexpr int kPairTileKeys = 32;                    // of a thread block
constexpr int kPairBlocks = kSm90LatentPairCluster;  // which share out the keys of a step, and the dims of rows

// Stages of keys that shared memory holds, with their weights and what belongs to them, beside chunks of queries, items and barriers.
int num_pair_stages(const AttentionSpec& spec) {
  constexpr int kMostStages = 6, kRowState = 16;  // bytes of what belongs to a row's weights
  constexpr int kChunk = kPairTileKeys * kTensorMapLine, kWeights = kTeamRows * (kPairBlocks * kPairTileKeys * 2 + kRowState);
  const int chunks = sm90_chunks(spec.head_dim_qk), left = chunks - latent_kept_chunks(chunks);
  const int stage = ((1 + kPairBlocks) * sm90_chunks(spec.head_dim_v / kPairBlocks) + 1) * kChunk;
  const int room = kSm90SharedMemory - left * kTeamRows * kTensorMapLine - kSm90SharedUnit;
  return std::min(room / (stage + kWeights), kMostStages);
}

}  // namespace

std::optional<Sm90LatentTiles> attention_sm90_latent_pair_tiles(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  constexpr int kPiece = 512, kSplitCost = 10;  // keys; as that of attention_sm90_latent.cpp
  const bool plain = has_plain_logits(spec) && !has_window(spec.mask) && !has_small_pages(spec);
  const auto tiles = attention_sm90_latent_tiles(arch, spec, regime);
  if (!tiles || std::max(tiles->rows, spec.group_size()) > kTeamRows || !plain) return std::nullopt;
  return Sm90LatentTiles{.rows = kTeamRows,
                         .keys = kPairBlocks * kPairTileKeys,
                         .stages = num_pair_stages(spec),
                         .least_piece = kPiece,
                         .split_cost = kSplitCost};
}

int64_t attention_sm90_latent_pair_run_sums(const AttentionSpec& spec) {
  constexpr int kTeams = 2;  // warpgroups of a thread block that share out the output's dims, in chunks
  const int dims = (sm90_chunks(spec.head_dim_v / kPairBlocks) + kTeams - 1) / kTeams * kSm90ChunkDims;
  return kTeams * kLatentPairLevels * run_node_floats(dims);
}

KernelKey attention_sm90_latent_pair_key(std::string_view arch, const AttentionSpec& spec, DType out, const Sm90LatentTiles& tiles,
                                         bool maps) {
  return latent_kernel_key("attention_sm90_latent_pair.cu", arch, spec, out, tiles.rows, tiles.keys / kPairBlocks, tiles.stages, maps);
}

bool attention_sm90_latent_pair_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  return encode_query_map(maps.q, spec, q, kTeamRows) && encode_kv_map(maps.k, kv.k, kPairTileKeys);
}

}  // namespace imbrex::cuda

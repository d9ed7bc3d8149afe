// See attention_sm90_latent_pair.h.
#include "cuda/attention/attention_sm90_latent_pair.h"

#include <algorithm>

#include "cuda/attention/attention_constants.h"
#include "cuda/attention/attention_sm90_latent.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

constexpr int kPairKeys = 64;
constexpr int kHalves = 2;     // thread blocks that share out the dims of rows
constexpr int kRopeDims = 32;  // of each of them at most; a line of so many is half as wide as others

// Halves of tiles of keys that shared memory holds beside chunks of queries, weights, scores, barriers and items.
int num_half_stages(const AttentionSpec& spec) {
  constexpr int kMostStages = 8, kLine = kTensorMapLine / 2, kRest = 1536;  // a line of queries; bytes of all else
  constexpr int kScores = 3 * kTeamRows * kPairKeys * int(sizeof(float)), kWeights = kLatentPairWeightSlots * kTeamRows * kTensorMapLine;
  const int stage = kPairKeys * (sm90_chunks(spec.head_dim_v / kHalves) * kTensorMapLine + (spec.head_dim_qk > spec.head_dim_v) * kLine);
  const int room = kSm90SharedMemory - kLatentPairLeftChunks * kTeamRows * kLine - kWeights - kScores - kRest;
  return std::min(room / stage, kMostStages);
}

}  // namespace

std::optional<Sm90LatentTiles> attention_sm90_latent_pair_tiles(std::string_view arch, const AttentionSpec& spec) {
  constexpr int kPiece = 512, kSplitCost = 10;  // keys; as that of attention_sm90_latent.cpp
  const int rope = spec.head_dim_qk - spec.head_dim_v;
  const bool plain = has_plain_logits(spec) && !has_window(spec.mask) && !has_small_pages(spec) && (rope == 0 || rope > kRopeDims);
  if (!attention_sm90_latent_tiles(arch, spec) || spec.group_size() > kTeamRows || !plain) return std::nullopt;
  return Sm90LatentTiles{
      .rows = kTeamRows, .keys = kPairKeys, .stages = num_half_stages(spec), .least_piece = kPiece, .split_cost = kSplitCost};
}

int64_t attention_sm90_latent_pair_run_sums(const AttentionSpec& spec) {
  constexpr int kTeams = 2;  // warpgroups of a thread block that share out the output's dims, in chunks
  const int dims = (sm90_chunks(spec.head_dim_v / kHalves) + kTeams - 1) / kTeams * kSm90ChunkDims;
  return kTeams * kLatentPairLevels * run_node_floats(dims);
}

KernelKey attention_sm90_latent_pair_key(std::string_view arch, const AttentionSpec& spec, DType out, const Sm90LatentTiles& tiles,
                                         bool maps) {
  return latent_kernel_key("attention_sm90_latent_pair.cu", arch, spec, out, tiles.rows, tiles.keys, tiles.stages, maps);
}

bool attention_sm90_latent_pair_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  constexpr int kNarrow = kTensorMapLine / 2;
  if (!encode_query_map(maps.q, spec, q, kTeamRows, kNarrow)) return false;
  return encode_kv_map(maps.k, kv.k, kPairKeys) && encode_kv_map(maps.v, kv.k, kPairKeys, kNarrow);
}

}  // namespace imbrex::cuda

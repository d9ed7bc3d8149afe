// See attention_sm90_latent_decode_spread.h.
#include "cuda/attention/attention_sm90_latent_decode_spread.h"

#include <algorithm>

#include "cuda/attention/attention_constants.h"
#include "cuda/attention/attention_sm90_latent.h"

namespace imbrex::cuda {

std::optional<Sm90LatentSpread> attention_sm90_latent_decode_spread(std::string_view arch, const AttentionSpec& spec, Regime regime,
                                                                    bool fewest) {
  const bool plain = has_plain_logits(spec) && !has_window(spec.mask) && !spec.mask.custom && !spec.mask.positions;
  const bool same = spec.kv_format == KvFormat::latent && spec.kv_dtype == spec.q_dtype;
  if (!plain || !same || !attention_sm90_latent_decode_tiles(arch, spec, regime)) return std::nullopt;
  // An H200 holds 66 clusters of two thread blocks, and not 32 of four. With more than 48 tasks a thread block alone for each is as fast as
  // two that read the values of all keys.
  constexpr int kOneRound = 30, kFewOfTwo = 48;
  const unsigned cluster = unsigned(spec.head_dim_v / kLatentSpreadDims);
  if (fewest) return Sm90LatentSpread{kLatentSpreadDims, cluster, cluster > 2 ? kOneRound : kFewOfTwo};
  if (cluster != 4) return std::nullopt;
  return Sm90LatentSpread{2 * kLatentSpreadDims, cluster / 2, kFewOfTwo};
}

KernelKey attention_sm90_latent_decode_spread_key(std::string_view arch, const AttentionSpec& spec, DType out,
                                                  const Sm90LatentDecodeTiles& tiles, const Sm90LatentSpread& spread) {
  // Beside queries and the weights of two steps: values of so many tiles, then as many stages of 192 dims of keys as there is room for.
  constexpr int kSteps = 2, kStageChunks = 3, kMostStages = 6, kNotes = 20, kUnit = kSm90SharedUnit, kRest = 2 * kUnit;
  const int cluster = int(spread.cluster), value_stages = spread.own_dims > kLatentSpreadDims ? 2 : 4;
  const int chunk = tiles.keys * kTensorMapLine, of_queries = tiles.rows * sm90_chunks(spec.head_dim_qk) * kTensorMapLine;
  const int of_tile = tiles.rows * (kTensorMapLine + kNotes) + kUnit;
  const int room =
      kSm90SharedMemory - of_queries - kSteps * cluster * of_tile - kRest - value_stages * (spread.own_dims / kSm90ChunkDims) * chunk;
  const int stages = std::min(room / (kStageChunks * chunk), kMostStages);
  KernelKey key = latent_kernel_key("attention_sm90_latent_decode_spread.cu", arch, spec, out, tiles.rows, tiles.keys, stages, true);
  key.config.push_back({"kValueStages", value_stages});
  key.config.push_back({"kOwnDims", spread.own_dims});
  return key;
}

}  // namespace imbrex::cuda

// See attention_sm90_latent_spread.h.
#include "cuda/attention/attention_sm90_latent_spread.h"

#include "cuda/attention/attention_constants.h"
#include "cuda/attention/attention_sm90_latent_pair.h"

namespace imbrex::cuda {

std::optional<Sm90LatentSpread> attention_sm90_latent_spread(std::string_view arch, const AttentionSpec& spec, Regime regime, bool fewest) {
  const bool plain = has_plain_logits(spec) && !has_window(spec.mask),
             few_rows = spec.group_size() <= kTeamRows / 2 && !has_wide_latent_items(spec, regime);
  if (!attention_sm90_latent_tiles(arch, spec, regime) || few_rows || !plain) return std::nullopt;
  // An H200 holds 66 clusters of two thread blocks, and not 32 of four. Without the form of two, that of four is the faster one for two
  // rounds of clusters.
  constexpr int kOwnDims = kLatentSpreadDims, kOneRound = 30, kTwoRounds = 62, kRoundOfTwo = 66;
  const unsigned cluster = unsigned(spec.head_dim_v / kOwnDims);
  const bool two_forms = cluster == 4;
  if (attention_sm90_latent_pair_tiles(arch, spec, regime)) {  // whose thread blocks are two
    if (!two_forms || !fewest) return std::nullopt;
    return Sm90LatentSpread{kOwnDims, cluster, kOneRound};
  }
  if (two_forms && !fewest) return Sm90LatentSpread{2 * kOwnDims, cluster / 2, kRoundOfTwo};
  if (two_forms != fewest) return std::nullopt;
  return Sm90LatentSpread{kOwnDims, cluster, fewest ? kOneRound : kTwoRounds};
}

KernelKey attention_sm90_latent_spread_key(std::string_view arch, const AttentionSpec& spec, Regime regime, DType out,
                                           const Sm90LatentSpread& spread) {
  // Of two tiles, 192 dims and the block's own: what fits beside the weights of two steps.
  constexpr int kStages = 3;
  const int value_stages = spread.own_dims > kLatentSpreadDims ? 3 : 4;
  const Sm90LatentTiles tiles = *attention_sm90_latent_tiles(arch, spec, regime);
  KernelKey key = latent_kernel_key("attention_sm90_latent_spread.cu", arch, spec, out, tiles.rows, tiles.keys, kStages, true);
  key.config.push_back({"kValueStages", value_stages});
  key.config.push_back({"kOwnDims", spread.own_dims});
  key.config.push_back({"kPaired", attention_sm90_latent_pair_tiles(arch, spec, regime).has_value()});
  return key;
}

}  // namespace imbrex::cuda

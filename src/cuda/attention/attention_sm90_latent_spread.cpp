// See attention_sm90_latent_spread.h.
#include "cuda/attention/attention_sm90_latent_spread.h"

#include "cuda/attention/attention_constants.h"

namespace imbrex::cuda {

unsigned attention_sm90_latent_spread_cluster(std::string_view arch, const AttentionSpec& spec) {
  const bool plain = has_plain_logits(spec) && !has_window(spec.mask);
  if (!attention_sm90_latent_tiles(arch, spec) || spec.group_size() <= kTeamRows || !plain) return 0;
  return unsigned(spec.head_dim_v / kLatentSpreadDims);
}

KernelKey attention_sm90_latent_spread_key(std::string_view arch, const AttentionSpec& spec, DType out) {
  constexpr int kStages = 3, kValueStages = 4;  // of two tiles, 192 dims and 128: what fits beside the weights of two steps of 512 dims
  const Sm90LatentTiles tiles = *attention_sm90_latent_tiles(arch, spec);
  KernelKey key = latent_kernel_key("attention_sm90_latent_spread.cu", arch, spec, out, tiles.rows, tiles.keys, kStages, true);
  key.config.push_back({"kValueStages", kValueStages});
  return key;
}

}  // namespace imbrex::cuda

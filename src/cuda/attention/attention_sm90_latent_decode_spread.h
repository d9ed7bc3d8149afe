#pragma once
// The host side of attention_sm90_latent_decode_spread.cu: which layers it can run, when it is the faster one, and the constants it is
// compiled with.
#include <optional>
#include <string_view>

#include "cuda/attention/attention_sm90_latent_decode.h"
#include "cuda/attention/attention_sm90_latent_spread.h"

namespace imbrex::cuda {

// The form for few tasks, or that for the fewest. It takes requests of attention_sm90_latent_decode.cu with caches of the queries' type
// whose layers have plain logits and no window.
std::optional<Sm90LatentSpread> attention_sm90_latent_decode_spread(std::string_view arch, const AttentionSpec&, Regime, bool fewest);
// Entry `attention_sm90_latent_decode_spread`. Parameters and maps: those of attention_sm90_latent_decode.cu, whose items it takes, and
// whose bits it computes.
KernelKey attention_sm90_latent_decode_spread_key(std::string_view arch, const AttentionSpec&, DType out, const Sm90LatentDecodeTiles&,
                                                  const Sm90LatentSpread&);

}  // namespace imbrex::cuda

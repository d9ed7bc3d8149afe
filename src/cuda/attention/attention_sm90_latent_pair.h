#pragma once
// The host side of attention_sm90_latent_pair.cu: which layers it can run, its tiles, the constants it is compiled with, and its maps.
#include <optional>
#include <string_view>

#include "cuda/attention/attention_sm90_latent.h"

namespace imbrex::cuda {

constexpr unsigned kSm90LatentPairCluster = 2;  // thread blocks that take every item together, of kSm90LatentThreads each

// nullopt: the kernel does not run such layers. It takes those of attention_sm90_latent.cu with up to 64 q heads that have
// plain logits, no window, pages of 8 keys or a multiple, and items of 64 rows at most. `keys`: of a step, which has a tile for each thread
// block.
std::optional<Sm90LatentTiles> attention_sm90_latent_pair_tiles(std::string_view arch, const AttentionSpec&, Regime);
int64_t attention_sm90_latent_pair_run_sums(const AttentionSpec&);  // floats of a thread block: AttentionParams::run_sums
// Entry `attention_sm90_latent_pair`. Parameters: AttentionParams, then the maps of q, k and v (not used). `maps`: whether it reads through
// them; otherwise it reads tensors of any strides, slower, and computes the same bits.
KernelKey attention_sm90_latent_pair_key(std::string_view arch, const AttentionSpec&, DType out, const Sm90LatentTiles&, bool maps);
// Makes the tensor maps, as attention_sm90_maps() does.
bool attention_sm90_latent_pair_maps(const AttentionSpec&, const TensorView& q, const KvCache&, AttentionMaps&);

}  // namespace imbrex::cuda

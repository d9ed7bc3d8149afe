#pragma once
// The host side of attention_sm90_latent.cu: which layers it can run, its tiles, the constants it is compiled with, and its tensor maps.
#include <optional>
#include <string_view>

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_sm90.h"

namespace imbrex::cuda {

struct Sm90LatentTiles {
  int rows, keys;   // (query token, q head) of an item at most, but for those of one token; of a tile
  int stages;       // tiles of keys in shared memory
  int least_piece;  // keys of a piece of a run at least
  int split_cost;   // as in SchedulePolicy
};

constexpr unsigned kSm90LatentThreads = 512;

// Whether kernels for latents take a layer's dims and queries: values that are the first 256, 384 or 512 dims of the keys, keys of more
// than 256 dims, at most 64 more than values, and bf16 or f16 queries.
bool has_latent_dims(const AttentionSpec&);

// nullopt: the kernel does not run such layers. It takes caches whose values are the first 256, 384 or 512 dims of the keys
// (KvFormat::latent), of the queries' type, bf16 or f16, with keys of more than 256 dims, at most 64 more than values; any number of q
// heads, and all masks and modifications of logits but custom masks, given positions, relative bias, ALiBi's square root, and trees of
// drafts beside ALiBi, whose distances go by depth.
std::optional<Sm90LatentTiles> attention_sm90_latent_tiles(std::string_view arch, const AttentionSpec&, Regime);
// Whether items have rows for two tasks, each of as many whole tokens as 64 rows hold: those of prefill, in layers of up to 64 q heads.
bool has_wide_latent_items(const AttentionSpec&, Regime);
// Thread blocks of a cluster: those that take the rows of an item, where these are two tasks whose keys TMA brings to both.
unsigned attention_sm90_latent_cluster(const AttentionSpec&, Regime);
int64_t attention_sm90_latent_run_sums(const AttentionSpec&, Regime);  // floats of a thread block: AttentionParams::run_sums
// Entry `attention_sm90_latent`. Parameters: AttentionParams, then the maps of q, k and v (not used). `maps`: whether it reads through
// them; otherwise it reads tensors of any strides, slower, and computes the same bits.
KernelKey attention_sm90_latent_key(std::string_view arch, const AttentionSpec&, DType out, const Sm90LatentTiles&, bool maps);
// The key of a kernel for latents: text `path`, of a layer, for tiles of so many rows and keys, and so many stages in shared memory, of
// keys in boxes of `width` bytes each. A thread block has 64 of the rows at most.
KernelKey latent_kernel_key(const char* path, std::string_view arch, const AttentionSpec&, DType out, int rows, int keys, int stages,
                            bool maps, int width = kTensorMapLine);
// Makes the tensor maps, as attention_sm90_maps() does.
bool attention_sm90_latent_maps(const AttentionSpec&, const TensorView& q, const KvCache&, AttentionMaps&);

}  // namespace imbrex::cuda

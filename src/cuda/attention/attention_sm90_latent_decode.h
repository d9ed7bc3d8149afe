#pragma once
// The host side of attention_sm90_latent_decode.cu: which layers it can run, its tiles, the constants it is compiled with, and its maps.
#include <optional>
#include <string_view>

#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_sm90.h"

namespace imbrex::cuda {

struct Sm90LatentDecodeTiles {
  int rows, keys;   // (query token, q head) of an item at most, 16 or 32; of a tile
  int stages;       // tiles of keys in shared memory, or of 16 bits groups of their chunks
  int least_piece;  // keys of a piece of a run at least
  int split_cost;   // as in SchedulePolicy
  unsigned threads;
};

// nullopt: another kernel runs requests of this regime. It takes caches whose values are the first 256, 384 or 512 dims of the keys, with
// keys of more than 256 dims, at most 64 more than values, and bf16 or f16 queries: caches of the queries' type, of e4m3, and fp8_ds_mla
// for bf16 queries; any number of q heads, and all masks and modifications of logits. Of what attention_sm90_latent.cu takes too, it takes
// requests of up to 32 rows.
std::optional<Sm90LatentDecodeTiles> attention_sm90_latent_decode_tiles(std::string_view arch, const AttentionSpec&, Regime);
// Bytes of a key in a box, or of a chunk of its dims: a cache of bytes is loaded key by key, with an odd number of units of 16 bytes each.
int attention_sm90_latent_decode_width(const AttentionSpec&);
int64_t attention_sm90_latent_decode_run_sums(const AttentionSpec&, const Sm90LatentDecodeTiles&);  // floats of a thread block
// Entry `attention_sm90_latent_decode`. Parameters: AttentionParams, then the maps of q, k and v (not used). `maps`:
// whether TMA can read queries and keys; otherwise it reads tensors of any strides, slower, and computes the same bits.
KernelKey attention_sm90_latent_decode_key(std::string_view arch, const AttentionSpec&, DType out, const Sm90LatentDecodeTiles&, bool maps);
// Makes the tensor maps, as attention_sm90_maps() does.
MakeMaps* attention_sm90_latent_decode_maps(const Sm90LatentDecodeTiles&);

}  // namespace imbrex::cuda

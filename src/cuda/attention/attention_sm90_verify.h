#pragma once
// The host side of attention_sm90_verify.cu: which layers it can run, its tiles, the constants it is compiled with, and its tensor
// maps.
#include <optional>
#include <string_view>

#include "cuda/attention/attention_sm90.h"

namespace imbrex::cuda {

struct Sm90VerifyTiles {
  int rows, keys;            // (query token, q head) of an item at most; of a tile
  int stages, value_stages;  // tiles of keys and of values in shared memory, of a crew
  int crews;                 // of a thread block, each with items of its own
  unsigned threads;          // of one
  int each = 1;              // of a request at most
};

// nullopt: the kernel does not run such layers. It takes queries of 16 bits, keys of their type or e4m3, dims that are multiples of 8 up to
// 256 (where keys have more than 128, values do too), groups of up to 128 q heads (64 where values have more than 128 dims), and all masks
// and modifications of logits but custom masks and relative bias.
std::optional<Sm90VerifyTiles> attention_sm90_verify_tiles(std::string_view arch, const AttentionSpec&);
int64_t attention_sm90_verify_run_sums(const AttentionSpec&);  // floats of a thread block: AttentionParams::run_sums
// Entry `attention_sm90_verify`. Parameters: AttentionParams, then the maps of q, k and v. `maps`: whether it reads through
// them; otherwise it reads tensors of any strides, slower, and computes the same bits.
KernelKey attention_sm90_verify_key(std::string_view arch, const AttentionSpec&, DType out, const Sm90VerifyTiles&, bool maps);
// Makes the tensor maps, as attention_sm90_maps() does.
bool attention_sm90_verify_maps(const AttentionSpec&, const TensorView& q, const KvCache&, AttentionMaps&);

}  // namespace imbrex::cuda

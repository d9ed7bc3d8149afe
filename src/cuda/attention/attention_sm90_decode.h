#pragma once
// The host side of attention_sm90_decode.cu: which layers it can run, its tiles, the constants it is compiled with, and its tensor
// maps.
#include <optional>
#include <string_view>

#include "cuda/attention/attention_sm80.h"
#include "cuda/attention/attention_sm90.h"

namespace imbrex::cuda {

// Tiles of 16 or 32 rows. nullopt: the kernel does not run such layers. It takes keys that lie in shared memory as they are (16-bit ones of
// the queries' type, f16, fp8), dims to 256, groups of no more q heads than rows, and pages whose greatest common divisor with a tile's
// keys is 8 or more.
std::optional<AttentionTiles> attention_sm90_decode_tiles(std::string_view arch, const AttentionSpec&, int rows);
// As attention_sm80_sharing_tiles(): of 16 rows, or of 32 for tokens of more than 8 q heads.
std::optional<AttentionTiles> attention_sm90_decode_sharing_tiles(std::string_view arch, const AttentionSpec&);
// Bytes that a row of keys or values of so many dims has in a box, and from one to the next in shared memory: a line (kTensorMapLine), and
// as many lines as it needs; or all that it has, where the last line would not be full.
int attention_sm90_decode_width(const AttentionSpec&, int dims);
// Pieces of a run: the sums of a node of each level need registers.
int attention_sm90_decode_most_in_run(const AttentionSpec&, const AttentionTiles&);
unsigned attention_sm90_decode_threads(const AttentionTiles&);
// Entry `attention_sm90_decode`. Parameters: AttentionParams, then the maps of q (not used), k and v. `maps`: whether it reads through
// them; otherwise it reads tensors of any strides, slower, and computes the same bits.
KernelKey attention_sm90_decode_key(std::string_view arch, const AttentionSpec&, DType out, const AttentionTiles&, bool maps);
// Makes the tensor maps, as attention_sm90_maps() does.
bool attention_sm90_decode_maps(const AttentionSpec&, const TensorView& q, const KvCache&, AttentionMaps&);

}  // namespace imbrex::cuda

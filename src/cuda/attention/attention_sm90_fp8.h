#pragma once
// The host side of attention_sm90_fp8.cu: which layers it can run, the constants it is compiled with, and its tensor maps.
#include <string_view>
#include <vector>

#include "cuda/attention/attention_sm90.h"

namespace imbrex::cuda {

Sm90Tiles attention_sm90_fp8_tiles(const AttentionSpec&);
// Why the kernel cannot run a spec whose cache is strided; empty: it can.
std::vector<Reason> attention_sm90_fp8_refusals(const AttentionSpec&);
// Entry `attention_sm90_fp8`; a block of threads() on every multiprocessor. Parameters: AttentionParams, then the maps of q, k and v.
KernelKey attention_sm90_fp8_key(std::string_view arch, const AttentionSpec&, DType out);
KernelKey attention_sm90_fp8_flat_key(std::string_view arch, const AttentionSpec&, DType out);  // as attention_sm90_flat_key
// Makes the tensor maps, as attention_sm90_maps() does, also for flat keys.
bool attention_sm90_fp8_maps(const AttentionSpec&, const TensorView& q, const KvCache&, AttentionMaps&);
bool attention_sm90_fp8_flat_maps(const AttentionSpec&, const TensorView& q, const KvCache& flat, AttentionMaps&);

}  // namespace imbrex::cuda

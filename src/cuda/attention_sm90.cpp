// See attention_sm90.h.
#include "cuda/attention_sm90.h"

#include <algorithm>
#include <bit>

#include "cuda/attention_constants.h"
#include "cuda/params.h"
#include "cuda/tensor_map.h"

namespace imbrex::cuda {
int attention_sm90_tile_keys(const AttentionSpec& spec) { return spec.head_dim_v > 128 ? 64 : 128; }

bool attention_sm90_runs(const AttentionSpec& spec) {
  const int dim = spec.head_dim_v, tile = attention_sm90_tile_keys(spec), page = spec.block_size, group = spec.group_size();
  return (spec.q_dtype == DType::bf16 || spec.q_dtype == DType::f16) && spec.kv_dtype == spec.q_dtype &&
         spec.kv_format == KvFormat::strided && (dim == 64 || dim == 128 || dim == 256) && spec.head_dim_qk == dim &&
         std::has_single_bit(unsigned(group)) && group <= 64 && (page == 0 || page % tile == 0 || (page >= 8 && tile % page == 0)) &&
         !spec.mask.custom && spec.score.relative_buckets == 0;
}

KernelKey attention_sm90_key(std::string_view arch, const AttentionSpec& spec, DType out) {
  return {"attention_sm90.cu", std::string(arch),
          attention_constants(
              spec, out, {{"kTileRows", kSm90TileRows}, {"kTileKeys", attention_sm90_tile_keys(spec)}, {"kKeyWarps", 1}, {"kStages", 2}})};
}

bool attention_sm90_maps(const AttentionSpec& spec, const TensorView& q, const KvCache& kv, AttentionMaps& maps) {
  if (q.stride(2) != 1) return false;
  const uint64_t size = uint64_t(size_of(q.dtype));
  const uint64_t sizes[3] = {uint64_t(q.size(2)), uint64_t(q.size(1)), uint64_t(q.size(0))};
  const uint64_t strides[2] = {uint64_t(q.stride(1)) * size, uint64_t(q.stride(0)) * size};
  const uint32_t group = uint32_t(spec.group_size()), box[3] = {uint32_t(kTensorMapLine / size), group, 64 / group};
  const int tile = attention_sm90_tile_keys(spec);
  return encode_tensor_map(maps.q, q.dtype, q.data, 3, sizes, strides, box) && encode_kv_map(maps.k, kv.k, tile) &&
         encode_kv_map(maps.v, kv.v, tile);
}

}  // namespace imbrex::cuda

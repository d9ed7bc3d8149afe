// See tensor_map.h.
#include "cuda/driver/tensor_map.h"

#include <algorithm>
#include <numeric>

namespace imbrex::cuda {

bool encode_tensor_map(CUtensorMap& map, DType type, const void* data, uint32_t rank, const uint64_t* sizes, const uint64_t* strides,
                       const uint32_t* box) {
  constexpr uint32_t kOnes[5] = {1, 1, 1, 1, 1};
  const auto element = size_of(type) == 1    ? kTensorMapU8
                       : size_of(type) == 4  ? kTensorMapU32
                       : type == DType::bf16 ? kTensorMapBf16
                                             : kTensorMapF16;
  const int64_t width = int64_t(box[0]) * size_of(type);
  const auto swizzle = width == kTensorMapLine       ? kTensorMapSwizzle128
                       : width == kTensorMapLine / 2 ? kTensorMapSwizzle64
                                                     : kTensorMapSwizzleNone;
  // Sectors as they are asked for: wider ones cost a few percent of the bandwidth.
  return need_driver().cuTensorMapEncodeTiled(&map, element, rank, const_cast<void*>(data), sizes, strides, box, kOnes,
                                              kTensorMapInterleaveNone, swizzle, kTensorMapL2None, kTensorMapFillZero) == 0;
}

bool encode_kv_map(CUtensorMap& map, const TensorView& t, int tile, int width, int blocks) {
  const int rank = t.rank;  // 3 without pages
  if (t.stride(rank - 1) != 1) return false;
  const uint64_t size = uint64_t(size_of(t.dtype)), page = uint64_t(t.size(rank - 3)), row = uint64_t(t.size(rank - 1)) * size;
  constexpr int kMostElements = 256;
  const bool words = width / int(size) > kMostElements;
  const DType element = words ? DType::i32 : t.dtype;
  const uint64_t element_size = uint64_t(size_of(element));
  if (row % element_size != 0) return false;
  const uint64_t sizes[4] = {row / element_size, page, uint64_t(t.size(rank - 2)), rank == 4 ? uint64_t(t.size(0)) : 1};
  const uint64_t strides[3] = {uint64_t(t.stride(rank - 3)) * size, uint64_t(t.stride(rank - 2)) * size,
                               rank == 4 ? uint64_t(t.stride(0)) * size : 16};
  const int common = rank == 4 ? int(std::gcd(page, uint64_t(tile))) : tile;
  const uint32_t box[4] = {uint32_t(uint64_t(width) / element_size), uint32_t(std::min(common, tile / blocks)), 1, 1};
  return encode_tensor_map(map, element, t.data, 4, sizes, strides, box);
}

bool has_small_pages(const AttentionSpec& spec) { return spec.block_size % kLeastBoxKeys != 0; }

bool has_aligned_rows(const TensorView& t) {
  constexpr int64_t kUnit = 16;
  bool aligned =
      t.stride(t.rank - 1) == 1 && t.size(t.rank - 1) * size_of(t.dtype) % kUnit == 0 && reinterpret_cast<uintptr_t>(t.data) % kUnit == 0;
  for (int d = 0; d + 1 < t.rank; ++d) aligned = aligned && t.stride(d) * size_of(t.dtype) % kUnit == 0;
  return aligned;
}

}  // namespace imbrex::cuda

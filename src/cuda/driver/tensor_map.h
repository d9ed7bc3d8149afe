#pragma once
// Descriptors of tensors for TMA, of which a kernel loads boxes: the host encodes them, launches pass them by value.
#include <cstdint>

#include "cuda/driver/driver.h"
#include "imbrex/kv_cache.h"
#include "imbrex/spec.h"

namespace imbrex::cuda {

constexpr int kTensorMapLine = 128;  // bytes of the widest swizzle, and of a row of most boxes

// Of a tensor of up to five dimensions, innermost first; sizes and box in elements, strides (of all but the innermost) in bytes. Rows of a
// box that are a line or half a line wide are swizzled; what lies outside of the tensor is loaded as zeros. False where TMA cannot read
// such a tensor: addresses or strides that are not multiples of 16 bytes.
bool encode_tensor_map(CUtensorMap&, DType, const void* data, uint32_t rank, const uint64_t* sizes, const uint64_t* strides,
                       const uint32_t* box);
// Of keys or values: dims, keys of a page, kv heads, pages. A box has keys of a head, as many as divide a page and a tile of `tile` keys,
// in which they follow each other, and `width` bytes of each. No box is more than a tile's share of `blocks`: of the thread
// blocks that load it together, or of the parts in which it comes.
bool encode_kv_map(CUtensorMap&, const TensorView&, int tile, int width = kTensorMapLine, int blocks = 1);

// Whether a box of a page would be less than a swizzle, which repeats after so many keys. Then rows come one by one, without a map.
constexpr int kLeastBoxKeys = 8;
bool has_small_pages(const AttentionSpec&);
// Whether such rows can be copied 16 bytes at a time.
bool has_aligned_rows(const TensorView&);

}  // namespace imbrex::cuda

#pragma once
// Descriptors of tensors for TMA, of which a kernel loads boxes: the host encodes them, launches pass them by value.
#include <cstdint>

#include "cuda/driver/driver.h"
#include "imbrex/kv_cache.h"
#include "imbrex/spec.h"

namespace imbrex::cuda {

constexpr int kTensorMapLine = 128;  // bytes of the widest swizzle, and of a row of most boxes

// Makes the map of a tensor of up to five dimensions, innermost first; sizes and box in elements, strides (of all but the innermost) in
// bytes. Rows of a box that are a line or half a line wide are swizzled; elements outside of the tensor are loaded as zeros. False where
// TMA cannot read such a tensor: addresses or strides that are not multiples of 16 bytes.
bool encode_tensor_map(CUtensorMap&, DType, const void* data, uint32_t rank, const uint64_t* sizes, const uint64_t* strides,
                       const uint32_t* box);
// Makes the map of keys or values, with the dimensions dims, keys of a page, kv heads, pages. A box has consecutive keys of a head, as many
// as divide a page and a tile of `tile` keys, and `width` bytes of each; dims are words of four bytes where these are more elements than a
// box may have. A tile is loaded by `blocks` thread blocks together, or in as many
// parts, and no box is larger than the share of one of them.
bool encode_kv_map(CUtensorMap&, const TensorView&, int tile, int width = kTensorMapLine, int blocks = 1);

// The swizzle repeats after so many keys. Where a box of a page would have fewer, rows are copied one by one, without a map.
constexpr int kLeastBoxKeys = 8;
bool has_small_pages(const AttentionSpec&);
// Whether such rows can be copied 16 bytes at a time.
bool has_aligned_rows(const TensorView&);

}  // namespace imbrex::cuda

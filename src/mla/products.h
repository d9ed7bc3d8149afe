#pragma once
// The products with the weight of kv_b_proj: of queries with W_UK, of outputs in latent space with W_UV, of latents with both. Each kind of
// devices has its implementation of this one interface.
#include <cstdint>

#include "imbrex/device.h"
#include "imbrex/tensor.h"

namespace imbrex {

// What a device's products are computed with: a stream, and memory of workspace_bytes() that nothing else uses meanwhile.
struct ProductPlace {
  Stream stream = nullptr;
  void* workspace = nullptr;
};

class HeadProducts {
 public:
  virtual ~HeadProducts() = default;
  // to[t, h, n] = sum over k of from[t, h, k] * weight[h, k, n], in floats, in an order that depends on k alone. Dimensions k and n are
  // multiples of 8, k at most 576, and have stride 1; `from` may have stride 0 between heads. f32, bf16 and f16.
  virtual void by_columns(const TensorView& from, const TensorView& weight, const TensorView& to, const ProductPlace& = {}) const = 0;
  // to[t, h, n] = sum over k of from[t, h, k] * weight[h, n, k]. `from` is f32, or bf16 where row_type() says so.
  virtual void by_rows(const TensorView& from, const TensorView& weight, const TensorView& to, const ProductPlace& = {}) const = 0;
  // The type of rows of bf16 numbers that by_rows() multiplies fastest by a weight of this type: f32 or bf16.
  virtual DType row_type(DType weight) const = 0;
};

}  // namespace imbrex

#pragma once
// The products of latent attention on NVIDIA GPUs, by cuBLASLt, which is opened at run time.
#include <memory>
#include <optional>

#include "cuda/driver/context.h"
#include "imbrex/mla.h"
#include "mla/products.h"

namespace imbrex::cuda {

// Memory that ProductPlace::workspace has to have for these products.
constexpr int64_t kProductWorkspaceBytes = int64_t{4} << 20;

// Products of a layer with this spec, and outputs in its type or, with `out`, in that one alone; else in its type and in f32. Their
// algorithms are chosen, and their kernels loaded, here: one for each product, whatever the number of rows, that splits no sum, so that a
// row's bits do not depend on other rows. Calls may be for some of the heads. `from` and `to` begin, and have rows and heads, at multiples
// of 16 bytes (are_aligned()). The context must be current where products are computed. Errors cuda.cublaslt_missing, cuda.cublaslt.
std::unique_ptr<HeadProducts> cublaslt_products(const std::shared_ptr<const Context>&, const MlaSpec&, std::optional<DType> out);

// Whether products can read or write such rows.
bool are_aligned(const TensorView&);

}  // namespace imbrex::cuda

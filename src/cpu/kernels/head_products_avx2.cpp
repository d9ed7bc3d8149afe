// Products with a weight of each head compiled for AVX2 and FMA.
#include "cpu/kernels/head_products.inl"

namespace imbrex::cpu {

extern const HeadProductKernels head_products_avx2;
const HeadProductKernels head_products_avx2 = {"avx2", product_by_columns, product_by_rows, nullptr, nullptr, nullptr};

}  // namespace imbrex::cpu

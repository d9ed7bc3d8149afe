// Products with a weight of each head compiled for AVX-512.
#include "cpu/kernels/head_products.inl"

namespace imbrex::cpu {

extern const HeadProductKernels head_products_avx512;
const HeadProductKernels head_products_avx512 = {"avx512", product_by_columns, product_by_rows, nullptr, nullptr, nullptr};

}  // namespace imbrex::cpu

// Products with a weight of each head compiled for any machine of the architecture.
#include "cpu/kernels/head_products.inl"

namespace imbrex::cpu {

extern const HeadProductKernels head_products_generic;
const HeadProductKernels head_products_generic = {"generic", product_by_columns, product_by_rows, nullptr, nullptr, nullptr};

}  // namespace imbrex::cpu

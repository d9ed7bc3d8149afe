// Products with a weight of each head on the AMX unit.
#include "cpu/kernels/head_products_amx.inl"

namespace imbrex::cpu {

extern const HeadProductKernels head_products_amx;
const HeadProductKernels head_products_amx = {
    "amx", product_by_columns, product_by_rows, product_by_columns_bf16, product_by_rows_bf16, tiles_release};

}  // namespace imbrex::cpu

// Products with a weight of each head in tiles in memory, so that those of the AMX unit are tested on machines without it.
#define IMBREX_AMX_EMULATED
#include "cpu/kernels/head_products_amx.inl"

namespace imbrex::cpu {

extern const HeadProductKernels head_products_amx_emulated;
const HeadProductKernels head_products_amx_emulated = {"amx_emulated",          product_by_columns,   product_by_rows,
                                                       product_by_columns_bf16, product_by_rows_bf16, tiles_release};

}  // namespace imbrex::cpu

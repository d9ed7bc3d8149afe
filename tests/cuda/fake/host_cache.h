#pragma once
// The kernels that write a cache as plain host code, for host_kernels.cpp: write_kv.cu, write_ds_mla.cu and copy_blocks.cu.
#include "cuda/params.h"
#include "imbrex/spec.h"

namespace imbrex::cuda::fake {

double scale_of(const KvSide&, int kv_head);
// `from`: the type of the new rows.
void write_kv(const AttentionSpec&, const WriteKvParams&, DType from);
void write_ds_mla(const AttentionSpec&, const WriteKvParams&, DType from);
void copy_blocks(const CopyBlocksParams&, int num_copies);

}  // namespace imbrex::cuda::fake

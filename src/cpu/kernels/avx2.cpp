// Kernel table `avx2`: the portable kernels, compiled for AVX2 and FMA.
#include "cpu/kernels/generic.inl"

namespace imbrex::cpu {

extern const Kernels kernels_avx2;
const Kernels kernels_avx2 = {"avx2", kMaxRows, 1, 0, kF32, usual_split_keys, scratch_bytes, nothing, nothing, attention, merge, write_kv};

}  // namespace imbrex::cpu

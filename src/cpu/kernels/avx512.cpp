// Kernel table `avx512`: the AVX-512 kernels for every processor that has it.
#include "cpu/kernels/avx512.inl"

namespace imbrex::cpu {

extern const Kernels kernels_avx512;
const Kernels kernels_avx512 = {"avx512",      kMaxRows, kMaxHeads, kPassRows, kF32,  usual_split_keys,
                                scratch_bytes, nothing,  nothing,   attention, merge, write_kv};

}  // namespace imbrex::cpu

// Kernel table `avx512_bf16`: the AVX-512 kernels for processors with AVX512_BF16 (and VBMI).
#include "cpu/kernels/avx512.inl"

namespace imbrex::cpu {

extern const Kernels kernels_avx512_bf16;
const Kernels kernels_avx512_bf16 = {"avx512_bf16", kMaxRows, kMaxHeads, kPassRows, kF32,  latent_split_keys,
                                     scratch_bytes, nothing,  nothing,   attention, merge, write_kv};

}  // namespace imbrex::cpu

// The kernel of recurrent layers compiled for AVX-512.
#include "cpu/kernels/recurrent.inl"

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_avx512;
const RecurrentKernels recurrent_avx512 = {"avx512", run_recurrent, run_narrow_recurrent};

}  // namespace imbrex::cpu

// The kernel of recurrent layers compiled for AVX2 and FMA.
#include "cpu/kernels/recurrent.inl"

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_avx2;
const RecurrentKernels recurrent_avx2 = {"avx2", run_recurrent, run_narrow_recurrent};

}  // namespace imbrex::cpu

// The short convolution compiled for AVX-512.
#include "cpu/kernels/short_conv.inl"

namespace imbrex::cpu {

extern const ShortConvKernels short_conv_avx512;
const ShortConvKernels short_conv_avx512 = {"avx512", run_short_conv, short_conv_scratch_bytes};

}  // namespace imbrex::cpu

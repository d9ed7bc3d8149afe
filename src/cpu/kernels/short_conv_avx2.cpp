// The short convolution compiled for AVX2 and FMA.
#include "cpu/kernels/short_conv.inl"

namespace imbrex::cpu {

extern const ShortConvKernels short_conv_avx2;
const ShortConvKernels short_conv_avx2 = {"avx2", run_short_conv, short_conv_scratch_bytes};

}  // namespace imbrex::cpu

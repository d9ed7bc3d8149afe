// The short convolution compiled for any machine of the architecture.
#include "cpu/kernels/short_conv.inl"

namespace imbrex::cpu {

extern const ShortConvKernels short_conv_generic;
const ShortConvKernels short_conv_generic = {"generic", run_short_conv, short_conv_scratch_bytes};

}  // namespace imbrex::cpu

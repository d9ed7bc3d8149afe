// The kernel of recurrent layers compiled for any machine of the architecture.
#include "cpu/kernels/recurrent.inl"

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_generic;
const RecurrentKernels recurrent_generic = {"generic", run_recurrent, run_narrow_recurrent};

}  // namespace imbrex::cpu

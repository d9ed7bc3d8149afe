// Kernel table `generic`: the portable kernels, compiled for any machine of the architecture (SSE2 on x86-64, NEON on aarch64).
#include "cpu/kernels/generic.inl"

namespace imbrex::cpu {

extern const Kernels kernels_generic;
const Kernels kernels_generic = {"generic",     kMaxRows, 1,       0,         kF32,  usual_split_keys,
                                 scratch_bytes, nothing,  nothing, attention, merge, write_kv};

}  // namespace imbrex::cpu

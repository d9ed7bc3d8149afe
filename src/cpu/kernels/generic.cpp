// Kernel table `generic`: the portable kernels, compiled for any x86-64 machine.
#include "cpu/kernels/generic.inl"

namespace imbrex::cpu {

extern const Kernels kernels_generic;
const Kernels kernels_generic = {"generic", kMaxRows, 1, 0, scratch_bytes, nothing, nothing, attention, merge, write_kv};

}  // namespace imbrex::cpu

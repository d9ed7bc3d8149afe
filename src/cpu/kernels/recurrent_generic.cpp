// The kernel of recurrent layers compiled for any machine of the architecture.
// clang-format off
#include "cpu/kernels/recurrent.inl"
#include "cpu/kernels/recurrent_narrow.inl"
#include "cpu/kernels/recurrent_outputs.inl"
#include "cpu/kernels/recurrent_weights.inl"
#include "cpu/kernels/recurrent_chunks.inl"
// clang-format on

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_generic;
constinit const RecurrentKernels recurrent_generic = kernels_with<FloatProducts>("generic", false);

}  // namespace imbrex::cpu

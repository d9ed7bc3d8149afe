// The kernel of recurrent layers compiled for AVX-512.
// clang-format off
#include "cpu/kernels/recurrent.inl"
#include "cpu/kernels/recurrent_narrow.inl"
#include "cpu/kernels/recurrent_outputs.inl"
#include "cpu/kernels/recurrent_weights.inl"
#include "cpu/kernels/recurrent_chunks.inl"
// clang-format on

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_avx512;
constinit const RecurrentKernels recurrent_avx512 = kernels_with<FloatProducts>("avx512", false);

}  // namespace imbrex::cpu

// The kernel of recurrent layers compiled for AVX2 and FMA.
// clang-format off
#include "cpu/kernels/recurrent.inl"
#include "cpu/kernels/recurrent_narrow.inl"
#include "cpu/kernels/recurrent_outputs.inl"
#include "cpu/kernels/recurrent_weights.inl"
#include "cpu/kernels/recurrent_chunks.inl"
// clang-format on

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_avx2;
constinit const RecurrentKernels recurrent_avx2 = kernels_with<FloatProducts>("avx2", false);

}  // namespace imbrex::cpu

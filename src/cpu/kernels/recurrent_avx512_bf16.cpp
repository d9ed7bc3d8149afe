// The kernel of recurrent layers compiled for AVX-512 with products of bf16.
#include <immintrin.h>
// clang-format off
#include "cpu/kernels/recurrent.inl"
#include "cpu/kernels/recurrent_narrow.inl"
#include "cpu/kernels/recurrent_outputs.inl"
#include "cpu/kernels/recurrent_weights.inl"
#include "cpu/kernels/recurrent_chunks.inl"
// clang-format on

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_avx512_bf16;
constinit const RecurrentKernels recurrent_avx512_bf16 = kernels_with<PairProducts>("avx512_bf16", true);

}  // namespace imbrex::cpu

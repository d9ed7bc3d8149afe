// The kernel of recurrent layers compiled for AVX-512 with products of bf16.
#include <immintrin.h>
// clang-format off
#include "cpu/kernels/recurrent.inl"
#include "cpu/kernels/recurrent_outputs.inl"
#include "cpu/kernels/recurrent_weights.inl"
#include "cpu/kernels/recurrent_chunks.inl"
// clang-format on

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_avx512_bf16;
const RecurrentKernels recurrent_avx512_bf16 = {"avx512_bf16",
                                                run_recurrent,
                                                run_narrow_recurrent,
                                                run_recurrent_chunks<ChunkScratch<PairProducts>>,
                                                chunk_scratch_bytes<PairProducts>,
                                                finish_outputs,
                                                true};

}  // namespace imbrex::cpu

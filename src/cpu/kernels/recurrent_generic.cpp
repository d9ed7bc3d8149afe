// The kernel of recurrent layers compiled for any machine of the architecture.
// clang-format off
#include "cpu/kernels/recurrent.inl"
#include "cpu/kernels/recurrent_outputs.inl"
#include "cpu/kernels/recurrent_weights.inl"
#include "cpu/kernels/recurrent_chunks.inl"
// clang-format on

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_generic;
const RecurrentKernels recurrent_generic = {"generic",
                                            run_recurrent,
                                            run_narrow_recurrent,
                                            run_recurrent_chunks<ChunkScratch<FloatProducts>>,
                                            chunk_scratch_bytes<FloatProducts>,
                                            finish_outputs,
                                            false};

}  // namespace imbrex::cpu

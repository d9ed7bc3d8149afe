// The kernel of recurrent layers with products of bf16 on the AMX unit.
#include "cpu/kernels/recurrent_amx.inl"

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_amx;
const RecurrentKernels recurrent_amx = {"amx",          run_recurrent, run_narrow_recurrent, run_tile_chunks, tile_scratch_bytes,
                                        finish_outputs, true};

}  // namespace imbrex::cpu

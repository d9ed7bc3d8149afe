// The kernel of recurrent layers with tiles in memory, so that that of the AMX unit is tested on machines without it.
#define IMBREX_AMX_EMULATED
#include "cpu/kernels/recurrent_amx.inl"

namespace imbrex::cpu {

extern const RecurrentKernels recurrent_amx_emulated;
const RecurrentKernels recurrent_amx_emulated = {"amx_emulated", run_recurrent, run_narrow_recurrent, run_tile_chunks, tile_scratch_bytes,
                                                 finish_outputs, true};

}  // namespace imbrex::cpu

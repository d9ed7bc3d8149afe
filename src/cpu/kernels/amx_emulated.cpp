// Kernel table `amx_emulated`: the AMX kernels with tiles in memory, so that they are tested on machines without AMX.
#define IMBREX_AMX_EMULATED
#include "cpu/kernels/amx.inl"

namespace imbrex::cpu {

extern const Kernels kernels_amx_emulated;
const Kernels kernels_amx_emulated = {"amx_emulated", kMaxRows, kMostHeads, kNarrowRows, kBf16, latent_split_keys,
                                      scratch_bytes,  enter,    leave,      attention,   merge, write_kv};

}  // namespace imbrex::cpu

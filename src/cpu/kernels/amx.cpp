// Kernel table `amx`: bf16 tile products on the AMX unit.
#include "cpu/kernels/amx.inl"

namespace imbrex::cpu {

extern const Kernels kernels_amx;
const Kernels kernels_amx = {"amx",         kMaxRows, kMostHeads, kNarrowRows, kBf16, latent_split_keys,
                             scratch_bytes, enter,    leave,      attention,   merge, write_kv};

}  // namespace imbrex::cpu

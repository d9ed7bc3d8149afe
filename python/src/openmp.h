#pragma once
// The threads with which PyTorch computes in this process, for the CPU plans beside it.
#include <optional>

#include "imbrex/parallel.h"

namespace imbrex::python {

// Those of the OpenMP runtime that PyTorch is linked to, as many as torch.set_num_threads() says in the thread that calls; nothing when
// PyTorch is not there, or computes in another way. In a forked child, where these threads cannot be had again, those of others() do the
// work.
std::optional<ParallelFor> threads_of_pytorch(ParallelFor (*others)());

}  // namespace imbrex::python

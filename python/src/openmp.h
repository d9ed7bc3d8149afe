#pragma once
// The threads with which PyTorch computes in this process, for the CPU plans beside it.
#include <optional>

#include "imbrex/parallel.h"

namespace imbrex::python {

// The threads of the OpenMP runtime that PyTorch is linked to, as many as torch.set_num_threads() says in the calling thread; nullopt when
// PyTorch is not loaded, or computes without OpenMP. In a forked child, where OpenMP cannot start its threads again, those of others() do
// the work.
std::optional<ParallelFor> threads_of_pytorch(ParallelFor (*others)());

}  // namespace imbrex::python

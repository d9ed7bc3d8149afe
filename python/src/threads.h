#pragma once
// The threads of CPU plans and merges in this process.
#include "imbrex/parallel.h"

namespace imbrex::python {

// 0: those of PyTorch where it is loaded and IMBREX_NUM_THREADS asks for no others, else one for each core. 1: the calling thread. More are
// taken from the threads that all plans share. Error python.num_threads.
ParallelFor shared_threads(int num_threads);

}  // namespace imbrex::python

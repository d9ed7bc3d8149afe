#pragma once
// Recurrent layers on NVIDIA GPUs: which kernel runs a spec, with which constants, and how a launch is shared out. Host side of
// recurrent.cu and recurrent_narrow.cu.
#include <string_view>
#include <vector>

#include "cuda/driver/jit.h"
#include "cuda/recurrent_params.h"
#include "imbrex/recurrent.h"

namespace imbrex::cuda {

// The kernel that computes requests of a spec token by token.
struct RecurrentKernel {
  KernelKey key;
  const char *aligned, *unaligned;  // entries
  int threads = 0;                  // of a block
  int tile = 0;                     // values of a head that a block has at most; of narrow heads, heads
  int units = 0;                    // thread blocks that a request needs
};
RecurrentKernel recurrent_kernel(std::string_view arch, const RecurrentSpec&);
std::vector<KernelKey> recurrent_kernels(std::string_view arch, const RecurrentSpec&);  // those of a plan

// Whether the entry for aligned tensors can run it: every state and row of outputs begins at a multiple of 16 bytes.
bool are_aligned(const RecurrentSpec&, const RecurrentInputs&, const RecurrentOutputs&);
RecurrentParams recurrent_params(const RecurrentSpec&, const RecurrentInputs&, const RecurrentOutputs&);  // all but lists

}  // namespace imbrex::cuda

#pragma once
// The short convolution on NVIDIA GPUs: its kernels, and how a launch of them is shared out. Host side of short_conv.cu.
#include <string_view>
#include <vector>

#include "cuda/driver/jit.h"
#include "cuda/short_conv_params.h"
#include "imbrex/short_conv.h"

namespace imbrex::cuda {

// How much a multiprocessor has under way: tokens of a lane, and thread blocks that registers have to suffice for.
struct ShortConvTuning {
  int stages, blocks;
};
ShortConvTuning short_conv_tuning(const ShortConvSpec&);

// Entries short_conv_aligned and short_conv_unaligned, launched with kShortConvThreads.
KernelKey short_conv_key(std::string_view arch, const ShortConvSpec&, const ShortConvTuning&);
std::vector<KernelKey> short_conv_kernels(std::string_view arch, const ShortConvSpec&);  // those of a plan

// Units of work: a warp takes a chunk of tokens and a tile of channels.
struct ShortConvGrid {
  // `resident`: thread blocks that the GPU holds at a time.
  ShortConvGrid(const ShortConvSpec&, int64_t resident);
  int64_t blocks_for(const StateCounts&) const;  // that have work
  int64_t resident;
  int tiles, chunks_at_once, most_chunks;  // as in ShortConvParams
};

// Whether short_conv_aligned can run it: rows, weight and bias aligned to 16 bytes, and weights of a channel one after the other.
bool are_aligned(const ShortConvSpec&, const ShortConvInputs&, const ShortConvOutputs&);
ShortConvParams short_conv_params(const ShortConvSpec&, const ShortConvInputs&, const ShortConvOutputs&);  // all but lists and shares

}  // namespace imbrex::cuda

#pragma once
// Loops that keep one part of a CPU busy and do nothing else, for the instruction set that is given. ceilings.cpp times them.
#include <cstdint>

#include "imbrex/device.h"

namespace imbrex::serve {

// Reads `bytes`, a multiple of 512, and returns the sum of the numbers there.
uint64_t read_all(CpuIsa, const char* data, int64_t bytes);

// Rounds of f32 multiply-adds in the widest vectors, of products of bf16 pairs (AVX512_BF16), and of bf16 tile products (AMX); and the
// FLOPs of a round, 0 where the instruction set has no such thing. They return a number so that nothing is left out.
float fma_rounds(CpuIsa, int64_t rounds);
float pair_rounds(CpuIsa, int64_t rounds);
float tile_rounds(CpuIsa, int64_t rounds);
double fma_flops(CpuIsa);
double pair_flops(CpuIsa);
double tile_flops(CpuIsa);

}  // namespace imbrex::serve

#pragma once
// The constants a kernel is specialised by, with values that let an editor or nvcc read the files. When a kernel is compiled for use,
// cuda/jit.cpp puts a text with the real ones in this file's place.

// Every kernel.
constexpr int kArch = 900;            // 800 for sm_80, 1200 for sm_120
constexpr bool kArchFeatures = true;  // the instructions of exactly this architecture are there too: sm_90a, sm_100a

// write_kv.cu
constexpr int kFrom = 2, kTo = 3;  // ElementType
constexpr int kDimK = 128, kDimV = 128, kBlockSize = 16;

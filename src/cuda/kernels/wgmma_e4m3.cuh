#pragma once
// wgmma of e4m3 numbers, on sm_90a: d[64 x n] += a[64 x 32] * b[32 x n], asynchronous (wgmma_fence, commit and wait are in async.cuh).
// Of both operands the 32 are the contiguous dimension: there is no transposed form for bytes.
//
// A lane of warp w holds of d, with g = lane / 4 and t = lane % 4: d[4 j + 2 h + c] is row 16 w + g + 8 h, column 8 j + 2 t + c. Of a in
// registers, a[2 i + h] has the bytes of row 16 w + g + 8 h, columns 16 i + 4 t to 16 i + 4 t + 3.
#include "async.cuh"
#include "wgmma_registers.cuh"

namespace imbrex::cuda {

// `shared`: a in shared memory too. `registers`: a in registers. With `add` 0, d is taken for zero.
template <int n>
struct WgmmaE4m3;

// n, n / 2, and the names of the six operands behind d.
#define IMBREX_WGMMA_E4M3(n, count, o0, o1, o2, o3, o4, o5)                                                               \
  template <>                                                                                                             \
  struct WgmmaE4m3<n> {                                                                                                   \
    DEVICE static void shared(float (&d)[count], u64 a, u64 b, int add) {                                                 \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " o2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                \
                   "k32.f32.e4m3.e4m3 {" IMBREX_NAMES##count "}, " o0 ", " o1 ", add, 1, 1;\n}"                           \
                   : IMBREX_D##count                                                                                      \
                   : "l"(a), "l"(b), "r"(add));                                                                           \
    }                                                                                                                     \
    DEVICE static void registers(float (&d)[count], const u32 (&a)[4], u64 b, int add) {                                  \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " o5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n                \
                   "k32.f32.e4m3.e4m3 {" IMBREX_NAMES##count "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", add, 1, 1;\n}" \
                   : IMBREX_D##count                                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                       \
    }                                                                                                                     \
  };

IMBREX_WGMMA_E4M3(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
IMBREX_WGMMA_E4M3(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
IMBREX_WGMMA_E4M3(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
IMBREX_WGMMA_E4M3(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
IMBREX_WGMMA_E4M3(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef IMBREX_WGMMA_E4M3

}  // namespace imbrex::cuda

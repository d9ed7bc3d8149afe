#pragma once
// wgmma, the matrix product of a warpgroup on sm_90a: d[64 x n] += a[64 x 16] * b[16 x n], asynchronous (wgmma_fence, commit and wait are
// in async.cuh).
//
// A lane of warp w holds of d, with g = lane / 4 and t = lane % 4: d[4 j + 2 h + c] is row 16 w + g + 8 h, column 8 j + 2 t + c. Of a in
// registers the same 16 x 16 as in mma_bf16.
#include "async.cuh"
#include "wgmma_registers.cuh"

namespace imbrex::cuda {

// Sixteen-bit operands of a type, that of the queries if no other is named; with `add` 0, d is taken for zero.
// shared: a and b in shared memory, both with the 16 as their contiguous dimension.
// registers: a in registers; b in shared memory, `b_rows` with its n as the contiguous dimension.
template <int n, int type = kQType>
struct Wgmma;

#define IMBREX_WGMMA(type, n, add, text, ...)                                                                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
               " {" text __VA_ARGS__)
#define IMBREX_WGMMA_OF_TYPE(...)        \
  do {                                   \
    if constexpr (operands == 2) {       \
      IMBREX_WGMMA("bf16", __VA_ARGS__); \
    } else {                             \
      IMBREX_WGMMA("f16", __VA_ARGS__);  \
    }                                    \
  } while (false)

// n, n / 2, and the names of the seven operands behind d.
#define IMBREX_WGMMA_SHAPE(n, count, o0, o1, o2, o3, o4, o5, o6)                                                            \
  template <int operands>                                                                                                   \
  struct Wgmma<n, operands> {                                                                                               \
    DEVICE static void shared(float (&d)[count], u64 a, u64 b, int add) {                                                   \
      IMBREX_WGMMA_OF_TYPE(n, o2, IMBREX_NAMES##count, "}, " o0 ", " o1 ", add, 1, 1, 0, 0;\n}"                             \
                           : IMBREX_D##count                                                                                \
                           : "l"(a), "l"(b), "r"(add));                                                                     \
    }                                                                                                                       \
    template <bool b_rows>                                                                                                  \
    DEVICE static void registers(float (&d)[count], const u32 (&a)[4], u64 b, int add) {                                    \
      IMBREX_WGMMA_OF_TYPE(n, o5, IMBREX_NAMES##count, "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", add, 1, 1, " o6 ";\n}" \
                           : IMBREX_D##count                                                                                \
                           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(b_rows)));               \
    }                                                                                                                       \
  };

IMBREX_WGMMA_SHAPE(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
IMBREX_WGMMA_SHAPE(72, 36, "%36", "%37", "%38", "%39", "%40", "%41", "%42")
IMBREX_WGMMA_SHAPE(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
IMBREX_WGMMA_SHAPE(88, 44, "%44", "%45", "%46", "%47", "%48", "%49", "%50")
IMBREX_WGMMA_SHAPE(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
IMBREX_WGMMA_SHAPE(104, 52, "%52", "%53", "%54", "%55", "%56", "%57", "%58")
IMBREX_WGMMA_SHAPE(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
IMBREX_WGMMA_SHAPE(120, 60, "%60", "%61", "%62", "%63", "%64", "%65", "%66")
IMBREX_WGMMA_SHAPE(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
IMBREX_WGMMA_SHAPE(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
IMBREX_WGMMA_SHAPE(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef IMBREX_WGMMA_SHAPE
#undef IMBREX_WGMMA_OF_TYPE
#undef IMBREX_WGMMA

}  // namespace imbrex::cuda

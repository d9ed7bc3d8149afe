#pragma once
// wgmma of e4m3 numbers, on sm_90a: d[64 x n] += a[64 x 32] * b[32 x n], asynchronous (wgmma_fence, commit and wait are in async.cuh).
// Of both operands the 32 are the contiguous dimension: there is no transposed form for bytes.
//
// A lane of warp w holds of d, with g = lane / 4 and t = lane % 4: d[4 j + 2 h + c] is row 16 w + g + 8 h, column 8 j + 2 t + c. Of a in
// registers, a[2 i + h] has the bytes of row 16 w + g + 8 h, columns 16 i + 4 t to 16 i + 4 t + 3.
#include "async.cuh"

namespace imbrex::cuda {

// The first registers of an instruction by name, and as operands from d[i] on.
#define IMBREX_NAMES32                                                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
  "%28, "                                                                                                                              \
  "%29, %30, %31"
#define IMBREX_NAMES48 IMBREX_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define IMBREX_NAMES64 IMBREX_NAMES48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define IMBREX_NAMES80 IMBREX_NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define IMBREX_NAMES96 IMBREX_NAMES80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define IMBREX_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define IMBREX_D16(i) IMBREX_D4(i), IMBREX_D4(i + 4), IMBREX_D4(i + 8), IMBREX_D4(i + 12)
#define IMBREX_D32 IMBREX_D16(0), IMBREX_D16(16)
#define IMBREX_D48 IMBREX_D32, IMBREX_D16(32)
#define IMBREX_D64 IMBREX_D48, IMBREX_D16(48)
#define IMBREX_D80 IMBREX_D64, IMBREX_D16(64)
#define IMBREX_D96 IMBREX_D80, IMBREX_D16(80)

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
IMBREX_WGMMA_E4M3(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
IMBREX_WGMMA_E4M3(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")

#undef IMBREX_WGMMA_E4M3

}  // namespace imbrex::cuda

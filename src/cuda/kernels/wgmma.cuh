#pragma once
// wgmma, the matrix product of a warpgroup on sm_90a: d[64 x n] += a[64 x 32 bytes] * b[32 bytes x n], asynchronous (wgmma_fence, commit
// and wait are in async.cuh). Of 16-bit numbers these 32 bytes are 16, of e4m3 32.
//
// Warp w of the warpgroup has rows 16 w to 16 w + 15: of d as a Fragment (fragment.cuh). Of a in registers, with g = lane / 4 and
// t = lane % 4, a[2 i + h] has of row 16 w + g + 8 h the bytes 16 i + 4 t to 16 i + 4 t + 3: of 16-bit numbers the same 16 x 16 as in
// mma_bf16.
#include "async.cuh"
#include "cuda/params.h"

namespace imbrex::cuda {

// Operands of a type, that of the queries if no other is named; with `add` 0, d is taken for zero.
// shared: a and b in shared memory.
// registers: a in registers; b in shared memory.
// b has the summed dimension as its contiguous one; with `b_rows` its n, which bytes do not have. So has a in shared memory, with `a_rows`
// its rows.
template <int n, int type = kQType>
struct Wgmma;

// An instruction spells out each register of d, in its text (%0, %1, ..) and as operands from d[0] on.
#define IMBREX_NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define IMBREX_NAMES16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define IMBREX_NAMES32                                                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
  "%28, %29, %30, %31"
#define IMBREX_NAMES36 IMBREX_NAMES32 ", %32, %33, %34, %35"
#define IMBREX_NAMES40 IMBREX_NAMES36 ", %36, %37, %38, %39"
#define IMBREX_NAMES44 IMBREX_NAMES40 ", %40, %41, %42, %43"
#define IMBREX_NAMES48 IMBREX_NAMES44 ", %44, %45, %46, %47"
#define IMBREX_NAMES52 IMBREX_NAMES48 ", %48, %49, %50, %51"
#define IMBREX_NAMES56 IMBREX_NAMES52 ", %52, %53, %54, %55"
#define IMBREX_NAMES60 IMBREX_NAMES56 ", %56, %57, %58, %59"
#define IMBREX_NAMES64 IMBREX_NAMES60 ", %60, %61, %62, %63"
#define IMBREX_NAMES80 IMBREX_NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define IMBREX_NAMES96 IMBREX_NAMES80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define IMBREX_NAMES112 IMBREX_NAMES96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define IMBREX_NAMES128 IMBREX_NAMES112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define IMBREX_FOUR_OF_D(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define IMBREX_SIXTEEN_OF_D(i) IMBREX_FOUR_OF_D(i), IMBREX_FOUR_OF_D(i + 4), IMBREX_FOUR_OF_D(i + 8), IMBREX_FOUR_OF_D(i + 12)
#define IMBREX_D8 IMBREX_FOUR_OF_D(0), IMBREX_FOUR_OF_D(4)
#define IMBREX_D16 IMBREX_SIXTEEN_OF_D(0)
#define IMBREX_D32 IMBREX_SIXTEEN_OF_D(0), IMBREX_SIXTEEN_OF_D(16)
#define IMBREX_D36 IMBREX_D32, IMBREX_FOUR_OF_D(32)
#define IMBREX_D40 IMBREX_D36, IMBREX_FOUR_OF_D(36)
#define IMBREX_D44 IMBREX_D40, IMBREX_FOUR_OF_D(40)
#define IMBREX_D48 IMBREX_D44, IMBREX_FOUR_OF_D(44)
#define IMBREX_D52 IMBREX_D48, IMBREX_FOUR_OF_D(48)
#define IMBREX_D56 IMBREX_D52, IMBREX_FOUR_OF_D(52)
#define IMBREX_D60 IMBREX_D56, IMBREX_FOUR_OF_D(56)
#define IMBREX_D64 IMBREX_D60, IMBREX_FOUR_OF_D(60)
#define IMBREX_D80 IMBREX_D64, IMBREX_SIXTEEN_OF_D(64)
#define IMBREX_D96 IMBREX_D80, IMBREX_SIXTEEN_OF_D(80)
#define IMBREX_D112 IMBREX_D96, IMBREX_SIXTEEN_OF_D(96)
#define IMBREX_D128 IMBREX_D112, IMBREX_SIXTEEN_OF_D(112)

// Of n columns, a depth, a type; the text of the operands behind the type, and the operands.
#define IMBREX_WGMMA(n, depth, type, add, text, ...)                                                                                \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n depth ".f32." type "." type \
               " {" text __VA_ARGS__)
// `transposed`: the end of the text for types that have a transposed form.
#define IMBREX_WGMMA_OF_TYPE(n, add, text, transposed, ...)                     \
  do {                                                                          \
    if constexpr (type == kE4m3) {                                              \
      IMBREX_WGMMA(n, "k32", "e4m3", add, text ";\n}", __VA_ARGS__);            \
    } else if constexpr (type == kBf16) {                                       \
      IMBREX_WGMMA(n, "k16", "bf16", add, text transposed ";\n}", __VA_ARGS__); \
    } else {                                                                    \
      static_assert(type == kF16);                                              \
      IMBREX_WGMMA(n, "k16", "f16", add, text transposed ";\n}", __VA_ARGS__);  \
    }                                                                           \
  } while (false)

// n, n / 2, and the names of the seven operands behind d.
#define IMBREX_WGMMA_SHAPE(n, count, o0, o1, o2, o3, o4, o5, o6)                                                         \
  template <int type>                                                                                                    \
  struct Wgmma<n, type> {                                                                                                \
    template <bool b_rows = false, bool a_rows = false>                                                                  \
    DEVICE static void shared(float (&d)[count], u64 a, u64 b, int add) {                                                \
      static_assert((!a_rows && !b_rows) || type != kE4m3);                                                              \
      IMBREX_WGMMA_OF_TYPE(n, o2, IMBREX_NAMES##count "}, " o0 ", " o1 ", add, 1, 1", ", " o3 ", " o4,                   \
                           : IMBREX_D##count                                                                             \
                           : "l"(a), "l"(b), "r"(add), "n"(int(a_rows)), "n"(int(b_rows)));                              \
    }                                                                                                                    \
    template <bool b_rows>                                                                                               \
    DEVICE static void registers(float (&d)[count], const u32 (&a)[4], u64 b, int add) {                                 \
      static_assert(!b_rows || type != kE4m3);                                                                           \
      IMBREX_WGMMA_OF_TYPE(n, o5, IMBREX_NAMES##count "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", add, 1, 1", ", " o6, \
                           : IMBREX_D##count                                                                             \
                           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(b_rows)));            \
    }                                                                                                                    \
  };

IMBREX_WGMMA_SHAPE(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
IMBREX_WGMMA_SHAPE(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
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

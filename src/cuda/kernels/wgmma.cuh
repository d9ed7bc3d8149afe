#pragma once
// wgmma, the matrix product of a warpgroup on sm_90a: d[64 x n] += a[64 x 16] * b[16 x n], asynchronous (wgmma_fence, commit and wait are
// in async.cuh).
//
// A lane of warp w holds of d, with g = lane / 4 and t = lane % 4: d[4 j + 2 h + c] is row 16 w + g + 8 h, column 8 j + 2 t + c. Of a in
// registers the same 16 x 16 as in mma_bf16.
#include "async.cuh"

namespace imbrex::cuda {

// Sixteen-bit operands of the type kQType; with `add` 0, d is taken for zero.
// shared: a and b in shared memory, both with the 16 as their contiguous dimension.
// registers: a in registers; b in shared memory, `b_rows` with its n as the contiguous dimension.
template <int n>
struct Wgmma;

// The instruction spells out every register of d: operand numbers in its text, ten by ten, and then the operands, eight by eight.
#define IMBREX_TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define IMBREX_EIGHT(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])

#define IMBREX_TEXT_30 IMBREX_TEN() IMBREX_TEN(1) IMBREX_TEN(2)
#define IMBREX_TEXT_60 IMBREX_TEXT_30 IMBREX_TEN(3) IMBREX_TEN(4) IMBREX_TEN(5)
#define IMBREX_TEXT_90 IMBREX_TEXT_60 IMBREX_TEN(6) IMBREX_TEN(7) IMBREX_TEN(8)
#define IMBREX_TEXT_120 IMBREX_TEXT_90 IMBREX_TEN(9) IMBREX_TEN(10) IMBREX_TEN(11)
#define IMBREX_OPERANDS_32 IMBREX_EIGHT(0), IMBREX_EIGHT(8), IMBREX_EIGHT(16), IMBREX_EIGHT(24)
#define IMBREX_OPERANDS_40 IMBREX_OPERANDS_32, IMBREX_EIGHT(32)
#define IMBREX_OPERANDS_64 IMBREX_OPERANDS_32, IMBREX_EIGHT(32), IMBREX_EIGHT(40), IMBREX_EIGHT(48), IMBREX_EIGHT(56)
#define IMBREX_OPERANDS_96 IMBREX_OPERANDS_64, IMBREX_EIGHT(64), IMBREX_EIGHT(72), IMBREX_EIGHT(80), IMBREX_EIGHT(88)
#define IMBREX_OPERANDS_128 IMBREX_OPERANDS_96, IMBREX_EIGHT(96), IMBREX_EIGHT(104), IMBREX_EIGHT(112), IMBREX_EIGHT(120)

#define IMBREX_WGMMA(add, n, text, ...)                                                                       \
  do {                                                                                                        \
    if constexpr (kQType == 2) {                                                                              \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
                   "k16.f32.bf16.bf16 {" text __VA_ARGS__);                                                   \
    } else {                                                                                                  \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
                   "k16.f32.f16.f16 {" text __VA_ARGS__);                                                     \
    }                                                                                                         \
  } while (false)

// i0 to i6: the numbers of the operands that follow d, n / 2 and up.
#define IMBREX_WGMMA_SHAPE(n, text, operands, i0, i1, i2, i3, i4, i5, i6)                                            \
  template <>                                                                                                        \
  struct Wgmma<n> {                                                                                                  \
    DEVICE static void shared(float (&d)[n / 2], u64 a, u64 b, int add) {                                            \
      IMBREX_WGMMA(i2, n, text, "}, %" #i0 ", %" #i1 ", add, 1, 1, 0, 0;\n}" : operands : "l"(a), "l"(b), "r"(add)); \
    }                                                                                                                \
    template <bool b_rows>                                                                                           \
    DEVICE static void registers(float (&d)[n / 2], const u32 (&a)[4], u64 b, int add) {                             \
      IMBREX_WGMMA(i5, n, text, "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", add, 1, 1, %" #i6 ";\n}"     \
                   : operands                                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(int(b_rows)));                \
    }                                                                                                                \
  }

IMBREX_WGMMA_SHAPE(64, IMBREX_TEXT_30 "%30, %31", IMBREX_OPERANDS_32, 32, 33, 34, 35, 36, 37, 38);
IMBREX_WGMMA_SHAPE(80, IMBREX_TEXT_30 "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39", IMBREX_OPERANDS_40, 40, 41, 42, 43, 44, 45, 46);
IMBREX_WGMMA_SHAPE(128, IMBREX_TEXT_60 "%60, %61, %62, %63", IMBREX_OPERANDS_64, 64, 65, 66, 67, 68, 69, 70);
IMBREX_WGMMA_SHAPE(256, IMBREX_TEXT_120 "%120, %121, %122, %123, %124, %125, %126, %127", IMBREX_OPERANDS_128, 128, 129, 130, 131, 132, 133,
                   134);

}  // namespace imbrex::cuda

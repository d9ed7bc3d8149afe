#pragma once
// Lists of the registers of a matrix product: an instruction spells out each of them, in its text (%0, %1, ..) and as operands from d[0]
// on. For wgmma.cuh and wgmma_e4m3.cuh.

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

#define IMBREX_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define IMBREX_D16(i) IMBREX_D4(i), IMBREX_D4(i + 4), IMBREX_D4(i + 8), IMBREX_D4(i + 12)
#define IMBREX_D32 IMBREX_D16(0), IMBREX_D16(16)
#define IMBREX_D36 IMBREX_D32, IMBREX_D4(32)
#define IMBREX_D40 IMBREX_D36, IMBREX_D4(36)
#define IMBREX_D44 IMBREX_D40, IMBREX_D4(40)
#define IMBREX_D48 IMBREX_D44, IMBREX_D4(44)
#define IMBREX_D52 IMBREX_D48, IMBREX_D4(48)
#define IMBREX_D56 IMBREX_D52, IMBREX_D4(52)
#define IMBREX_D60 IMBREX_D56, IMBREX_D4(56)
#define IMBREX_D64 IMBREX_D60, IMBREX_D4(60)
#define IMBREX_D80 IMBREX_D64, IMBREX_D16(64)
#define IMBREX_D96 IMBREX_D80, IMBREX_D16(80)
#define IMBREX_D112 IMBREX_D96, IMBREX_D16(96)
#define IMBREX_D128 IMBREX_D112, IMBREX_D16(112)

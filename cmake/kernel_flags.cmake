# Compile flags of each CPU kernel file. The files are chosen at run time, so nothing but kernel code may be compiled with them.
# 512-bit vectors are asked for explicitly: the default tuning of several compilers prefers 256.
set(kernels ${PROJECT_SOURCE_DIR}/src/cpu/kernels)
set(avx2_flags -mavx2 -mfma -mf16c)
set(avx512_flags -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
set(avx512_bf16_flags ${avx512_flags} -mavx512vbmi -mavx512bf16)
# GCC 12 warns about its own intrinsics headers (GCC bug 105593).
set(kernel_warnings -Wno-uninitialized $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
foreach(pair IN ITEMS "avx2;avx2_flags" "avx512;avx512_flags" "avx512_bf16;avx512_bf16_flags" "amx_emulated;avx512_bf16_flags" "amx;avx512_bf16_flags")
  list(GET pair 0 stem)
  list(GET pair 1 flags)
  file(GLOB files CONFIGURE_DEPENDS ${kernels}/${stem}.cpp ${kernels}/*_${stem}.cpp)
  if(files)
    set_source_files_properties(${files} PROPERTIES COMPILE_OPTIONS "${${flags}};${kernel_warnings};-O3;-fno-exceptions;-fno-math-errno")
  endif()
endforeach()
set(amx_files ${kernels}/amx.cpp ${kernels}/head_products_amx.cpp ${kernels}/recurrent_amx.cpp)
set_property(SOURCE ${amx_files} APPEND PROPERTY COMPILE_OPTIONS -mamx-tile -mamx-bf16)
file(GLOB generic_files CONFIGURE_DEPENDS ${kernels}/generic.cpp ${kernels}/*_generic.cpp)
# Conversions choose between results of additions and multiplications; if these might trap, they would stay behind branches and loops
# over them would not become vectors. No result depends on it.
set_source_files_properties(${generic_files} PROPERTIES COMPILE_OPTIONS "-O3;-fno-exceptions;-fno-math-errno;-fno-trapping-math")
file(GLOB kernel_files CONFIGURE_DEPENDS ${kernels}/*.cpp)
# Unrolled, the emulated AMX kernels take two minutes, and all kernels do with sanitizers, as they do at -O3. For these a template that is
# there for many shapes is there for few: the others are the same text with other trip counts, and add up in the same order. What the AMX
# unit does sanitizers do not see; the rest of amx.cpp is in amx_emulated.cpp too.
set(rolled ${kernels}/amx_emulated.cpp ${kernels}/head_products_amx_emulated.cpp)
# They are for tests, which take as long with -O2 as with -O3; the compiler takes half.
set_property(SOURCE ${rolled} APPEND PROPERTY COMPILE_OPTIONS -O2)
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  set(rolled ${kernel_files})
  set_property(SOURCE ${kernel_files} APPEND PROPERTY COMPILE_DEFINITIONS IMBREX_FEW_SHAPES)
  set_property(SOURCE ${kernel_files} APPEND PROPERTY COMPILE_OPTIONS -O1 $<$<BOOL:${IMBREX_BUILD_FUZZERS}>:-fno-sanitize=fuzzer-no-link>)
  # AddressSanitizer finds wrong addresses. That UBSan looks at pointers too would more than double the time that kernels take to compile.
  set_property(SOURCE ${kernel_files} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=null,alignment,object-size,pointer-overflow)
  set_property(SOURCE ${amx_files} APPEND PROPERTY COMPILE_OPTIONS -fno-sanitize=all)
endif()
# A kernel writes the rows that its caller names, whatever its instructions are. The sanitizer of threads watches the portable kernels, those of
# AVX-512 and the emulated AMX kernels; of the same texts for other instructions it has no need.
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread")
  set(alike ${kernel_files})
  list(FILTER alike INCLUDE REGEX "/([a-z_]+_)?(avx2|avx512_bf16|amx)\\.cpp$")
  set_property(SOURCE ${alike} APPEND PROPERTY COMPILE_OPTIONS -O0 -fno-sanitize=thread)
endif()
# Beside fuzzers kernels only have to be there: the tests under AddressSanitizer watch them.
if(IMBREX_FUZZED_ONLY)
  set_property(SOURCE ${kernel_files} APPEND PROPERTY COMPILE_OPTIONS -O0 -fno-sanitize=all)
endif()
set_property(SOURCE ${rolled} APPEND PROPERTY COMPILE_DEFINITIONS IMBREX_NO_UNROLL)

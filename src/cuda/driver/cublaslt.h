#pragma once
// The functions of cuBLASLt that we call, declared by hand and opened at run time: building needs no CUDA. Names, signatures and values are
// those of cublasLt.h, cublas_api.h and library_types.h of CUDA 13.0; tests/cuda/headers/cublaslt_headers_test.cpp compares them where
// these exist.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver/driver.h"

namespace imbrex::cuda {

using cublasStatus_t = int;
using cublasLtHandle_t = struct cublasLtContext*;
using cublasLtMatmulDesc_t = struct cublasLtMatmulDescOpaque*;
using cublasLtMatrixLayout_t = struct cublasLtMatrixLayoutOpaque*;
using cublasLtMatmulPreference_t = struct cublasLtMatmulPreferenceOpaque*;
struct cublasLtMatmulAlgo_t {
  uint64_t data[8];
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspace_bytes;
  cublasStatus_t state;
  float waves;
  int reserved[4];
};

// X(our name, value, name there)
#define IMBREX_CUBLASLT_CONSTANTS(X)                                      \
  X(kCublasSuccess, 0, CUBLAS_STATUS_SUCCESS)                             \
  X(kCublasNotInitialized, 1, CUBLAS_STATUS_NOT_INITIALIZED)              \
  X(kCublasNotSupported, 15, CUBLAS_STATUS_NOT_SUPPORTED)                 \
  X(kCublasNoTranspose, 0, CUBLAS_OP_N)                                   \
  X(kCublasTranspose, 1, CUBLAS_OP_T)                                     \
  X(kCublasCompute32F, 68, CUBLAS_COMPUTE_32F)                            \
  X(kCudaReal32F, 0, CUDA_R_32F)                                          \
  X(kCudaReal16F, 2, CUDA_R_16F)                                          \
  X(kCudaReal16BF, 14, CUDA_R_16BF)                                       \
  X(kLtDescTransA, 3, CUBLASLT_MATMUL_DESC_TRANSA)                        \
  X(kLtLayoutRows, 2, CUBLASLT_MATRIX_LAYOUT_ROWS)                        \
  X(kLtLayoutCols, 3, CUBLASLT_MATRIX_LAYOUT_COLS)                        \
  X(kLtLayoutLd, 4, CUBLASLT_MATRIX_LAYOUT_LD)                            \
  X(kLtLayoutBatchCount, 5, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)           \
  X(kLtLayoutBatchOffset, 6, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET) \
  X(kLtPreferWorkspaceBytes, 1, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) \
  X(kLtPreferReductions, 3, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)   \
  X(kLtPreferAlignmentA, 5, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES)   \
  X(kLtPreferAlignmentB, 6, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES)   \
  X(kLtPreferAlignmentC, 7, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES)   \
  X(kLtPreferAlignmentD, 8, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES)   \
  X(kLtReductionNone, 0, CUBLASLT_REDUCTION_SCHEME_NONE)                  \
  X(kLtAlgoId, 0, CUBLASLT_ALGO_CONFIG_ID)                                \
  X(kLtAlgoTile, 1, CUBLASLT_ALGO_CONFIG_TILE_ID)                         \
  X(kLtAlgoSplitK, 2, CUBLASLT_ALGO_CONFIG_SPLITK_NUM)                    \
  X(kLtAlgoReduction, 3, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)

// clang-format off
// X(result, symbol, parameters)
#define IMBREX_CUBLASLT_API(X)                                                                                                            \
  X(size_t, cublasLtGetVersion, ())                                                                                                       \
  X(const char*, cublasLtGetStatusString, (cublasStatus_t))                                                                               \
  X(cublasStatus_t, cublasLtCreate, (cublasLtHandle_t*))                                                                                  \
  X(cublasStatus_t, cublasLtDestroy, (cublasLtHandle_t))                                                                                  \
  X(cublasStatus_t, cublasLtMatmulDescCreate, (cublasLtMatmulDesc_t*, int compute_type, int scale_type))                                  \
  X(cublasStatus_t, cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t))                                                                    \
  X(cublasStatus_t, cublasLtMatmulDescSetAttribute, (cublasLtMatmulDesc_t, int attribute, const void* value, size_t bytes))               \
  X(cublasStatus_t, cublasLtMatrixLayoutCreate, (cublasLtMatrixLayout_t*, int type, uint64_t rows, uint64_t columns, int64_t ld))         \
  X(cublasStatus_t, cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t))                                                                \
  X(cublasStatus_t, cublasLtMatrixLayoutSetAttribute, (cublasLtMatrixLayout_t, int attribute, const void* value, size_t bytes))           \
  X(cublasStatus_t, cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t*))                                                        \
  X(cublasStatus_t, cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t))                                                        \
  X(cublasStatus_t, cublasLtMatmulPreferenceSetAttribute, (cublasLtMatmulPreference_t, int attribute, const void* value, size_t bytes))   \
  X(cublasStatus_t, cublasLtMatmulAlgoGetHeuristic,                                                                                       \
    (cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,                \
     cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t, int most, cublasLtMatmulHeuristicResult_t* results, int* count))               \
  X(cublasStatus_t, cublasLtMatmulAlgoCheck,                                                                                              \
    (cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,                \
     cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t*, cublasLtMatmulHeuristicResult_t*))                                            \
  X(cublasStatus_t, cublasLtMatmulAlgoConfigGetAttribute,                                                                                 \
    (const cublasLtMatmulAlgo_t*, int attribute, void* value, size_t bytes, size_t* written))                                             \
  X(cublasStatus_t, cublasLtMatmul,                                                                                                       \
    (cublasLtHandle_t, cublasLtMatmulDesc_t, const void* alpha, const void* a, cublasLtMatrixLayout_t, const void* b,                     \
     cublasLtMatrixLayout_t, const void* beta, const void* c, cublasLtMatrixLayout_t, void* d, cublasLtMatrixLayout_t,                    \
     const cublasLtMatmulAlgo_t*, void* workspace, size_t workspace_bytes, CUstream))
// clang-format on

#define X(name, value, theirs) inline constexpr int name = value;
IMBREX_CUBLASLT_CONSTANTS(X)
#undef X

// NOLINTBEGIN(bugprone-macro-parentheses): declarations cannot have them
struct CublasLtApi {
#define X(result, name, parameters) result(*name) parameters = nullptr;
  IMBREX_CUBLASLT_API(X)
#undef X
};
// NOLINTEND(bugprone-macro-parentheses)

inline constexpr size_t kMinCublasLtVersion = 120000;  // as cublasLtGetVersion() has it: 12.0

Loaded<CublasLtApi> load_cublaslt(const std::vector<std::string>& names);
// The table, opened once: IMBREX_CUDA_CUBLASLT, else by its usual names where NVRTC is looked for, in the folder of NVRTC itself, and in
// the folder that Python's packages give it beside that of NVRTC.
const CublasLtApi* cublaslt(std::string* why = nullptr);
const CublasLtApi& need_cublaslt();  // Error cuda.cublaslt_missing

[[noreturn]] void fail_cublaslt(cublasStatus_t, std::string_view what);  // Error cuda.cublaslt
template <class... Args>
void check_cublaslt(cublasStatus_t status, fmt::format_string<Args...> what, Args&&... args) {
  if (status != kCublasSuccess) [[unlikely]]
    fail_cublaslt(status, fmt::format(what, std::forward<Args>(args)...));
}

}  // namespace imbrex::cuda

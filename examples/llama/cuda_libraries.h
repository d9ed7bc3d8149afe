#pragma once
// The few functions of NVIDIA's driver, NVRTC and cuBLAS that ops_cuda.cpp calls, declared by hand and opened when they are first needed:
// the example is built without CUDA and runs without it on a CPU.
#include <cstddef>
#include <string>

namespace llama::cuda {

using Context = struct CUctx_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using CuStream = struct CUstream_st*;
using Program = struct _nvrtcProgram*;
using Blas = struct cublasContext*;

// X(name in the library, parameters); all return an int that is 0 for success.
#define LLAMA_DRIVER_API(X)                                                                                                             \
  X(cuInit, (unsigned flags))                                                                                                           \
  X(cuGetErrorName, (int error, const char** name))                                                                                     \
  X(cuDeviceGet, (int* device, int ordinal))                                                                                            \
  X(cuDevicePrimaryCtxRetain, (Context*, int device))                                                                                   \
  X(cuDevicePrimaryCtxRelease_v2, (int device))                                                                                         \
  X(cuCtxSetCurrent, (Context))                                                                                                         \
  X(cuModuleLoadData, (Module*, const void* image))                                                                                     \
  X(cuModuleUnload, (Module))                                                                                                           \
  X(cuModuleGetFunction, (Function*, Module, const char* name))                                                                         \
  X(cuLaunchKernel, (Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, \
                     unsigned shared_bytes, CuStream, void** parameters, void** extra))

#define LLAMA_NVRTC_API(X)                                                                                                               \
  X(nvrtcCreateProgram, (Program*, const char* text, const char* name, int num_headers, const char* const* headers, const char* const*)) \
  X(nvrtcCompileProgram, (Program, int num_options, const char* const* options))                                                         \
  X(nvrtcDestroyProgram, (Program*))                                                                                                     \
  X(nvrtcGetProgramLogSize, (Program, size_t*))                                                                                          \
  X(nvrtcGetProgramLog, (Program, char*))                                                                                                \
  X(nvrtcGetCUBINSize, (Program, size_t*))                                                                                               \
  X(nvrtcGetCUBIN, (Program, char*))

#define LLAMA_BLAS_API(X)                                                                                                               \
  X(cublasCreate_v2, (Blas*))                                                                                                           \
  X(cublasDestroy_v2, (Blas))                                                                                                           \
  X(cublasSetStream_v2, (Blas, CuStream))                                                                                               \
  X(cublasGemmEx, (Blas, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int a_type, int lda, const void* b, \
                   int b_type, int ldb, const void* beta, void* c, int c_type, int ldc, int compute_type, int algorithm))

inline constexpr int kOpN = 0, kOpT = 1;      // CUBLAS_OP_*
inline constexpr int kR32F = 0, kR16BF = 14;  // CUDA_R_*
inline constexpr int kCompute32F = 68;        // CUBLAS_COMPUTE_32F
inline constexpr int kGemmDefault = -1;       // CUBLAS_GEMM_DEFAULT

// NOLINTBEGIN(bugprone-macro-parentheses): declarations cannot have them
#define X(name, parameters) int(*name) parameters = nullptr;
struct Driver {
  LLAMA_DRIVER_API(X)
};
struct Nvrtc {
  LLAMA_NVRTC_API(X)
};
struct CuBlas {
  LLAMA_BLAS_API(X)
};
#undef X
// NOLINTEND(bugprone-macro-parentheses)

// Opened and started once. A library that is not there is an error that says where it was looked for: by the system's rules
// (LD_LIBRARY_PATH), then in CUDA_HOME and /usr/local/cuda.
const Driver& driver();
const Nvrtc& nvrtc();
const CuBlas& cublas();

void check_driver(int result, const char* what);  // throws unless it is 0

}  // namespace llama::cuda

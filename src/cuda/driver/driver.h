#pragma once
// The functions of the CUDA driver and of NVRTC that we call, declared by hand and opened at run time: building needs no CUDA.
// Names, signatures and values are those of cuda.h and nvrtc.h; tests/cuda/headers/toolkit_headers_test.cpp compares them where these
// exist.
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace imbrex::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;
using CUgraph = struct CUgraph_st*;
using CUgraphExec = struct CUgraphExec_st*;
using CUgraphNode = struct CUgraphNode_st*;
struct CUgraphEdgeData {
  unsigned char from_port, to_port, type, reserved[5];
};
using CUuserObject = struct CUuserObject_st*;
using CUhostFn = void (*)(void*);
using nvrtcProgram = struct _nvrtcProgram*;
using nvrtcResult = int;

struct CUlaunchAttribute {
  int id = 0;  // kLaunchCluster, ...
  char pad[4] = {};
  union {
    char bytes[64] = {};
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_serialization;  // 1: may begin before the kernel in front of it has ended (griddepcontrol)
  } value;
};

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, smem_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned num_attributes;
};

struct alignas(128) CUtensorMap {  // opaque; passed to kernels as a __grid_constant__ parameter
  uint64_t opaque[16];
};

// X(our name, value, name in cuda.h)
#define IMBREX_CUDA_CONSTANTS(X)                                                                \
  X(kCudaSuccess, 0, CUDA_SUCCESS)                                                              \
  X(kCudaInvalidValue, 1, CUDA_ERROR_INVALID_VALUE)                                             \
  X(kCudaOutOfMemory, 2, CUDA_ERROR_OUT_OF_MEMORY)                                              \
  X(kCudaNotInitialized, 3, CUDA_ERROR_NOT_INITIALIZED)                                         \
  X(kCudaNoDevice, 100, CUDA_ERROR_NO_DEVICE)                                                   \
  X(kCudaInvalidContext, 201, CUDA_ERROR_INVALID_CONTEXT)                                       \
  X(kCudaNotFound, 500, CUDA_ERROR_NOT_FOUND)                                                   \
  X(kCudaNotReady, 600, CUDA_ERROR_NOT_READY)                                                   \
  X(kDeviceMultiprocessors, 16, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)                       \
  X(kDeviceL2Bytes, 38, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)                                      \
  X(kDeviceMajor, 75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)                             \
  X(kDeviceMinor, 76, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)                             \
  X(kDeviceSmemPerBlockOptIn, 97, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)        \
  X(kFunctionLocalBytes, 3, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)                                 \
  X(kFunctionRegisters, 4, CU_FUNC_ATTRIBUTE_NUM_REGS)                                          \
  X(kFunctionMaxDynamicSmem, 8, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)                \
  X(kFunctionSmemCarveout, 9, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT)               \
  X(kStreamDefault, 0, CU_STREAM_DEFAULT)                                                       \
  X(kStreamNonBlocking, 1, CU_STREAM_NON_BLOCKING)                                              \
  X(kEventDefault, 0, CU_EVENT_DEFAULT)                                                         \
  X(kEventDisableTiming, 2, CU_EVENT_DISABLE_TIMING)                                            \
  X(kHostPortable, 1, CU_MEMHOSTALLOC_PORTABLE)                                                 \
  X(kCaptureGlobal, 0, CU_STREAM_CAPTURE_MODE_GLOBAL)                                           \
  X(kCaptureThreadLocal, 1, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)                                \
  X(kCaptureRelaxed, 2, CU_STREAM_CAPTURE_MODE_RELAXED)                                         \
  X(kSetCaptureDependencies, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES)                             \
  X(kCaptureStatusNone, 0, CU_STREAM_CAPTURE_STATUS_NONE)                                       \
  X(kCaptureStatusActive, 1, CU_STREAM_CAPTURE_STATUS_ACTIVE)                                   \
  X(kUserObjectNoDestructorSync, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)                          \
  X(kGraphUserObjectMove, 1, CU_GRAPH_USER_OBJECT_MOVE)                                         \
  X(kLaunchCluster, 4, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)                                   \
  X(kLaunchProgrammaticSerialization, 6, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) \
  X(kTensorMapU8, 0, CU_TENSOR_MAP_DATA_TYPE_UINT8)                                             \
  X(kTensorMapU32, 2, CU_TENSOR_MAP_DATA_TYPE_UINT32)                                           \
  X(kTensorMapF16, 6, CU_TENSOR_MAP_DATA_TYPE_FLOAT16)                                          \
  X(kTensorMapBf16, 9, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16)                                        \
  X(kTensorMapInterleaveNone, 0, CU_TENSOR_MAP_INTERLEAVE_NONE)                                 \
  X(kTensorMapSwizzleNone, 0, CU_TENSOR_MAP_SWIZZLE_NONE)                                       \
  X(kTensorMapSwizzle64, 2, CU_TENSOR_MAP_SWIZZLE_64B)                                          \
  X(kTensorMapSwizzle128, 3, CU_TENSOR_MAP_SWIZZLE_128B)                                        \
  X(kTensorMapL2None, 0, CU_TENSOR_MAP_L2_PROMOTION_NONE)                                       \
  X(kTensorMapFillZero, 0, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)

// Formatted by hand: clang-format takes "size_t* bytes" for a product.
// clang-format off
// X(symbol, parameters). A _v2 is part of the name: cuda.h hides it in a macro, the library has both.
#define IMBREX_CUDA_DRIVER_API(X)                                                                                                         \
  X(cuInit, (unsigned flags))                                                                                                             \
  X(cuDriverGetVersion, (int* version))                                                                                                   \
  X(cuGetErrorName, (CUresult, const char** text))                                                                                        \
  X(cuGetErrorString, (CUresult, const char** text))                                                                                      \
  X(cuDeviceGet, (CUdevice*, int ordinal))                                                                                                \
  X(cuDeviceGetCount, (int* count))                                                                                                       \
  X(cuDeviceGetName, (char* name, int capacity, CUdevice))                                                                                \
  X(cuDeviceTotalMem_v2, (size_t* bytes, CUdevice))                                                                                       \
  X(cuDeviceGetAttribute, (int* value, int attribute, CUdevice))                                                                          \
  X(cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))                                                                                     \
  X(cuDevicePrimaryCtxRelease_v2, (CUdevice))                                                                                             \
  X(cuCtxGetCurrent, (CUcontext*))                                                                                                        \
  X(cuCtxPushCurrent_v2, (CUcontext))                                                                                                     \
  X(cuCtxPopCurrent_v2, (CUcontext*))                                                                                                     \
  X(cuCtxGetDevice, (CUdevice*))                                                                                                          \
  X(cuCtxGetId, (CUcontext, unsigned long long* id))                                                                                      \
  X(cuStreamCreate, (CUstream*, unsigned flags))                                                                                          \
  X(cuStreamDestroy_v2, (CUstream))                                                                                                       \
  X(cuStreamSynchronize, (CUstream))                                                                                                      \
  X(cuStreamWaitEvent, (CUstream, CUevent, unsigned flags))                                                                               \
  X(cuStreamIsCapturing, (CUstream, int* status))                                                                                         \
  X(cuThreadExchangeStreamCaptureMode, (int* mode))                                                                                       \
  X(cuEventCreate, (CUevent*, unsigned flags))                                                                                            \
  X(cuEventDestroy_v2, (CUevent))                                                                                                         \
  X(cuEventRecord, (CUevent, CUstream))                                                                                                   \
  X(cuEventQuery, (CUevent))                                                                                                              \
  X(cuEventSynchronize, (CUevent))                                                                                                        \
  X(cuEventElapsedTime, (float* milliseconds, CUevent begin, CUevent end))                                                                \
  X(cuMemGetInfo_v2, (size_t* free, size_t* total))                                                                                       \
  X(cuMemAlloc_v2, (CUdeviceptr*, size_t bytes))                                                                                          \
  X(cuMemFree_v2, (CUdeviceptr))                                                                                                          \
  X(cuMemHostAlloc, (void**, size_t bytes, unsigned flags))                                                                               \
  X(cuMemFreeHost, (void*))                                                                                                               \
  X(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void* from, size_t bytes, CUstream))                                                     \
  X(cuMemcpyDtoHAsync_v2, (void* to, CUdeviceptr from, size_t bytes, CUstream))                                                           \
  X(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream))                                                     \
  X(cuMemsetD8Async, (CUdeviceptr, unsigned char value, size_t count, CUstream))                                                          \
  X(cuLibraryLoadData, (CUlibrary*, const void* code, int* jit_options, void** jit_values, unsigned num_jit, int* library_options,        \
                        void** library_values, unsigned num_library))                                                                     \
  X(cuLibraryUnload, (CUlibrary))                                                                                                         \
  X(cuLibraryGetKernel, (CUkernel*, CUlibrary, const char* name))                                                                         \
  X(cuKernelGetFunction, (CUfunction*, CUkernel))                                                                                         \
  X(cuFuncGetAttribute, (int* value, int attribute, CUfunction))                                                                          \
  X(cuFuncSetAttribute, (CUfunction, int attribute, int value))                                                                           \
  X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int* blocks, CUfunction, int block_size, size_t smem_bytes))                            \
  X(cuLaunchKernel, (CUfunction, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, \
                     unsigned smem_bytes, CUstream, void** parameters, void** extra))                                                     \
  X(cuLaunchKernelEx, (const CUlaunchConfig*, CUfunction, void** parameters, void** extra))                                               \
  X(cuTensorMapEncodeTiled,                                                                                                               \
    (CUtensorMap*, int data_type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,      \
     const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion, int fill))                                           \
  X(cuStreamBeginCapture_v2, (CUstream, int mode))                                                                                        \
  X(cuStreamEndCapture, (CUstream, CUgraph*))                                                                                             \
  X(cuGraphInstantiateWithFlags, (CUgraphExec*, CUgraph, unsigned long long flags))                                                       \
  X(cuGraphLaunch, (CUgraphExec, CUstream))                                                                                               \
  X(cuGraphExecDestroy, (CUgraphExec))                                                                                                    \
  X(cuGraphDestroy, (CUgraph))                                                                                                            \
  X(cuUserObjectCreate, (CUuserObject*, void* argument, CUhostFn destroy, unsigned references, unsigned flags))                           \
  X(cuUserObjectRelease, (CUuserObject, unsigned references))                                                                             \
  X(cuGraphRetainUserObject, (CUgraph, CUuserObject, unsigned references, unsigned flags))

// Null in a driver that is too old for them, with what that takes away.
#define IMBREX_CUDA_OPTIONAL_DRIVER_API(X)                                                                                                \
  X(cuStreamGetCaptureInfo_v3, (CUstream, int* status, unsigned long long* id, CUgraph*, const CUgraphNode** dependencies,                \
                                const CUgraphEdgeData** edges, size_t* num_dependencies)) /* below 12.3: no capture_of() */            \
  X(cuStreamUpdateCaptureDependencies_v2, (CUstream, const CUgraphNode* dependencies, const CUgraphEdgeData* edges,                       \
                                           size_t num_dependencies, unsigned flags)) /* below 12.3: no GraphBranches */

#define IMBREX_NVRTC_API(X)                                                                                                               \
  X(nvrtcVersion, (int* major, int* minor))                                                                                               \
  X(nvrtcGetNumSupportedArchs, (int* count))                                                                                              \
  X(nvrtcGetSupportedArchs, (int* archs))                                                                                                 \
  X(nvrtcCreateProgram,                                                                                                                   \
    (nvrtcProgram*, const char* text, const char* name, int num_headers, const char* const* headers, const char* const* header_names))    \
  X(nvrtcCompileProgram, (nvrtcProgram, int num_options, const char* const* options))                                                     \
  X(nvrtcDestroyProgram, (nvrtcProgram*))                                                                                                 \
  X(nvrtcGetProgramLogSize, (nvrtcProgram, size_t* bytes))                                                                                \
  X(nvrtcGetProgramLog, (nvrtcProgram, char* text))                                                                                       \
  X(nvrtcGetCUBINSize, (nvrtcProgram, size_t* bytes))                                                                                     \
  X(nvrtcGetCUBIN, (nvrtcProgram, char* cubin))
// clang-format on

#define X(name, value, theirs) inline constexpr int name = value;
IMBREX_CUDA_CONSTANTS(X)
#undef X

// NOLINTBEGIN(bugprone-macro-parentheses): declarations cannot have them
struct DriverApi {
#define X(name, parameters) CUresult(*name) parameters = nullptr;
  IMBREX_CUDA_DRIVER_API(X)
  IMBREX_CUDA_OPTIONAL_DRIVER_API(X)
#undef X
};

struct NvrtcApi {
#define X(name, parameters) nvrtcResult(*name) parameters = nullptr;
  IMBREX_NVRTC_API(X)
#undef X
  int version = 0;  // 13000 for 13.0, as in the CUDA headers
};
// NOLINTEND(bugprone-macro-parentheses)

inline constexpr int kMinDriverVersion = 12000;  // what a driver must support: cuLibrary*, tensor maps
inline constexpr int kMinNvrtcVersion = 12000;

// A library that was opened, or the reason why it cannot be used. Never unloaded: other parts of the process may hold on to it.
template <class Api>
struct Loaded {
  std::unique_ptr<const Api> api;  // null: see `why`
  std::string why;
  std::string path;  // the name it was opened by
};
// Opens and initialises a library by its name or path, always anew: for driver() and nvrtc(), and for tests.
Loaded<DriverApi> load_driver(const std::string& name);
Loaded<NvrtcApi> load_nvrtc(const std::vector<std::string>& names);

// The initialised driver (no context is made), or null with the reason. Opened on first use: IMBREX_CUDA_DRIVER, else libcuda.so.1.
// CUDA does not survive fork(): in a child of the process that opened the driver it is null, so destructors ask for it and leave be what
// the parent owns.
const DriverApi* driver(std::string* why = nullptr);
// The table of NVRTC, opened once: IMBREX_CUDA_NVRTC, else by its usual names from the system's path, CUDA_HOME and /usr/local/cuda.
const NvrtcApi* nvrtc(std::string* why = nullptr);

const DriverApi& need_driver();  // Error cuda.driver_missing with the reason; cuda.forked in such a child
const NvrtcApi& need_nvrtc();    // Error cuda.nvrtc_missing

[[noreturn]] void fail_cuda(CUresult, std::string_view what);  // Error cuda.memory for a lack of memory, cuda.driver for all else
// Throws unless the call succeeded; the text says what was tried, "copy {} bytes to the device", and is only made when it failed.
template <class... Args>
void check_cuda(CUresult result, fmt::format_string<Args...> what, Args&&... args) {
  if (result != kCudaSuccess) [[unlikely]]
    fail_cuda(result, fmt::format(what, std::forward<Args>(args)...));
}

}  // namespace imbrex::cuda

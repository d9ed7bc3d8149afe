// Contexts, memory, modules and launches of the fake driver. One lock around each call: tests make them from several threads.
#include "cuda/fake/fake_objects.h"

#include <cstdlib>
#include <cstring>

namespace imbrex::cuda {

namespace fake {

State the_state;
std::mutex mutex;
unsigned long long next_id = 1;

namespace {
thread_local std::vector<CUcontext> stack;
}

CUcontext current() { return stack.empty() ? nullptr : stack.back(); }

CUresult failure() {
  constexpr CUresult kUnknown = 999;
  if (the_state.has_failed) return the_state.keeps_failing ? kUnknown : kCudaSuccess;
  if (the_state.calls_until_failure == 0 || --the_state.calls_until_failure > 0) return kCudaSuccess;
  return the_state.has_failed = true, kUnknown;
}

CUresult begin() {
  if (in_callback) return kNotPermitted;
  if (const CUresult result = failure(); result != 0) return result;
  if (the_state.fail_next != 0) return std::exchange(the_state.fail_next, 0);
  return current() ? kCudaSuccess : kCudaInvalidContext;
}

}  // namespace fake

using namespace fake;

namespace {

constexpr int kMaxDevices = 8;
struct Primary {
  CUcontext context = nullptr;
  int references = 0;
};
Primary primaries[kMaxDevices];

std::map<const char*, size_t> pinned;  // bytes of each

bool is_pinned(const void* data) {
  const auto next = pinned.upper_bound(static_cast<const char*>(data));
  if (next == pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(next);
  return static_cast<const char*>(data) < begin + bytes;
}

// Null for more than a test may touch.
void* allocate(size_t bytes) { return bytes > size_t(1) << 30 ? nullptr : std::malloc(bytes); }

CUresult record(CUfunction function, const CUlaunchConfig& c, void** params) {
  if (const CUresult result = begin(); result != 0) return result;
  fake::Launch launch{.entry = reinterpret_cast<CUkernel>(function)->name,
                      .module = reinterpret_cast<CUkernel>(function)->module,
                      .grid_x = c.grid_x,
                      .grid_y = c.grid_y,
                      .grid_z = c.grid_z,
                      .threads = c.block_x,
                      .smem_bytes = c.smem_bytes,
                      .cluster = 1,
                      .programmatic = false,
                      .stream = c.stream,
                      .context = current(),
                      .params = {},
                      .all_params = {}};
  for (unsigned i = 0; i < c.num_attributes; ++i) {
    const CUlaunchAttribute& a = c.attributes[i];
    if (a.id == kLaunchCluster) launch.cluster = a.value.cluster.x;
    if (a.id == kLaunchProgrammaticSerialization) launch.programmatic = a.value.programmatic_serialization != 0;
  }
  const auto bytes_of = [&](size_t i, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(params[i]);
    return std::vector<unsigned char>(bytes, bytes + size);
  };
  if (const auto sizes = the_state.param_sizes.find(launch.entry); sizes != the_state.param_sizes.end()) {
    for (size_t i = 0; i < sizes->second.size(); ++i) launch.all_params.push_back(bytes_of(i, sizes->second[i]));
  } else {
    launch.params = bytes_of(0, the_state.params_bytes);
  }
  if (c.stream == nullptr || c.stream->captured == nullptr) the_state.launches.push_back(launch);
  return enqueue(c.stream, [launch] {
    if (the_state.on_launch) the_state.on_launch(launch);
  });
}

}  // namespace

extern "C" {

fake::State* fake_driver_state() { return &the_state; }

CUresult cuInit(unsigned) { return the_state.init_result; }
CUresult cuDriverGetVersion(int* version) { return *version = the_state.version, kCudaSuccess; }
CUresult cuGetErrorName(CUresult result, const char** text) {
  *text = result == kCudaOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : result == kCudaNoDevice ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_OTHER";
  return kCudaSuccess;
}
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "a fake failure", kCudaSuccess; }

CUresult cuDeviceGetCount(int* count) { return *count = the_state.num_devices, kCudaSuccess; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= the_state.num_devices) return kCudaInvalidValue;
  return *device = ordinal, kCudaSuccess;
}
CUresult cuDeviceGetName(char* name, int capacity, CUdevice device) {
  std::snprintf(name, size_t(capacity), "Fake GPU %d", device);
  return kCudaSuccess;
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) { return *bytes = size_t(141) << 30, kCudaSuccess; }
CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  switch (attribute) {
    case kDeviceMajor: *value = 9; return kCudaSuccess;
    case kDeviceMinor: *value = 0; return kCudaSuccess;
    case kDeviceMultiprocessors: *value = 132; return kCudaSuccess;
    case kDeviceL2Bytes: *value = 60 << 20; return kCudaSuccess;
    case kDeviceSmemPerBlockOptIn: *value = 227 << 10; return kCudaSuccess;
    default: return kCudaInvalidValue;
  }
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  const std::lock_guard lock(mutex);
  Primary& p = primaries[device];
  if (p.references++ == 0) p.context = new CUctx_st{next_id++, device};
  ++the_state.contexts;
  return *context = p.context, kCudaSuccess;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  const std::lock_guard lock(mutex);
  Primary& p = primaries[device];
  if (p.references == 0) return kCudaInvalidContext;
  --the_state.contexts;
  if (--p.references == 0) delete std::exchange(p.context, nullptr);
  return kCudaSuccess;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  if (const CUresult result = failure(); result != 0) return result;
  return *context = current(), kCudaSuccess;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) {
  const std::lock_guard lock(mutex);
  if (const CUresult result = failure(); result != 0) return result;
  ++the_state.context_pushes;
  stack.push_back(context);
  return kCudaSuccess;
}
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (stack.empty()) return kCudaInvalidContext;
  *context = stack.back();
  stack.pop_back();
  return kCudaSuccess;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  if (!current()) return kCudaInvalidContext;
  return *device = current()->device, kCudaSuccess;
}
CUresult cuCtxGetId(CUcontext context, unsigned long long* id) { return *id = context->id, kCudaSuccess; }

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  return *free = the_state.free_bytes, *total = size_t(141) << 30, current() ? kCudaSuccess : kCudaInvalidContext;
}
CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  if (const CUresult result = unsafe(); result != 0) return result;
  const std::lock_guard lock(mutex);
  if (const CUresult result = begin(); result != 0) return result;
  *address = reinterpret_cast<CUdeviceptr>(allocate(bytes));
  if (*address == 0) return kCudaOutOfMemory;
  ++the_state.buffers;
  return std::memset(reinterpret_cast<void*>(*address), 0xff, bytes), kCudaSuccess;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
  if (const CUresult result = unsafe(); result != 0) return result;
  for (const CUstream stream : streams) drain(stream);
  const std::lock_guard lock(mutex);
  if (!current()) return kCudaInvalidContext;
  --the_state.buffers;
  return std::free(reinterpret_cast<void*>(address)), kCudaSuccess;
}
CUresult cuMemHostAlloc(void** data, size_t bytes, unsigned) {
  if (const CUresult result = unsafe(); result != 0) return result;
  const std::lock_guard lock(mutex);
  if (const CUresult result = begin(); result != 0) return result;
  *data = allocate(bytes);
  if (*data == nullptr) return kCudaOutOfMemory;
  ++the_state.pinned;
  pinned[static_cast<const char*>(*data)] = bytes;
  return std::memset(*data, 0xff, bytes), kCudaSuccess;
}
CUresult cuMemFreeHost(void* data) {
  if (const CUresult result = unsafe(); result != 0) return result;
  for (const CUstream stream : streams) drain(stream);
  const std::lock_guard lock(mutex);
  --the_state.pinned;
  pinned.erase(static_cast<const char*>(data));
  return std::free(data), kCudaSuccess;
}
// A copy from memory that is not pinned has taken its bytes when it returns; from pinned memory it takes them late.
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (const CUresult result = failure(); result != 0) return result;
  if (is_pinned(from)) return enqueue(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
  const std::string taken(static_cast<const char*>(from), bytes);
  return enqueue(stream, [to, taken] { std::memcpy(reinterpret_cast<void*>(to), taken.data(), taken.size()); });
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return enqueue(stream, [=] { std::memcpy(to, reinterpret_cast<const void*>(from), bytes); });
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return enqueue(stream, [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  if (const CUresult result = failure(); result != 0) return result;
  return enqueue(stream, [=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, int*, void**, unsigned, int*, void**, unsigned) {
  if (const CUresult result = unsafe(); result != 0) return result;
  const std::lock_guard lock(mutex);
  if (const CUresult result = begin(); result != 0) return result;
  *library = new CUlib_st{static_cast<const char*>(code), {}};
  return ++the_state.libraries, ++the_state.library_loads, kCudaSuccess;
}
CUresult cuLibraryUnload(CUlibrary library) {
  if (const CUresult result = unsafe(); result != 0) return result;
  const std::lock_guard lock(mutex);
  --the_state.libraries;
  return delete library, kCudaSuccess;
}
CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  const std::lock_guard lock(mutex);
  if (std::strcmp(name, "absent") == 0) return kCudaNotFound;
  library->kernels.push_back(std::make_unique<CUkern_st>(CUkern_st{name, library->code}));
  return *kernel = library->kernels.back().get(), kCudaSuccess;
}
CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  if (!current()) return kCudaInvalidContext;
  return *function = reinterpret_cast<CUfunction>(kernel), kCudaSuccess;
}
CUresult cuFuncGetAttribute(int* value, int attribute, CUfunction) {
  return *value = attribute == kFunctionRegisters ? 40 : 0, kCudaSuccess;
}
CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
  const std::lock_guard lock(mutex);
  if (attribute == kFunctionMaxDynamicSmem) the_state.max_dynamic_smem[reinterpret_cast<CUkernel>(function)->name] = value;
  return kCudaSuccess;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
  return *blocks = 2048 / threads, kCudaSuccess;
}

// Refuses what the real one refuses: of rows that are swizzled by 128 bytes, or half, or not at all.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int type, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                                const uint32_t* box, const uint32_t*, int, int swizzle, int, int) {
  fake::TensorMap made{.data = static_cast<char*>(address), .sizes = {}, .strides = {}, .rank = rank, .box = {}};
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0 || rank < 3 || rank > 5) return kCudaInvalidValue;
  const uint32_t width = box[0] * (type == kTensorMapU8 ? 1 : type == kTensorMapU32 ? 4 : 2);
  if (width % 16 != 0 || (swizzle == kTensorMapSwizzle128 && width > 128) || (swizzle == kTensorMapSwizzle64 && width > 64))
    return kCudaInvalidValue;
  for (uint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > uint64_t(1) << 32 || box[i] == 0 || box[i] > 256) return kCudaInvalidValue;
    made.sizes[i] = sizes[i], made.box[i] = box[i];
    if (i + 1 == rank) break;
    if (strides[i] % 16 != 0 || strides[i] >= uint64_t(1) << 40) return kCudaInvalidValue;
    made.strides[i] = strides[i];
  }
  static_assert(sizeof made <= sizeof *map);
  ++the_state.maps;
  return std::memcpy(map, &made, sizeof made), kCudaSuccess;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                        unsigned block_z, unsigned smem_bytes, CUstream stream, void** params, void**) {
  const std::lock_guard lock(mutex);
  return record(function, {grid_x, grid_y, grid_z, block_x, block_y, block_z, smem_bytes, stream, nullptr, 0}, params);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void**) {
  const std::lock_guard lock(mutex);
  return record(function, *config, params);
}

}  // extern "C"
}  // namespace imbrex::cuda

// Context, CurrentContext and RelaxedCapture.
#include "cuda/driver/context.h"

#include "core/check.h"

namespace imbrex::cuda {

std::shared_ptr<const Context> Context::of_device(int index) {
  const DriverApi& cu = need_driver();
  int count = 0;
  check_cuda(cu.cuDeviceGetCount(&count), "count the CUDA devices");
  check(index >= 0 && index < count, "cuda.device", "expected a CUDA device below {}, got cuda:{}", count, index);
  CUdevice wanted = 0, device = 0;
  check_cuda(cu.cuDeviceGet(&wanted, index), "get cuda:{}", index);
  const std::shared_ptr<Context> made(
      new Context(index));  // what could fail without an error of the driver's comes before what is retained
  check_cuda(cu.cuCtxGetCurrent(&made->context_), "get the current context");
  if (made->context_ == nullptr || cu.cuCtxGetDevice(&device) != kCudaSuccess || device != wanted) {
    check_cuda(cu.cuDevicePrimaryCtxRetain(&made->context_, wanted), "retain the primary context of cuda:{}", index);
    made->retained_ = true;
  }
  cu.cuCtxGetId(made->context_, &made->id_);
  return made;
}

Context::Context(int device) : device_(device) {}

Context::~Context() {
  CUdevice device = 0;
  const DriverApi* const cu = driver();
  if (retained_ && cu != nullptr && cu->cuDeviceGet(&device, device_) == kCudaSuccess) cu->cuDevicePrimaryCtxRelease_v2(device);
}

CurrentContext::CurrentContext(const Context& context) {
  const DriverApi& cu = need_driver();
  CUcontext current = nullptr;
  check_cuda(cu.cuCtxGetCurrent(&current), "get the current context");
  if (current == context.get()) return;
  check_cuda(cu.cuCtxPushCurrent_v2(context.get()), "make the context of cuda:{} current", context.device());
  pushed_ = true;
}

CurrentContext::CurrentContext(const Context& context, std::nothrow_t) noexcept {
  const DriverApi* const cu = driver();
  CUcontext current = nullptr;
  pushed_ = cu != nullptr && cu->cuCtxGetCurrent(&current) == kCudaSuccess && current != context.get() &&
            cu->cuCtxPushCurrent_v2(context.get()) == kCudaSuccess;
}

CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  const DriverApi* const cu = pushed_ ? driver() : nullptr;
  if (cu != nullptr) cu->cuCtxPopCurrent_v2(&popped);
}

RelaxedCapture::RelaxedCapture() noexcept : mode_(kCaptureRelaxed) {
  if (const DriverApi* const cu = driver()) cu->cuThreadExchangeStreamCaptureMode(&mode_);
}

RelaxedCapture::~RelaxedCapture() {
  if (const DriverApi* const cu = driver()) cu->cuThreadExchangeStreamCaptureMode(&mode_);
}

}  // namespace imbrex::cuda

// Device memory, pinned memory, streams, events and copies, through the driver's table.
#include "cuda/driver/memory.h"

namespace imbrex::cuda {

DeviceBuffer::DeviceBuffer(ContextPtr context, size_t bytes) : Owned(std::move(context)), bytes_(bytes) {
  if (bytes == 0) return;
  const CurrentContext current(*context_);
  const RelaxedCapture relaxed;
  check_cuda(need_driver().cuMemAlloc_v2(&handle_, bytes), "allocate {} bytes on cuda:{}", bytes, context_->device());
}

namespace {

template <class Fill>
DeviceBuffer filled(const ContextPtr& context, size_t bytes, Fill fill) {
  DeviceBuffer buffer(context, bytes);
  if (bytes == 0) return buffer;
  const CurrentContext current(*context);
  const OwnedStream stream(context);
  fill(buffer.address(), stream.get());
  stream.synchronize();
  return buffer;
}

}  // namespace

DeviceBuffer zeroed(const ContextPtr& context, size_t bytes) {
  return filled(context, bytes, [bytes](CUdeviceptr to, CUstream stream) { fill_bytes(to, 0, bytes, stream); });
}

DeviceBuffer copy_of(const ContextPtr& context, const void* from, size_t bytes) {
  return filled(context, bytes, [=](CUdeviceptr to, CUstream stream) { copy_to_device(to, from, bytes, stream); });
}

PinnedBuffer::PinnedBuffer(ContextPtr context, size_t bytes) : Owned(std::move(context)), bytes_(bytes) {
  if (bytes == 0) return;
  const CurrentContext current(*context_);
  const RelaxedCapture relaxed;
  check_cuda(need_driver().cuMemHostAlloc(&handle_, bytes, kHostPortable), "allocate {} bytes of pinned memory", bytes);
}

OwnedStream::OwnedStream(ContextPtr context) : Owned(std::move(context)) {
  const CurrentContext current(*context_);
  const RelaxedCapture relaxed;
  check_cuda(need_driver().cuStreamCreate(&handle_, kStreamNonBlocking), "create a stream");
}

void OwnedStream::synchronize() const { wait_for_stream(handle_); }

void wait_for_stream(CUstream stream) {
  const RelaxedCapture relaxed;
  check_cuda(need_driver().cuStreamSynchronize(stream), "wait for a stream");
}

Event::Event(ContextPtr context, bool timing) : Owned(std::move(context)) {
  const CurrentContext current(*context_);
  const RelaxedCapture relaxed;
  check_cuda(need_driver().cuEventCreate(&handle_, timing ? kEventDefault : kEventDisableTiming), "create an event");
}

void Event::record(CUstream stream) const { record_event(*context_, handle_, stream); }
bool Event::done() const { return is_done(handle_); }
void Event::synchronize() const { wait_for_event(handle_); }

void record_event(const Context& context, CUevent event, CUstream stream) {
  const CurrentContext current(context);  // the null stream is one of the current context
  check_cuda(need_driver().cuEventRecord(event, stream), "record an event");
}

bool is_done(CUevent event) {
  const RelaxedCapture relaxed;
  const CUresult result = need_driver().cuEventQuery(event);
  if (result != kCudaNotReady) check_cuda(result, "look at an event");
  return result == kCudaSuccess;
}

// Asking takes a tenth of a microsecond, waiting more than one even when there is nothing to wait for.
void wait_for_event(CUevent event) {
  if (is_done(event)) return;
  const RelaxedCapture relaxed;
  check_cuda(need_driver().cuEventSynchronize(event), "wait for an event");
}

float elapsed_ms(CUevent begin, CUevent end) {
  float ms = 0;
  check_cuda(need_driver().cuEventElapsedTime(&ms, begin, end), "time between two events");
  return ms;
}

void copy_to_device(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (bytes > 0) check_cuda(need_driver().cuMemcpyHtoDAsync_v2(to, from, bytes, stream), "copy {} bytes to the device", bytes);
}
void copy_to_host(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (bytes > 0) check_cuda(need_driver().cuMemcpyDtoHAsync_v2(to, from, bytes, stream), "copy {} bytes to the host", bytes);
}
void copy_on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (bytes > 0) check_cuda(need_driver().cuMemcpyDtoDAsync_v2(to, from, bytes, stream), "copy {} bytes on the device", bytes);
}
void fill_bytes(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  if (bytes > 0) check_cuda(need_driver().cuMemsetD8Async(to, value, bytes, stream), "fill {} bytes on the device", bytes);
}

bool is_captured(CUstream stream) {
  int status = kCaptureStatusNone;
  if (stream != nullptr) check_cuda(need_driver().cuStreamIsCapturing(stream, &status), "ask whether a stream is captured");
  return status != kCaptureStatusNone;
}

}  // namespace imbrex::cuda

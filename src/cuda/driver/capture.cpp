// imbrex/capture.h: the driver's captures, user objects of graphs, and events.
#include "imbrex/capture.h"

#include <atomic>

#include "core/check.h"
#include "cuda/driver/memory.h"

namespace imbrex {
namespace cuda {
namespace {

struct CaptureInfo {
  unsigned long long id = 0;  // 0: none
  CUgraph graph = nullptr;
};

CaptureInfo capture_info(CUstream stream) {
  const DriverApi& cu = need_driver();
  CaptureInfo info;
  int status = kCaptureStatusNone;
  check_cuda(cu.cuStreamIsCapturing(stream, &status), "ask whether a stream is captured");
  if (status == kCaptureStatusNone) return info;
  check(cu.cuStreamGetCaptureInfo_v3 != nullptr, "stream.capture",
        "expected an NVIDIA driver for CUDA 12.3 or newer, which numbers captures");
  check_cuda(cu.cuStreamGetCaptureInfo_v3(stream, &status, &info.id, &info.graph, nullptr, nullptr, nullptr), "ask what a stream captures");
  check(status == kCaptureStatusActive, "stream.capture", "expected a capture that goes on, got one that an error has ended");
  return info;
}

// The objects that graphs keep, and a list of those that they have dropped: threads of the driver add to it without locks or allocations.
struct Kept {
  std::shared_ptr<void> share;
  Kept* next = nullptr;
};
std::atomic<Kept*> let_go{nullptr};

void on_end_of_graph(void* argument) {
  auto* const kept = static_cast<Kept*>(argument);
  kept->next = let_go.load(std::memory_order_relaxed);
  while (!let_go.compare_exchange_weak(kept->next, kept, std::memory_order_release, std::memory_order_relaxed)) {
  }
}

}  // namespace
}  // namespace cuda

uint64_t capture_of(const Device& device, Stream stream) {
  if (device.type == DeviceType::cpu || stream == nullptr) return 0;  // the null stream cannot be captured
  return cuda::capture_info(cuda::cu_stream(stream)).id;
}

void keep_for_capture(const Device& device, Stream stream, std::shared_ptr<void> share) {
  using namespace cuda;
  const bool gpu = device.type == DeviceType::cuda && stream != nullptr;
  const CaptureInfo info = gpu ? capture_info(cu_stream(stream)) : CaptureInfo{};
  check(info.graph != nullptr, "stream.capture", "expected a stream that is captured, got one of {} that is not", device.str());
  const DriverApi& cu = need_driver();
  auto kept = std::make_unique<Kept>(Kept{std::move(share)});
  CUuserObject object = nullptr;
  check_cuda(cu.cuUserObjectCreate(&object, kept.get(), on_end_of_graph, 1, kUserObjectNoDestructorSync), "make an object of a graph");
  static_cast<void>(kept.release());  // on_end_of_graph() has it now
  const CUresult result = cu.cuGraphRetainUserObject(info.graph, object, 1, kGraphUserObjectMove);
  if (result != kCudaSuccess) cu.cuUserObjectRelease(object, 1);
  check_cuda(result, "give an object to a graph");
}

void release_captured() {
  using namespace cuda;
  if (let_go.load(std::memory_order_relaxed) == nullptr) return;
  for (const Kept* kept = let_go.exchange(nullptr, std::memory_order_acquire); kept != nullptr;) {
    const std::unique_ptr<const Kept> one(kept);
    kept = one->next;
  }
}

struct StreamOrder::LastUse {
  explicit LastUse(const Device& device) : context(cuda::Context::of_device(device.index)), end(context) {}
  cuda::ContextPtr context;
  cuda::Event end;
};

StreamOrder::StreamOrder(const Device& device) : last_(device.type == DeviceType::cuda ? std::make_unique<LastUse>(device) : nullptr) {}
StreamOrder::~StreamOrder() = default;

// Streams are not compared: the address of one that is gone may be that of a new one.
void StreamOrder::begin(Stream stream) const {
  if (!last_) return;
  const cuda::CurrentContext current(*last_->context);
  cuda::check_cuda(cuda::need_driver().cuStreamWaitEvent(cuda::cu_stream(stream), last_->end.get(), 0), "wait for another stream");
}

void StreamOrder::end(Stream stream) const {
  if (last_) last_->end.record(cuda::cu_stream(stream));
}

void StreamOrder::synchronize() const {
  if (last_) last_->end.synchronize();
}

}  // namespace imbrex

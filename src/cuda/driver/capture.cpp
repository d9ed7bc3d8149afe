// See capture.h; and release_captured() of imbrex/capture.h.
#include "cuda/driver/capture.h"

#include <atomic>

#include "core/check.h"
#include "cuda/driver/memory.h"
#include "imbrex/capture.h"

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

uint64_t capture_of(CUstream stream) { return capture_info(stream).id; }

void keep_for_capture(int device, CUstream stream, std::shared_ptr<void> share) {
  const CaptureInfo info = capture_info(stream);
  check(info.graph != nullptr, "stream.capture", "expected a stream that is captured, got one of cuda:{} that is not", device);
  const DriverApi& cu = need_driver();
  auto kept = std::make_unique<Kept>(Kept{std::move(share)});
  CUuserObject object = nullptr;
  check_cuda(cu.cuUserObjectCreate(&object, kept.get(), on_end_of_graph, 1, kUserObjectNoDestructorSync), "make an object of a graph");
  static_cast<void>(kept.release());  // on_end_of_graph() has it now
  const CUresult result = cu.cuGraphRetainUserObject(info.graph, object, 1, kGraphUserObjectMove);
  if (result != kCudaSuccess) cu.cuUserObjectRelease(object, 1);
  check_cuda(result, "give an object to a graph");
}

}  // namespace cuda

void release_captured() {
  using namespace cuda;
  if (let_go.load(std::memory_order_relaxed) == nullptr) return;
  for (const Kept* kept = let_go.exchange(nullptr, std::memory_order_acquire); kept != nullptr;) {
    const std::unique_ptr<const Kept> one(kept);
    kept = one->next;
  }
}

}  // namespace imbrex

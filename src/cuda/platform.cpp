// CUDA as a platform of devices: the driver's memory, streams, events and graphs.
#include "imbrex/device_platform.h"

#include <mutex>
#include <optional>

#include "attention/device_operations.h"
#include "cuda/driver/capture.h"
#include "cuda/driver/memory.h"
#include "cuda/ops/copy_blocks.h"
#include "cuda/ops/gather.h"
#include "cuda/ops/merge_results.h"
#include "cuda/plan/workspace.h"

namespace imbrex {
namespace cuda {
namespace {

inline CUresult destroy_graph(const DriverApi& cu, CUgraphExec graph) { return cu.cuGraphExecDestroy(graph); }

class Graph : public Owned<CUgraphExec, destroy_graph> {
 public:
  Graph(ContextPtr context, CUgraph captured) : Owned(std::move(context)) {
    const CUresult result = need_driver().cuGraphInstantiateWithFlags(&handle_, captured, 0);
    need_driver().cuGraphDestroy(captured);
    check_cuda(result, "make a graph of what was captured");
  }
};

// What an owner holds, for as long as somebody does.
template <class Owner>
std::shared_ptr<void> handle_of(std::shared_ptr<Owner> owner) {
  void* const handle = owner->get();
  return {std::move(owner), handle};
}
template <class Buffer>
std::shared_ptr<void> memory_of(std::shared_ptr<Buffer> buffer) {
  void* const data = buffer->template as<void>();
  return {std::move(buffer), data};
}

CUevent event_of(void* event) { return static_cast<CUevent>(event); }

class CudaDevice final : public OpenDevice {
 public:
  explicit CudaDevice(int index) : context_(Context::of_device(index)) {}
  Device device() const override { return {DeviceType::cuda, context_->device()}; }
  int64_t free_bytes() const override {
    const CurrentContext current(*context_);
    size_t free = 0, total = 0;
    check_cuda(need_driver().cuMemGetInfo_v2(&free, &total), "ask for the free memory of {}", device().str());
    return int64_t(free);
  }

  std::shared_ptr<void> allocate(int64_t bytes) const override {
    return memory_of(std::make_shared<DeviceBuffer>(context_, size_t(bytes)));
  }
  std::shared_ptr<void> allocate_host(int64_t bytes) const override {
    return memory_of(std::make_shared<PinnedBuffer>(context_, size_t(bytes)));
  }

  std::shared_ptr<void> make_stream() const override { return handle_of(std::make_shared<OwnedStream>(context_)); }
  void synchronize(Stream stream) const override {
    const CurrentContext current(*context_);
    wait_for_stream(cu_stream(stream));
  }
  void upload(void* to, const void* from, int64_t bytes, Stream stream) const override {
    const CurrentContext current(*context_);
    copy_to_device(device_address(to), from, size_t(bytes), cu_stream(stream));
  }
  void download(void* to, const void* from, int64_t bytes, Stream stream) const override {
    const CurrentContext current(*context_);
    copy_to_host(to, device_address(from), size_t(bytes), cu_stream(stream));
  }
  void copy(void* to, const void* from, int64_t bytes, Stream stream) const override {
    const CurrentContext current(*context_);
    copy_on_device(device_address(to), device_address(from), size_t(bytes), cu_stream(stream));
  }
  void fill(void* to, unsigned char value, int64_t bytes, Stream stream) const override {
    const CurrentContext current(*context_);
    fill_bytes(device_address(to), value, size_t(bytes), cu_stream(stream));
  }
  void gather(const TensorView& from, const TensorView& offsets, const TensorView& to, Stream stream) const override {
    const CurrentContext current(*context_);
    std::call_once(gather_once_, [&] { gather_.emplace(context_, arch_of(probe_cuda().at(size_t(context_->device())))); });
    gather_->run(from, offsets, to, cu_stream(stream));
  }

  std::shared_ptr<void> make_event(bool timed) const override { return handle_of(std::make_shared<Event>(context_, timed)); }
  void record(void* event, Stream stream) const override { record_event(*context_, event_of(event), cu_stream(stream)); }
  void wait(void* event, Stream stream) const override {
    const CurrentContext current(*context_);
    check_cuda(need_driver().cuStreamWaitEvent(cu_stream(stream), event_of(event), 0), "wait for another stream");
  }
  void synchronize_event(void* event) const override { wait_for_event(event_of(event)); }
  double seconds(void* begin, void* end) const override { return elapsed_ms(event_of(begin), event_of(end)) * 1e-3; }

  std::shared_ptr<void> capture(Stream stream, const std::function<void()>& launches) const override {
    const DriverApi& cu = need_driver();
    const CurrentContext current(*context_);
    check_cuda(cu.cuStreamBeginCapture_v2(cu_stream(stream), kCaptureThreadLocal), "begin to capture");
    CUgraph captured = nullptr;
    try {
      launches();
    } catch (...) {
      cu.cuStreamEndCapture(cu_stream(stream), &captured);
      if (captured != nullptr) cu.cuGraphDestroy(captured);
      throw;
    }
    check_cuda(cu.cuStreamEndCapture(cu_stream(stream), &captured), "end a capture");
    return handle_of(std::make_shared<Graph>(context_, captured));
  }
  void launch(void* graph, Stream stream) const override {
    const CurrentContext current(*context_);
    check_cuda(need_driver().cuGraphLaunch(static_cast<CUgraphExec>(graph), cu_stream(stream)), "launch a graph");
  }

  std::shared_ptr<Workspace> make_workspace() const override { return std::make_shared<CudaWorkspace>(context_); }
  std::shared_ptr<Workspace> make_workspace(void* memory, int64_t bytes) const override {
    return std::make_shared<CudaWorkspace>(context_, memory, bytes);
  }

 private:
  ContextPtr context_;
  mutable std::once_flag gather_once_;  // loaded when it is first needed
  mutable std::optional<Gather> gather_;
};

class CudaPlatform final : public DevicePlatform, public DeviceOperations {
 public:
  std::string_view name() const override { return "cuda"; }
  std::vector<DeviceInfo> devices(std::string* why) const override { return probe_cuda(why); }
  OpenDevicePtr open(const Device& device) const override { return std::make_shared<CudaDevice>(device.index); }

  bool is_captured(const Device&, Stream stream) const override { return cuda::is_captured(cu_stream(stream)); }
  uint64_t capture_of(const Device&, Stream stream) const override { return cuda::capture_of(cu_stream(stream)); }
  void keep_for_capture(const Device& device, Stream stream, std::shared_ptr<void> share) const override {
    cuda::keep_for_capture(device.index, cu_stream(stream), std::move(share));
  }

  std::unique_ptr<BlockCopier> block_copier(const DeviceInfo& device) const override {
    return std::make_unique<CopyBlocks>(Context::of_device(device.device.index), arch_of(device));
  }
  std::unique_ptr<PartialMerger> partial_merger(const DeviceInfo& device) const override {
    return std::make_unique<MergeResults>(Context::of_device(device.device.index), arch_of(device));
  }
};

}  // namespace
}  // namespace cuda

std::shared_ptr<const DevicePlatform> cuda_platform() {
  static const auto* const platform = new std::shared_ptr<const DevicePlatform>(std::make_shared<cuda::CudaPlatform>());
  return *platform;
}

}  // namespace imbrex

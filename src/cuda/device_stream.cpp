// DeviceStream on an NVIDIA GPU: the driver's stream, memory, events and graphs.
#include "imbrex/device_stream.h"

#include <optional>
#include <vector>

#include "core/check.h"
#include "core/gather.h"
#include "cuda/driver/memory.h"
#include "cuda/ops/gather.h"

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

class CudaStream final : public DeviceStream {
 public:
  explicit CudaStream(const DeviceInfo& device)
      : arch_(arch_of(device)), context_(Context::of_device(device.device.index)), stream_(context_) {}
  Device device() const override { return {DeviceType::cuda, context_->device()}; }
  Stream get() const override { return stream_.get(); }
  bool asynchronous() const override { return true; }
  int64_t free_bytes() const override {
    const CurrentContext current(*context_);
    size_t free = 0, total = 0;
    check_cuda(need_driver().cuMemGetInfo_v2(&free, &total), "ask for the free memory of {}", device().str());
    return int64_t(free);
  }
  void synchronize() const override { stream_.synchronize(); }

  std::shared_ptr<void> allocate(int64_t bytes) const override {
    auto buffer = std::make_shared<DeviceBuffer>(context_, size_t(bytes));
    void* const data = buffer->as<void>();
    return {std::move(buffer), data};
  }
  std::shared_ptr<void> allocate_host(int64_t bytes) const override {
    auto buffer = std::make_shared<PinnedBuffer>(context_, size_t(bytes));
    void* const data = buffer->as<void>();
    return {std::move(buffer), data};
  }
  void upload(void* to, const void* from, int64_t bytes) const override {
    const CurrentContext current(*context_);
    copy_to_device(device_address(to), from, size_t(bytes), stream_.get());
  }
  void download(void* to, const void* from, int64_t bytes) const override {
    const CurrentContext current(*context_);
    copy_to_host(to, device_address(from), size_t(bytes), stream_.get());
  }
  void fill(void* to, unsigned char value, int64_t bytes) const override {
    const CurrentContext current(*context_);
    fill_bytes(device_address(to), value, size_t(bytes), stream_.get());
  }
  void gather(const TensorView& from, const TensorView& offsets, const TensorView& to) const override {
    check_gather(device(), from, offsets, to);
    const CurrentContext current(*context_);
    if (!gather_) gather_.emplace(context_, arch_);
    gather_->run(from, offsets, to, stream_.get());
  }

  void mark(size_t number) override {
    while (marks_.size() <= number) marks_.emplace_back(context_, true);
    marks_[number].record(stream_.get());
  }
  double seconds(size_t from, size_t to) const override {
    marks_.at(to).synchronize();
    return elapsed_ms(marks_.at(from), marks_.at(to)) * 1e-3;
  }

  DeviceGraph capture(const std::function<void()>& launches) const override {
    const DriverApi& cu = need_driver();
    const CurrentContext current(*context_);
    check_cuda(cu.cuStreamBeginCapture_v2(stream_.get(), kCaptureThreadLocal), "begin to capture");
    CUgraph captured = nullptr;
    try {
      launches();
    } catch (...) {
      cu.cuStreamEndCapture(stream_.get(), &captured);
      if (captured != nullptr) cu.cuGraphDestroy(captured);
      throw;
    }
    check_cuda(cu.cuStreamEndCapture(stream_.get(), &captured), "end a capture");
    return std::make_shared<Graph>(context_, captured);
  }
  void replay(const DeviceGraph& graph) const override {
    const CurrentContext current(*context_);
    check_cuda(need_driver().cuGraphLaunch(static_cast<const Graph*>(graph.get())->get(), stream_.get()), "launch a graph");
  }

 private:
  std::string arch_;
  ContextPtr context_;
  OwnedStream stream_;
  std::vector<Event> marks_;
  mutable std::optional<Gather> gather_;  // loaded when it is first needed
};

}  // namespace
}  // namespace cuda

std::unique_ptr<DeviceStream> open_cuda_stream(const DeviceInfo& device) { return std::make_unique<cuda::CudaStream>(device); }

}  // namespace imbrex

// See open_device.h.
#include "cuda/driver/open_device.h"

namespace imbrex::cuda {
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

}  // namespace

Device ContextDevice::device() const { return {DeviceType::cuda, context_->device()}; }
int64_t ContextDevice::free_bytes() const {
  const CurrentContext current(*context_);
  size_t free = 0, total = 0;
  check_cuda(need_driver().cuMemGetInfo_v2(&free, &total), "ask for the free memory of {}", device().str());
  return int64_t(free);
}

std::shared_ptr<void> ContextDevice::allocate(int64_t bytes) const {
  return memory_of(std::make_shared<DeviceBuffer>(context_, size_t(bytes)));
}
std::shared_ptr<void> ContextDevice::allocate_host(int64_t bytes) const {
  return memory_of(std::make_shared<PinnedBuffer>(context_, size_t(bytes)));
}

std::shared_ptr<void> ContextDevice::make_stream() const { return handle_of(std::make_shared<OwnedStream>(context_)); }
void ContextDevice::synchronize(Stream stream) const {
  const CurrentContext current(*context_);
  wait_for_stream(cu_stream(stream));
}
void ContextDevice::upload(void* to, const void* from, int64_t bytes, Stream stream) const {
  const CurrentContext current(*context_);
  copy_to_device(device_address(to), from, size_t(bytes), cu_stream(stream));
}
void ContextDevice::download(void* to, const void* from, int64_t bytes, Stream stream) const {
  const CurrentContext current(*context_);
  copy_to_host(to, device_address(from), size_t(bytes), cu_stream(stream));
}
void ContextDevice::copy(void* to, const void* from, int64_t bytes, Stream stream) const {
  const CurrentContext current(*context_);
  copy_on_device(device_address(to), device_address(from), size_t(bytes), cu_stream(stream));
}
void ContextDevice::fill(void* to, unsigned char value, int64_t bytes, Stream stream) const {
  const CurrentContext current(*context_);
  fill_bytes(device_address(to), value, size_t(bytes), cu_stream(stream));
}
std::shared_ptr<void> ContextDevice::make_event(bool timed) const { return handle_of(std::make_shared<Event>(context_, timed)); }
void ContextDevice::record(void* event, Stream stream) const { record_event(*context_, event_of(event), cu_stream(stream)); }
void ContextDevice::wait(void* event, Stream stream) const {
  const CurrentContext current(*context_);
  check_cuda(need_driver().cuStreamWaitEvent(cu_stream(stream), event_of(event), 0), "wait for another stream");
}
void ContextDevice::synchronize_event(void* event) const { wait_for_event(event_of(event)); }
double ContextDevice::seconds(void* begin, void* end) const { return elapsed_ms(event_of(begin), event_of(end)) * 1e-3; }

std::shared_ptr<void> ContextDevice::capture(Stream stream, const std::function<void()>& launches) const {
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
void ContextDevice::launch(void* graph, Stream stream) const {
  const CurrentContext current(*context_);
  check_cuda(need_driver().cuGraphLaunch(static_cast<CUgraphExec>(graph), cu_stream(stream)), "launch a graph");
}

}  // namespace imbrex::cuda

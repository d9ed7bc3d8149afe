// Streams, captures, graphs and events of the fake driver.
#include <algorithm>

#include "cuda/fake/fake_objects.h"

namespace imbrex::cuda {
namespace fake {

std::set<CUstream> streams;
thread_local bool in_callback = false;

namespace {

std::set<CUgraph> captures;  // that go on
thread_local int thread_mode = kCaptureGlobal;

// The work of a graph in an order that its dependencies allow: the last of what may be next, so that work which depends on too little comes
// too early.
std::vector<std::function<void()>> in_an_order(const CUgraph_st& graph) {
  std::vector<std::function<void()>> order;
  std::set<const CUgraphNode_st*> done;
  const auto may_be_next = [&](const CUgraphNode_st& node) {
    return !done.contains(&node) && std::ranges::all_of(node.in_front, [&](CUgraphNode one) { return done.contains(one); });
  };
  while (order.size() < graph.nodes.size()) {
    const auto next = std::find_if(graph.nodes.rbegin(), graph.nodes.rend(), may_be_next);
    done.insert(&*next);
    order.push_back(next->work);
  }
  return order;
}

}  // namespace

CUresult unsafe() {
  if (in_callback) return kNotPermitted;
  const std::lock_guard lock(mutex);
  CUresult result = kCudaSuccess;
  for (const CUgraph graph : captures) {
    const bool own = graph->thread == std::this_thread::get_id();
    if (thread_mode == kCaptureRelaxed || graph->mode == kCaptureRelaxed) continue;
    if (!own && (thread_mode != kCaptureGlobal || graph->mode != kCaptureGlobal)) continue;
    graph->invalid = true;
    result = kCaptureUnsupported;
  }
  return result;
}

CUresult check_implicit(CUstream stream) {
  if (stream != nullptr) return kCudaSuccess;
  for (const CUstream one : streams)
    if (one->blocking && one->captured != nullptr) return one->captured->invalid = true, kCaptureImplicit;
  return kCudaSuccess;
}

void drain(CUstream stream) {
  while (streams.count(stream) > 0 && !stream->work.empty()) {
    const auto work = std::move(stream->work.front());
    stream->work.pop_front();
    work();
  }
}

}  // namespace fake

using namespace fake;

extern "C" {

CUresult cuGraphDestroy(CUgraph);

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  const std::lock_guard lock(mutex);
  if (const CUresult result = begin(); result != 0) return result;
  ++the_state.streams;
  *stream = new CUstream_st{.context = current(), .blocking = flags == kStreamDefault, .work = {}};
  return streams.insert(*stream), kCudaSuccess;
}
CUresult cuStreamDestroy_v2(CUstream stream) {
  drain(stream);
  const std::lock_guard lock(mutex);
  --the_state.streams;
  streams.erase(stream);
  return delete stream, kCudaSuccess;
}
CUresult cuStreamSynchronize(CUstream stream) {
  if (const CUresult result = failure(); result != 0) return result;
  if (const CUresult result = unsafe(); result != 0) return result;
  if (const CUresult result = check_implicit(stream); result != 0) return result;
  if (stream != nullptr && stream->captured != nullptr) return kCaptureUnsupported;
  ++the_state.waits;
  return drain(stream), kCudaSuccess;
}

CUresult cuStreamIsCapturing(CUstream stream, int* status) {
  if (const CUresult result = failure(); result != 0) return result;
  const CUgraph graph = stream == nullptr ? nullptr : stream->captured;
  return *status = graph == nullptr ? kCaptureStatusNone : graph->invalid ? 2 : kCaptureStatusActive, kCudaSuccess;
}
CUresult cuStreamGetCaptureInfo_v3(CUstream stream, int* status, unsigned long long* id, CUgraph* graph, const CUgraphNode** nodes,
                                   const CUgraphEdgeData** edges, size_t* count) {
  if (const CUresult result = cuStreamIsCapturing(stream, status); result != 0) return result;
  if (*status != kCaptureStatusActive) return kCudaSuccess;
  *id = stream->captured->capture, *graph = stream->captured;
  if (nodes == nullptr) return kCudaSuccess;
  stream->edges.resize(stream->in_front.size());
  return *nodes = stream->in_front.data(), *edges = stream->edges.data(), *count = stream->in_front.size(), kCudaSuccess;
}
CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream, const CUgraphNode* nodes, const CUgraphEdgeData*, size_t count,
                                              unsigned flags) {
  if (const CUresult result = failure(); result != 0) return result;
  if (stream->captured == nullptr || stream->captured->invalid || flags != kSetCaptureDependencies) return kCudaInvalidValue;
  return stream->in_front.assign(nodes, nodes + count), kCudaSuccess;
}
CUresult cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, thread_mode), kCudaSuccess; }
CUresult cuStreamBeginCapture_v2(CUstream stream, int mode) {
  const std::lock_guard lock(mutex);
  stream->captured = new CUgraph_st{.capture = next_id++, .mode = mode, .thread = std::this_thread::get_id(), .nodes = {}, .objects = {}};
  stream->in_front.clear();
  return captures.insert(stream->captured), kCudaSuccess;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  {
    const std::lock_guard lock(mutex);
    *graph = stream->captured;
    captures.erase(*graph);
    for (const CUstream one : streams)
      if (one->captured == *graph) one->captured = nullptr;
  }
  if (!(*graph)->invalid) return kCudaSuccess;
  cuGraphDestroy(std::exchange(*graph, nullptr));
  return kCaptureInvalidated;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long) {
  return *exec = new CUgraphExec_st{in_an_order(*graph), graph->objects}, kCudaSuccess;
}
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) {
  return enqueue(stream, [works = exec->work] {
    for (const auto& work : works) work();
  });
}
CUresult cuGraphDestroy(CUgraph graph) { return delete graph, kCudaSuccess; }
CUresult cuGraphExecDestroy(CUgraphExec exec) { return delete exec, kCudaSuccess; }

// The graphs share it. The last one to go has it destroyed, by a thread in which nothing of the driver works.
CUresult cuUserObjectCreate(CUuserObject* object, void* argument, CUhostFn destroy, unsigned, unsigned flags) {
  if (flags != kUserObjectNoDestructorSync) return kCudaInvalidValue;
  ++the_state.user_objects;
  return *object = new CUuserObject_st{destroy, argument}, kCudaSuccess;
}
CUresult cuUserObjectRelease(CUuserObject object, unsigned) {
  const auto destroy = [object] { in_callback = true, object->destroy(object->argument); };
  std::thread(destroy).join();
  --the_state.user_objects;
  return delete object, kCudaSuccess;
}
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned, unsigned flags) {
  if (const CUresult result = begin(); result != 0) return result;
  if (flags != kGraphUserObjectMove) return kCudaInvalidValue;
  graph->objects.emplace_back(object, [](CUuserObject one) { cuUserObjectRelease(one, 1); });
  return kCudaSuccess;
}

CUresult cuEventCreate(CUevent* event, unsigned) {
  const std::lock_guard lock(mutex);
  if (const CUresult result = begin(); result != 0) return result;
  ++the_state.events;
  *event = new CUevent_st;
  return (*event)->point = std::make_shared<CUevent_st::Point>(CUevent_st::Point{nullptr, true}), kCudaSuccess;
}
CUresult cuEventDestroy_v2(CUevent event) {
  drain(event->point->stream);
  const std::lock_guard lock(mutex);
  --the_state.events;
  return delete event, kCudaSuccess;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  if (const CUresult result = failure(); result != 0) return result;
  if (!current()) return kCudaInvalidContext;
  if (event->point.use_count() > 1) event->point = std::make_shared<CUevent_st::Point>();  // somebody still looks at the last record
  *event->point = {stream};
  if (stream != nullptr && stream->captured != nullptr) {
    event->point->captured = stream->captured, event->point->in_front = stream->in_front;
    return kCudaSuccess;
  }
  return enqueue(stream, [point = event->point] { point->done = true; });
}
// A stream that waits for an event of a capture joins that capture.
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  if (const CUresult result = failure(); result != 0) return result;
  if (!current()) return kCudaInvalidContext;
  ++the_state.stream_waits;
  if (const CUgraph graph = event->point->captured; graph != nullptr) {
    if (std::exchange(stream->captured, graph) != graph) stream->in_front.clear();
    stream->in_front.insert(stream->in_front.end(), event->point->in_front.begin(), event->point->in_front.end());
    return kCudaSuccess;
  }
  if (stream != nullptr && stream->captured != nullptr) return stream->captured->invalid = true, kCaptureIsolation;
  return enqueue(stream, [point = event->point] {
    if (!point->done) drain(point->stream);
  });
}
CUresult cuEventQuery(CUevent event) {
  if (const CUresult result = failure(); result != 0) return result;
  if (const CUresult result = unsafe(); result != 0) return result;
  if (event->point->captured != nullptr) return kCaptureUnsupported;
  return event->point->done ? kCudaSuccess : kCudaNotReady;
}
CUresult cuEventSynchronize(CUevent event) {
  if (const CUresult result = failure(); result != 0) return result;
  if (const CUresult result = unsafe(); result != 0) return result;
  if (event->point->captured != nullptr) return kCaptureUnsupported;
  ++the_state.waits;
  return drain(event->point->stream), kCudaSuccess;
}
CUresult cuEventElapsedTime(float* ms, CUevent begin, CUevent end) {
  return *ms = 1.5f, begin->point->done && end->point->done ? kCudaSuccess : kCudaNotReady;
}

}  // extern "C"
}  // namespace imbrex::cuda

#pragma once
// The state that the parts of the fake driver share: the objects that its handles point to, the streams, and the captures under way.
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "cuda/fake/fake_driver.h"

namespace imbrex::cuda {

// The objects that the driver's handles point to.
struct CUctx_st {
  unsigned long long id;
  CUdevice device;
};
struct CUstream_st {
  CUcontext context;
  bool blocking = false;                 // the null stream and this one wait for each other
  CUgraph captured = nullptr;            // what the stream's calls are added to
  std::vector<CUgraphNode> in_front{};   // of what would be captured now
  std::vector<CUgraphEdgeData> edges{};  // likewise
  std::deque<std::function<void()>> work;
};
struct CUuserObject_st {
  CUhostFn destroy;
  void* argument;
};
using Objects = std::vector<std::shared_ptr<CUuserObject_st>>;
struct CUgraphNode_st {
  std::function<void()> work;
  std::vector<CUgraphNode> in_front;
};
struct CUgraph_st {
  unsigned long long capture;
  int mode;
  std::thread::id thread;
  bool invalid = false;
  std::deque<CUgraphNode_st> nodes;
  Objects objects;
};
struct CUgraphExec_st {
  std::vector<std::function<void()>> work;
  Objects objects;
};
struct CUevent_st {
  struct Point {  // what one record() stands for
    CUstream stream;
    bool done = false;
    CUgraph captured = nullptr;
    std::vector<CUgraphNode> in_front{};
  };
  std::shared_ptr<Point> point;
};
struct CUlib_st {
  std::string code;
  std::vector<std::unique_ptr<struct CUkern_st>> kernels;
};
struct CUkern_st {
  std::string name, module;
};

namespace fake {

extern State the_state;
extern std::mutex mutex;
extern unsigned long long next_id;  // of contexts and captures
extern std::set<CUstream> streams;
extern thread_local bool in_callback;  // of a graph that has ended: nothing of the driver works there

CUcontext current();
// What a call that a step makes returns at first: an error when the test wants this call to fail.
CUresult failure();
// What a call that makes something returns at first: an error when the test wants it to fail, or when there is no context.
CUresult begin();

// Captures. A call that could get into the way of one fails, and breaks it, unless the calling thread has said that it knows.
constexpr CUresult kNotPermitted = 800, kCaptureUnsupported = 900, kCaptureInvalidated = 901, kCaptureIsolation = 905,
                   kCaptureImplicit = 906;
CUresult unsafe();
// Work of the null stream waits for every blocking stream; that is an error while one of these is captured.
CUresult check_implicit(CUstream);

// Gives work to a stream. It is done, in order, when the host waits for the stream; the null stream does it at once, and a graph when it is
// launched.
template <class Work>
CUresult enqueue(CUstream stream, Work work) {
  if (const CUresult result = check_implicit(stream); result != 0) return result;
  if (stream == nullptr) return work(), kCudaSuccess;
  if (stream->captured == nullptr) return stream->work.emplace_back(std::move(work)), kCudaSuccess;
  if (stream->captured->invalid) return kCaptureInvalidated;
  CUgraphNode_st& node = stream->captured->nodes.emplace_back(CUgraphNode_st{std::move(work), stream->in_front});
  return stream->in_front = {&node}, kCudaSuccess;
}

void drain(CUstream);

}  // namespace fake
}  // namespace imbrex::cuda

#pragma once
// A graph of what is launched on a stream while it is captured.
#include "cuda/driver/driver.h"
#include "cuda/driver/memory.h"

namespace imbrex::cuda::test {

class Graph {
 public:
  // The context must be current here and below.
  template <class Launch>
  Graph(CUstream stream, const Launch& launch) : stream_(stream) {
    const DriverApi& cu = need_driver();
    check_cuda(cu.cuStreamBeginCapture_v2(stream, kCaptureThreadLocal), "capture");
    launch();
    check_cuda(cu.cuStreamEndCapture(stream, &graph_), "end the capture");
    check_cuda(cu.cuGraphInstantiateWithFlags(&exec_, graph_, 0), "instantiate");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    need_driver().cuGraphExecDestroy(exec_);
    need_driver().cuGraphDestroy(graph_);
  }
  void replay() const { check_cuda(need_driver().cuGraphLaunch(exec_, stream_), "replay"); }

 private:
  CUstream stream_;
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;
};

}  // namespace imbrex::cuda::test

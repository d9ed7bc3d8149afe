#pragma once
// Branches of a graph that a stream is captured into, which the launches of Plan::run() are (cuda/plan/plan_run.cpp).
#include <vector>

#include "cuda/driver/driver.h"

namespace imbrex::cuda {

// Launches of a graph that wait for the same work in front of them, and not for each other; what comes behind join() waits for all of them.
// The first branch begins soonest: work of another one takes 1 to 3.5 us longer on an H200, and a branch that is idle costs little
// (docs/kernels/cuda_sm90_latent.md). With a driver that cannot (below CUDA 12.3) they follow each other.
class GraphBranches {
 public:
  explicit GraphBranches(CUstream);  // which is captured
  ~GraphBranches();                  // joins what an exception left, where the capture goes on
  GraphBranches(const GraphBranches&) = delete;
  GraphBranches& operator=(const GraphBranches&) = delete;
  void next();  // what is launched now begins a branch
  void join();

 private:
  struct Dependencies {
    std::vector<CUgraphNode> nodes;
    std::vector<CUgraphEdgeData> edges;
  };
  Dependencies dependencies() const;  // of what would be launched now
  void set(const Dependencies&) const;
  void end_branch();

  const CUstream stream_;
  const bool can_;
  bool in_branch_ = false;
  Dependencies in_front_, ends_;
};

}  // namespace imbrex::cuda

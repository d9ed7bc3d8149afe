// See graph_branches.h.
#include "cuda/driver/graph_branches.h"

namespace imbrex::cuda {

GraphBranches::GraphBranches(CUstream stream)
    : stream_(stream),
      can_(need_driver().cuStreamGetCaptureInfo_v3 != nullptr && need_driver().cuStreamUpdateCaptureDependencies_v2 != nullptr) {
  if (can_) in_front_ = dependencies();
}

GraphBranches::~GraphBranches() {
  try {
    join();
  } catch (const Error&) {  // of a capture that is broken: nothing can be joined
  }
}

void GraphBranches::next() {
  if (!can_) return;
  if (in_branch_) end_branch(), set(in_front_);
  in_branch_ = true;
}

void GraphBranches::join() {
  if (in_branch_) end_branch();
  if (ends_.nodes.empty()) return;
  set(ends_);
  ends_ = {};
}

GraphBranches::Dependencies GraphBranches::dependencies() const {
  int status = kCaptureStatusNone;
  unsigned long long id = 0;
  CUgraph graph = nullptr;
  const CUgraphNode* nodes = nullptr;
  const CUgraphEdgeData* edges = nullptr;
  size_t count = 0;
  check_cuda(need_driver().cuStreamGetCaptureInfo_v3(stream_, &status, &id, &graph, &nodes, &edges, &count),
             "ask what a captured launch depends on");
  Dependencies all{{nodes, nodes + count}, std::vector<CUgraphEdgeData>(count)};
  if (edges != nullptr) all.edges.assign(edges, edges + count);
  return all;
}

void GraphBranches::set(const Dependencies& all) const {
  check_cuda(need_driver().cuStreamUpdateCaptureDependencies_v2(stream_, all.nodes.data(), all.edges.data(), all.nodes.size(),
                                                                kSetCaptureDependencies),
             "say what a captured launch depends on");
}

void GraphBranches::end_branch() {
  const Dependencies end = dependencies();
  ends_.nodes.insert(ends_.nodes.end(), end.nodes.begin(), end.nodes.end());
  ends_.edges.insert(ends_.edges.end(), end.edges.begin(), end.edges.end());
  in_branch_ = false;
}

}  // namespace imbrex::cuda

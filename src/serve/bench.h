#pragma once
// Times one attention spec on one batch: shuffled pages, random data, a check against the reference first. On a CPU runs are repeated until
// the median is known; on a GPU for a fixed time, because its clock settles under load, and short calls go into one graph.
// Used by `imbrex bench`.
#include <cstdint>
#include <string>
#include <vector>

#include "imbrex/attention.h"
#include "serve/bench_common.h"

namespace imbrex::serve {

// How calls reach a GPU; on a CPU nothing differs.
enum class BenchLaunch : uint8_t {
  by_queries,  // from a graph where no request has more than 16 of them
  eager,       // one after the other
  graph        // some in a graph
};

// The useful work of a batch, which does not depend on the backend.
struct Work {
  double kv_bytes = 0;  // keys and values that some query sees, each once
  double flops = 0;     // useful ones: 2 * (head_dim_qk + head_dim_v) per q head and visible key
};
Work work_of(const AttentionSpec&, const std::vector<BenchRequest>&);

struct BenchOptions : TimingOptions {
  uint64_t seed = 1;
  int kv_copies = 0;    // caches to rotate over, as the layers of a model do; 0: one on a CPU, so many that keys are not in L2 on a GPU
  int common_keys = 0;  // that all requests begin with, in the same blocks: those of a prompt, as far as whole blocks of their contexts go
  bool packed_mask = false;  // a custom mask has a bit for each query and key (Batch::packed_mask) instead of a byte
  bool balanced = false;     // lists follow the load (PlanOptions::balanced)
  std::string kv_order;      // of a strided cache, as KvAllocation has it; empty: its default
  bool check = true;         // compare sampled outputs with the reference first
  BenchLaunch launch = BenchLaunch::by_queries;
  ParallelFor threads;
};

// Whether calls on a GPU are part of a graph, for batches of at most so many queries a request.
bool goes_into_graph(const BenchOptions&, int max_query_len);

struct BenchResult : Work, Timing {
  double plan_s = 0;         // AttentionPlan::update, best
  int64_t cache_bytes = 0;   // of one copy
  int kv_copies = 0;         // that were rotated over
  bool captured = false;     // calls were part of a graph
  double check_error = 0;    // largest error of the sampled outputs
  double check_allowed = 0;  // and what the tolerance rule allows; 0: not checked
  std::string plan;          // AttentionPlan::str()
};

// Error bench.check when a sampled output is wrong (nothing is timed then), otherwise what validation, planning and memory throw.
BenchResult bench(const BackendOf<AttentionFamily>&, const AttentionSpec&, const DeviceInfo&, const std::vector<BenchRequest>&,
                  const BenchOptions&);

Share share_of(const BenchResult&, const BackendOf<AttentionFamily>&, const AttentionSpec&, const Ceilings&, const DeviceInfo&);

}  // namespace imbrex::serve

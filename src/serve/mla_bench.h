#pragma once
// Times latent attention on one batch: pages in shuffled order, random data, a check against the reference first. Used by `imbrex bench`.
#include <cstdint>
#include <string>
#include <vector>

#include "imbrex/mla.h"
#include "serve/bench_common.h"

namespace imbrex::serve {

// The useful work of a batch, which does not depend on the backend.
struct MlaWork {
  double kv_bytes = 0;      // latents that some query sees, each once
  double weight_bytes = 0;  // of kv_b_proj
  double flops = 0;         // of each request in the one of the two ways that has fewer: attention, and the products with the weight
};
MlaWork work_of(const MlaSpec&, const std::vector<BenchRequest>&);

struct MlaBenchOptions : TimingOptions {
  uint64_t seed = 1;
  int copies = 0;  // caches and weights to rotate over, as the layers of a model do; 0: one on a CPU, so many that none is in L2 on a GPU
  int common_keys = 0;    // as in BenchOptions
  bool balanced = false;  // likewise
  bool check = true;      // compare a few queries of single heads with the reference first
  ParallelFor threads;
};

struct MlaBenchResult : MlaWork, Timing {
  double plan_s = 0;         // MlaPlan::update, best
  int64_t copy_bytes = 0;    // of one cache and weight
  int copies = 0;            // that were rotated over
  bool captured = false;     // calls were part of a graph
  double check_error = 0;    // largest error of the sampled outputs
  double check_allowed = 0;  // and what the tolerance rule allows; 0: not checked
  std::string plan;          // MlaPlan::str(): which way the largest request takes, and why
};

// Error bench.check when a sampled output is wrong (nothing is timed then), bench.mla.mask for masks that need more than lengths,
// bench.mla.dims for a check of dimensions that cases cannot have, otherwise
// what validation, planning and memory throw.
MlaBenchResult bench(const BackendOf<MlaFamily>&, const MlaSpec&, const DeviceInfo&, const std::vector<BenchRequest>&,
                     const MlaBenchOptions&);

Share share_of(const MlaBenchResult&, const BackendOf<MlaFamily>&, const MlaSpec&, const Ceilings&, const DeviceInfo&);

}  // namespace imbrex::serve

#pragma once
// Times recurrent layers on one batch: states in shuffled slots, random data, a check against a recurrence in double precision first. Used
// by `imbrex bench`.
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/recurrent.h"
#include "serve/bench_common.h"

namespace imbrex::serve {

// The recurrences of published models' layers, of all heads and without convolution, and without norm and gate unless `outputs`:
// "qwen3-next", "qwen3.5-397b", "kimi-linear", "minimax-01", "nemotron-3-nano", "granite-4-h-small", "falcon-mamba-7b". Error bench.layer
// for other names.
const std::vector<std::string>& recurrent_layer_names();
RecurrentSpec recurrent_layer_of(std::string_view name, bool outputs = false);

// The useful work of a batch, which does not depend on the backend.
struct RecurrentWork {
  double state_bytes = 0;  // states read, of requests that have a past, and written; those of a convolution in front too
  double token_bytes = 0;  // all other tensors
  double flops = 0;        // of the recurrence token by token: 5 for each number of a state, 7 with the delta rule; and of the convolution
};
RecurrentWork work_of(const RecurrentSpec&, const std::vector<BenchRequest>&, DType gates = DType::f32);  // gates: of gate and beta

struct RecurrentBenchOptions : TimingOptions {
  uint64_t seed = 1;
  int copies = 0;     // sets of tensors to rotate over, as the layers of a model do; 0: one
  bool check = true;  // compare a head of some requests first
  ParallelFor threads;
};

struct RecurrentBenchResult : RecurrentWork, Timing {
  double plan_s = 0;         // RecurrentPlan::update, best
  int64_t copy_bytes = 0;    // of one set of tensors
  int copies = 0;            // that were rotated over
  bool captured = false;     // calls were part of a graph
  double check_error = 0;    // largest error of the outputs compared
  double check_allowed = 0;  // and what it may be where it is the largest share of that; 0: not checked
  std::string plan;          // RecurrentPlan::str()
};

// Requests that have more tokens in all than in the step have a past. Errors bench.check when a result is wrong (nothing is timed then),
// bench.recurrent.outputs for a norm over more than a head, which is what is checked, otherwise what validation, planning and memory throw.
RecurrentBenchResult bench(const BackendOf<RecurrentFamily>&, const RecurrentSpec&, const DeviceInfo&, const std::vector<BenchRequest>&,
                           const RecurrentBenchOptions&);

Share share_of(const RecurrentBenchResult&, const Ceilings&, const DeviceInfo&);

}  // namespace imbrex::serve

#pragma once
// Times the short convolution on one batch: states in shuffled slots, random data, a check against the reference first. Used by
// `imbrex bench`.
#include <string>
#include <vector>

#include "imbrex/short_conv.h"
#include "serve/bench_common.h"

namespace imbrex::serve {

// The useful work of a batch, which does not depend on the backend.
struct ShortConvWork {
  double read_bytes = 0;     // the input of each token, the past of each request that has one, weights and bias
  double written_bytes = 0;  // outputs and states
  double flops = 0;          // 2 * width per token and channel, with gates 2 more
};
ShortConvWork work_of(const ShortConvSpec&, const std::vector<BenchRequest>&);

struct ShortConvBenchOptions : TimingOptions {
  uint64_t seed = 1;
  int copies = 0;     // sets of tensors to rotate over, as the layers of a model do; 0: one on a CPU, so many that none is in L2 on a GPU
  bool check = true;  // compare some channels of all tokens and states with the reference first
  ParallelFor threads;
};

struct ShortConvBenchResult : ShortConvWork, Timing {
  double plan_s = 0;         // ShortConvPlan::update, best
  int64_t copy_bytes = 0;    // of one set of tensors
  int copies = 0;            // that were rotated over
  bool captured = false;     // calls were part of a graph
  double check_error = 0;    // largest error of the outputs compared
  double check_allowed = 0;  // and what it may be where it is the largest share of that; 0: not checked
  std::string plan;          // ShortConvPlan::str()
};

// Requests that have more tokens in all than in the step have a past. With drafts in the spec all tokens but one of such a request are
// drafts, as far as there are so many. Error bench.check when a result is wrong (nothing is timed then), otherwise what validation,
// planning and memory throw.
ShortConvBenchResult bench(const BackendOf<ShortConvFamily>&, const ShortConvSpec&, const DeviceInfo&, const std::vector<BenchRequest>&,
                           const ShortConvBenchOptions&);

Share share_of(const ShortConvBenchResult&, const Ceilings&, const DeviceInfo&);

}  // namespace imbrex::serve

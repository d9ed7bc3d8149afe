#pragma once
// Times a batch that is cut in two: the halves one after the other, and at the same time on two streams, beside the whole of it. A layer of
// an engine that overlaps two halves of a step (DBO, two-batch overlap) pays what the halves take more than the whole, and gains by what
// runs beside them. Used by `imbrex bench --halves`.
#include <cstdint>
#include <string>
#include <vector>

#include "serve/bench.h"

namespace imbrex::serve {

struct HalvesResult {
  int cut = 0;  // the query token that the second half begins with
  bool through_request = false;
  // Times of a layer. On a GPU all are of the host's clock, from the first of many calls until the last has ended on each stream: so the
  // whole is not what bench() has, which are times between marks.
  Timing whole, in_turn, together;
  bool captured = false;              // into graphs, one of each stream
  int64_t values = 0, different = 0;  // of the halves' outputs, and of these those that have other bits than the whole's
  double largest_difference = 0;      // between two such values
};

// Cuts in front of `cut`, or where that is 0 at the end of the request that is nearest to the middle of the tokens; or within it, where
// that end is one of the batch. On a CPU halves that run at the same time have half of the threads each. Error bench.halves for a batch of
// fewer than two tokens or a cut outside of it, and where bits differ that have to be equal: on a CPU, and on a GPU where the cut goes
// through no request. Otherwise as bench().
HalvesResult bench_halves(const BackendOf<AttentionFamily>&, const AttentionSpec&, const DeviceInfo&, const std::vector<BenchRequest>&,
                          const BenchOptions&, int cut = 0);

}  // namespace imbrex::serve

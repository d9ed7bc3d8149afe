#pragma once
// Which request of a step's list a place belongs to: a token, or a number of another kind that grows with the list.
#include "ptx.cuh"

namespace imbrex::cuda {

// The last of `count` requests whose place, first_of(request), is that one or one in front of it; 0 where there is none. All lanes of a
// warp together, each looks at another request.
template <class FirstOf>
DEVICE int find_request(int count, int place, const FirstOf& first_of) {
  int first = 0;
  while (count > 1) {
    const int step = (count + 31) / 32, at = lane_id() * step;
    const u32 begun = __ballot_sync(kFullWarp, at < count && first_of(first + min(at, count - 1)) <= place);
    const int last = max(__popc(begun) - 1, 0) * step;
    first += last;
    count = min(step, count - last);
  }
  return first;
}

}  // namespace imbrex::cuda

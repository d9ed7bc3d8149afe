#pragma once
// How the queries of a step are cut into slices, where scratch has no room for all of them at once.
#include <cstdint>
#include <vector>

#include "imbrex/batch.h"
#include "imbrex/spec.h"

namespace imbrex {

// Neighbouring queries of a request.
struct MlaQueries {
  int request;
  int q_begin, q_end;  // tokens of the batch
};

// How many keys such queries see together, counted from the request's first.
int keys_of(const Batch&, const Mask&, const MlaQueries&);

// Whether the queries of a request can be computed apart from each other, as those of a prompt in several steps are.
bool can_cut_queries(const Mask&);

// Queries that are computed together, in the order of their tokens. A request has at most one part in a slice.
struct MlaSlice {
  std::vector<MlaQueries> queries;
  int num_tokens = 0;
};

// The slices of a step, made request by request.
class MlaSlices {
 public:
  void clear() { count_ = 0; }  // slices keep their capacity
  // A request with more than `most` queries is cut at multiples of that number, counted from its first query, so that its cut depends on
  // nothing else. A part goes to the last slice where that stays within `most` tokens, and of neighbours if that is wanted, else to a new
  // one.
  void add(const Batch&, int request, int most, bool neighbours = false);
  size_t size() const { return count_; }
  const MlaSlice& operator[](size_t i) const { return slices_[i]; }

 private:
  std::vector<MlaSlice> slices_;
  size_t count_ = 0;
};

// How many tokens are in front of slice `i` at least, whatever the batch, where requests have `most_queries` at most: two neighbouring
// slices do not fit one.
int64_t least_tokens_before(size_t i, int most, int most_queries);
// How many slices so many tokens have at most.
size_t most_slices(int tokens, int most, int most_queries);

}  // namespace imbrex

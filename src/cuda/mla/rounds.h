#pragma once
// The rounds of a step with expanded keys (mla/rounds.h), as a GPU computes them. Its kernels for prompts take no given positions: so the
// queries of a piece are taken apart. Those whose own position is among the piece's keys see them up to it, which is a causal batch; those
// behind see all of them, as in cross attention.
#include <array>
#include <vector>

#include "attention/key_source.h"
#include "cuda/mla_params.h"
#include "imbrex/mla.h"
#include "mla/rounds.h"
#include "mla/slices.h"

namespace imbrex::cuda {

// Whether requests under such a mask can be cut into such pieces.
bool can_expand_on_device(const Mask&);

enum RoundKind : size_t { kCausalPart, kWholePart, kNumRoundKinds };
// The attention that the two kinds run, in their order.
std::vector<AttentionSpec> round_specs(const MlaSpec&);

// What a round has at most.
struct RoundShape {
  int heads;   // of queries and keys at a time; rounds are computed for one group of so many after the other
  int tokens;  // of queries: of a slice
  int keys;    // of a request in a round, and of all its requests
  bool whole;  // requests have all of their keys in one round, so that results are outputs at once: a slice's tokens are neighbours then
  int least_tokens = 0;  // of a request
};

// Slices of the requests of a batch with expanded keys that have a shape.
using RoundSlices = std::vector<MlaSlices>;  // of each shape

// Rows of one kind in a round; its requests are the round's pieces, those of the other kind without queries.
struct RoundRows {
  std::vector<int32_t> query_start_loc;
  size_t first_range = 0, num_ranges = 0;  // in DeviceRounds::token_rows
  TokenRange tokens{0, 0};                 // of all rows, where these are neighbours
  bool contiguous = false;
  bool complete = true;  // each row is the only one of its token
  int num_rows() const { return query_start_loc.back(); }
};

// The rounds of a step: slice by slice, each of which has all pieces of its queries.
struct DeviceRounds {
  struct Round {
    size_t shape = 0, of_shape = 0;  // which it has, and its number among those that have it
    size_t first_key_range = 0;      // in key_rows, as many as there are pieces
    std::array<RoundRows, kNumRoundKinds> rows;
  };
  struct Slice {
    size_t shape, first_round, end_round;
    int num_tokens;
  };
  std::vector<MlaRound> pieces;  // of the first num_rounds
  std::vector<Round> rounds;     // likewise
  size_t num_rounds = 0;
  std::vector<Slice> slices;
  std::vector<TokenRows> token_rows;
  std::vector<KeyRows> key_rows;

  // Where the requests' blocks begin is left to the caller. Rounds of whole requests have rows of neighbouring tokens.
  void make(const MlaSpec&, const Batch&, const RoundSlices&, const std::vector<RoundShape>&);
  // The batch of a kind; a view of this step.
  Batch batch_of(size_t round, RoundKind) const;

 private:
  void take_apart(const MlaSpec&, const Batch&, const MlaSlice&, size_t round);
  std::vector<int> first_rows_;  // where the sums of a slice's queries begin
};

}  // namespace imbrex::cuda

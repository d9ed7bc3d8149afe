#pragma once
// How the requests of a step whose keys are expanded are cut: into pieces of a fixed number of keys, and rounds of pieces that fit the
// workspace. A piece depends on its request alone; which pieces share a round changes no result.
#include <cstdint>
#include <vector>

#include "attention/token_rows.h"
#include "imbrex/batch.h"
#include "imbrex/spec.h"
#include "mla/slices.h"

namespace imbrex {

// Some keys of a request, and its queries that may see them: all from `q_begin` on.
struct MlaPiece {
  int request;
  int q_begin, q_end;      // tokens of the batch
  int key_begin, key_end;  // keys of the request
  int row;                 // of the round, that the query q_begin has
  bool first, last;        // of the request's pieces
};

// Pieces that are expanded and attended to together, as a batch of attention with ragged keys: piece i is its request i. A request has at
// most one piece in a round, and its pieces come in the order of their keys.
struct MlaRound {
  std::vector<MlaPiece> pieces;
  std::vector<TokenRange> ranges;                                        // tokens of its rows, merged where they touch
  std::vector<int32_t> query_start_loc, seq_lens, key_start, positions;  // positions: of queries, counted from their piece's first key

  int num_rows() const { return query_start_loc.back(); }
  int num_keys() const { return key_start.back(); }
  bool complete() const;  // every piece is the only one of its request
  Batch batch() const;
};

// Whether requests under such a mask can be cut into pieces. Others are left to attention in latent space.
bool can_expand(const Mask&);

// Adds the pieces, of at most `chunk` keys, of queries of a request to the rounds from `first` on, of which the first `count` are in use.
void add_pieces(const Batch&, const MlaQueries&, const Mask&, int chunk, std::vector<MlaRound>& rounds, size_t first, size_t& count);

// The mask of a round's batch: that of the layer, by positions. Where queries may be trees, rounds have those that are chains.
Mask round_mask(Mask);

}  // namespace imbrex

// See rounds.h.
#include "mla/rounds.h"

#include <algorithm>

#include "mla/cost.h"

namespace imbrex {
namespace {

void clear_round(MlaRound& round) {
  round.pieces.clear();
  round.ranges.clear();
  round.query_start_loc.assign(1, 0);
  round.seq_lens.clear();
  round.key_start.assign(1, 0);
  round.positions.clear();
}

}  // namespace

bool MlaRound::complete() const {
  return std::all_of(pieces.begin(), pieces.end(), [](const MlaPiece& piece) { return piece.first && piece.last; });
}

Batch MlaRound::batch() const {
  Batch batch;
  batch.query_start_loc = query_start_loc;
  batch.seq_lens = seq_lens;
  batch.kv_start_loc = TensorView::contiguous(const_cast<int32_t*>(key_start.data()), DType::i32, {int64_t(key_start.size())});
  batch.positions = positions;
  return batch;
}

// Where a query sees keys after its own up to a limit, or by its place in a chunk, a piece cannot say so by a position of 0 or more. A
// custom mask has rows of all keys, and given positions are those of few queries, in trees of drafts. Under Mask::tree requests that are
// chains can be cut.
bool can_expand(const Mask& mask) { return !mask.custom && !mask.positions && mask.chunk == 0 && (mask.causal || mask.window_right < 0); }

Mask round_mask(Mask mask) {
  mask.positions = true;
  mask.tree = false;
  return mask;
}

void add_pieces(const Batch& batch, const MlaQueries& queries, const Mask& mask, int chunk, std::vector<MlaRound>& rounds, size_t first,
                size_t& count) {
  const auto& [r, q_begin, q_end] = queries;
  const int context = batch.context_len(r) + q_begin - batch.query_start_loc[r];
  const KeySpan span = seen_keys(mask, q_end - q_begin, keys_of(batch, mask, queries));
  // Pieces begin at multiples of `chunk`, but for the first, so that they do not depend on the room that a round has left.
  const int64_t first_chunk = span.begin / chunk, end_chunk = std::max(first_chunk + 1, (span.end + chunk - 1) / chunk);
  size_t round = first;  // the first that may take the next piece
  for (int64_t c = first_chunk; c < end_chunk; ++c) {
    const int begin = int(std::max(span.begin, c * chunk)), end = int(std::min<int64_t>(span.end, (c + 1) * chunk));
    while (round < count && rounds[round].num_keys() + (end - begin) > chunk) ++round;
    if (round == count) {
      if (count == rounds.size()) rounds.emplace_back();
      clear_round(rounds[count++]);
    }
    MlaRound& to = rounds[round++];
    const int skipped = mask.causal ? std::max(0, begin - context) : 0;  // queries before all of these keys
    MlaPiece piece{.request = r, .q_begin = q_begin + skipped, .q_end = q_end, .key_begin = begin, .key_end = end, .row = to.num_rows()};
    piece.first = c == first_chunk;
    piece.last = c + 1 == end_chunk;
    to.pieces.push_back(piece);
    if (!to.ranges.empty() && to.ranges.back().end == piece.q_begin)
      to.ranges.back().end = q_end;
    else
      to.ranges.push_back({piece.q_begin, q_end});
    to.query_start_loc.push_back(piece.row + piece.q_end - piece.q_begin);
    to.seq_lens.push_back(end - begin);
    to.key_start.push_back(to.key_start.back() + end - begin);
    for (int t = piece.q_begin; t < piece.q_end; ++t) to.positions.push_back(std::max(0, context + (t - q_begin) - begin));
  }
}

}  // namespace imbrex

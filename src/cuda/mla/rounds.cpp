// See rounds.h.
#include "cuda/mla/rounds.h"

#include <algorithm>

namespace imbrex::cuda {
namespace {

// `sum`: the row that the sum of the token `begin` has in its slice.
void add_range(RoundRows& to, std::vector<TokenRows>& ranges, const MlaPiece& piece, int begin, int end, bool last, int sum) {
  const int row = to.query_start_loc.back();
  to.query_start_loc.push_back(row + end - begin);
  if (begin == end) return;
  to.contiguous = row == 0 || (to.contiguous && to.tokens.end == begin);
  if (row == 0) to.tokens.begin = begin;
  to.tokens.end = end;
  to.complete = to.complete && piece.first && last;
  ranges.push_back({.row = row, .token = begin, .sum = sum, .first = piece.first, .last = last});
}

}  // namespace

bool can_expand_on_device(const Mask& mask) { return can_expand(mask) && mask.window_left < 0 && mask.window_right < 0; }

std::vector<AttentionSpec> round_specs(const MlaSpec& spec) {
  AttentionSpec causal = spec.expanded_spec();
  causal.score.sinks = false;  // they belong to all pieces together
  causal.mask.tree = false;    // requests with expanded keys are chains
  AttentionSpec whole = causal;
  whole.kind = AttentionKind::encoder_decoder;
  whole.mask.causal = false;
  return {causal, whole};
}

void DeviceRounds::make(const MlaSpec& spec, const Batch& batch, const RoundSlices& of_shapes, const std::vector<RoundShape>& shapes) {
  num_rounds = 0;
  slices.clear(), token_rows.clear(), key_rows.clear();
  for (size_t shape = 0; shape < of_shapes.size(); ++shape) {
    size_t of_shape = 0;
    for (size_t s = 0; s < of_shapes[shape].size(); ++s) {
      const MlaSlice& slice = of_shapes[shape][s];
      const size_t first = num_rounds;
      for (const MlaQueries& queries : slice.queries) {
        // A round that an earlier request has left behind would have rows of tokens that are apart.
        const size_t from = shapes[shape].whole && num_rounds > first ? num_rounds - 1 : first;
        add_pieces(batch, queries, spec.mask, shapes[shape].keys, pieces, from, num_rounds);
      }
      if (rounds.size() < num_rounds) rounds.resize(num_rounds);
      for (size_t i = first; i < num_rounds; ++i) {
        rounds[i].shape = shape, rounds[i].of_shape = of_shape++;
        take_apart(spec, batch, slice, i);
      }
      slices.push_back({shape, first, num_rounds, slice.num_tokens});
    }
  }
}

void DeviceRounds::take_apart(const MlaSpec& spec, const Batch& batch, const MlaSlice& slice, size_t i) {
  const MlaRound& of = pieces[i];
  Round& round = rounds[i];
  // Pieces of a round are of the slice's requests, in their order.
  first_rows_.clear();
  int first_row = 0;
  for (const MlaQueries& queries : slice.queries) {
    if (first_rows_.size() < of.pieces.size() && of.pieces[first_rows_.size()].request == queries.request)
      first_rows_.push_back(first_row - queries.q_begin);
    first_row += queries.q_end - queries.q_begin;
  }
  round.first_key_range = key_rows.size();
  for (const size_t kind : {kCausalPart, kWholePart}) {
    RoundRows& rows = round.rows[kind];
    rows.query_start_loc.assign(1, 0);
    rows.first_range = token_rows.size();
    rows.contiguous = false, rows.complete = true;
    for (size_t p = 0; p < of.pieces.size(); ++p) {
      const MlaPiece& piece = of.pieces[p];
      // Where the first query lies among the request's keys, and how many queries lie among the piece's.
      const int first = batch.context_len(piece.request) + piece.q_begin - batch.query_start_loc[piece.request];
      const int among = spec.mask.causal ? std::clamp(piece.key_end - first, 0, piece.q_end - piece.q_begin) : 0;
      const int apart = piece.q_begin + among;
      if (kind == kCausalPart)
        add_range(rows, token_rows, piece, piece.q_begin, apart, true, first_rows_[p] + piece.q_begin);
      else
        add_range(rows, token_rows, piece, apart, piece.q_end, !spec.mask.causal && piece.last, first_rows_[p] + apart);
    }
    rows.num_ranges = token_rows.size() - rows.first_range;
  }
  for (size_t p = 0; p < of.pieces.size(); ++p)
    key_rows.push_back(
        {.row = of.key_start[p], .request = of.pieces[p].request, .key = of.pieces[p].key_begin, .padding = 0, .first_block = 0});
}

Batch DeviceRounds::batch_of(size_t round, RoundKind kind) const {
  const MlaRound& of = pieces[round];
  Batch batch;
  batch.query_start_loc = rounds[round].rows[kind].query_start_loc;
  batch.seq_lens = of.seq_lens;
  batch.kv_start_loc = TensorView::contiguous(const_cast<int32_t*>(of.key_start.data()), DType::i32, {int64_t(of.key_start.size())});
  return batch;
}

}  // namespace imbrex::cuda

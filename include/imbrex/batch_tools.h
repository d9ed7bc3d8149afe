#pragma once
// What an engine does with a step before plans see it: it puts requests in order, counts those of each phase, and makes batches of parts of
// it. Functions of the host's lists alone. Orders and counts are those of vLLM's functions of the same names.
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "imbrex/batch.h"

namespace imbrex {

// Requests in the order of four regions: decodes (at most decode_threshold query tokens, and no prompt token among them), short extends (as
// many, of a prompt that is not yet computed), long extends (more, with earlier tokens), prompts from their first token on.
struct BatchOrder {
  std::vector<int32_t> order;                      // [num_reqs]: the request that comes to each place
  std::vector<std::pair<int32_t, int32_t>> swaps;  // of two places each: done one after the other, they bring requests into that order
};
// Lists have a number for each request: query tokens, tokens before them, and tokens of the prompt; without the last no request is a short
// extend. A request that stands in its region stays where it is; the others keep their order within a region as far as their places do. At
// most num_reqs - 1 swaps. Error batch.order.*
BatchOrder reorder_batch(std::span<const int32_t> query_lens, std::span<const int32_t> context_lens,
                         std::span<const int32_t> prompt_lens = {}, int decode_threshold = 1);

// Requests and query tokens of each phase in a batch that is in order.
struct PhaseCounts {
  int32_t decodes = 0, extends = 0, prefills = 0;
  int32_t decode_tokens = 0, extend_tokens = 0, prefill_tokens = 0;
  friend bool operator==(const PhaseCounts&, const PhaseCounts&) = default;
};
struct PhaseOptions {
  int decode_threshold = 1;  // query tokens of a decode at most
  int num_tokens = 0;        // of the step with its padding, which counts for the last phase; 0: query_start_loc.back()
  bool uniform = false;      // decodes have as many query tokens as the first request
  // Whether requests that compute the rest of a prompt count as decodes where they have few tokens. Without it is_prefilling says who they
  // are: a number for each request, not 0 for those whose prompt is not yet computed.
  bool short_extends_are_decodes = true;
  std::span<const uint8_t> is_prefilling = {};
};
// Decodes are the requests in front of the first that is none, and all behind them prefills. Error batch.phases.*, batch.query_start_loc.*
PhaseCounts split_decodes_and_prefills(std::span<const int32_t> query_start_loc, const PhaseOptions& = {});
// Prefills are the requests from the first on that has more than decode_threshold query tokens and no earlier ones; extends are those
// between decodes and prefills. Of the options decode_threshold and num_tokens count.
PhaseCounts split_decodes_prefills_and_extends(std::span<const int32_t> query_start_loc, std::span<const int32_t> seq_lens,
                                               const PhaseOptions& = {});

// Cuts a list of lengths into ranges [first, second) of neighbours whose sum is at most `workspace`; one that is longer is a range of its
// own. `first_request` is added to all. Error batch.chunks.*
std::vector<std::pair<int32_t, int32_t>> split_prefill_chunks(std::span<const int32_t> seq_lens, int64_t workspace,
                                                              int32_t first_request = 0);

// --- batches that are parts of another

// Which keys a request has in a part that lacks some of its query tokens, so that the others see what they see in the whole batch.
enum class PartKeys : uint8_t {
  up_to_queries,      // those up to the part's last query: for causal layers, and layers with a state. A part's tokens of a request follow
                      // one another
  all,                // all, where neither what a query sees nor its bias follows from its position
  all_with_positions  // all, with the position of each query, which is made here where the batch has none: for specs with Mask::positions
};
// Those for a layer. Error batch.part.keys: positions count, keys behind a query are seen, and the batch does not say the positions. Such a
// layer can be run in parts by the spec that is equal to it but for Mask::positions. Of latent attention: MlaSpec::latent_spec()
PartKeys part_keys(const AttentionSpec&);

// A batch made of another. It has views of that batch's arrays wherever they can be, and memory of its own where they cannot. Copies share
// that memory.
struct DerivedBatch {
  Batch batch;
  int first_request = 0;  // of the whole batch, that request 0 of this one is
  int first_token = 0;    // of split_batch(): the token of the whole batch that token 0 of this one is
  std::shared_ptr<const void> memory;
};

// Cuts a batch in parts in front of the given tokens, ascending: part i has the query tokens from cuts[i - 1] to cuts[i], and all requests
// that have any of them. A cut may go through the tokens of a request, which then is in both parts. Requests without tokens stand in one
// part, the earlier one where there are two; padding behind the tokens is the last part's. Every field is kept, with one exception:
// kv_last_page_len, a check of seq_lens, is left out where these change.
// Where parts run on two streams, the keys of all parts have to be written before queries of a request that is cut are run. Layers with a
// state compute such a request in the order of the parts: the second begins from what the first has written. Its drafts stay together, and
// so does a request that is a tree (Mask::tree).
// Error batch.part.*, and batch.* for lists that do not fit each other.
std::vector<DerivedBatch> split_batch(const Batch&, PartKeys, std::span<const int32_t> cuts);
std::array<DerivedBatch, 2> split_batch(const Batch&, PartKeys, int cut);
// The end of a request that is nearest to a token: a cut there goes through no request. Of two the earlier one.
int nearest_boundary(const Batch&, int token);

// Keeps some query tokens of a batch, ascending, with all keys that these see: for layers that are computed for the tokens whose logits are
// asked for alone, since their keys and values are those of an earlier layer. All requests stay, many of them without tokens. Row i of q
// and out is of the token tokens[i]. Slots and mask rows that do not lie together are gathered, which needs host memory: a batch whose keys
// are written already goes without slots. A request with a state keeps all its tokens, or none. Error batch.part.*, and as split_batch().
DerivedBatch keep_tokens(const Batch&, PartKeys, std::span<const int32_t> tokens);

}  // namespace imbrex

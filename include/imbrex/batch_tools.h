#pragma once
// What an engine does with a step before plans see it: it puts requests in order, and counts those of each phase. Functions of the host's
// lists alone, with the results that vLLM's functions of the same names have.
#include <cstdint>
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

}  // namespace imbrex

// The order of a step's requests, and how many of them are in which phase: see batch_tools.h.
#include <algorithm>
#include <limits>
#include <numeric>

#include "core/check.h"
#include "imbrex/batch_tools.h"

namespace imbrex {
namespace {

enum Region : uint8_t { kDecode, kShortExtend, kLongExtend, kPrompt };

Region region_of(int32_t query_len, int32_t context_len, bool in_prompt, int decode_threshold) {
  if (context_len == 0) return kPrompt;
  if (query_len > decode_threshold) return kLongExtend;
  return in_prompt ? kShortExtend : kDecode;
}

void check_threshold(int decode_threshold) {
  check(decode_threshold >= 0, "batch.phases.threshold", "expected a decode_threshold of 0 or more query tokens, got {}", decode_threshold);
}

void check_starts(std::span<const int32_t> starts) {
  check(!starts.empty(), "batch.query_start_loc.size", "expected an entry more than requests, got none");
  check(starts[0] == 0, "batch.query_start_loc.start", "expected query_start_loc[0] = 0, got {}", starts[0]);
  for (size_t r = 1; r < starts.size(); ++r)
    check(starts[r] >= starts[r - 1], "batch.query_start_loc.monotone", "query_start_loc falls from {} to {} at request {}", starts[r - 1],
          starts[r], r - 1);
}

int32_t tokens_of(std::span<const int32_t> starts, const PhaseOptions& options) {
  check(options.num_tokens == 0 || options.num_tokens >= starts.back(), "batch.phases.tokens",
        "expected num_tokens of 0 or at least the {} tokens of query_start_loc, got {}", starts.back(), options.num_tokens);
  return options.num_tokens == 0 ? starts.back() : options.num_tokens;
}

}  // namespace

BatchOrder reorder_batch(std::span<const int32_t> query_lens, std::span<const int32_t> context_lens, std::span<const int32_t> prompt_lens,
                         int decode_threshold) {
  const size_t count = query_lens.size();
  check_threshold(decode_threshold);
  check(count <= size_t(std::numeric_limits<int32_t>::max()), "batch.order.size", "expected at most {} requests, got {}",
        std::numeric_limits<int32_t>::max(), count);
  check(context_lens.size() == count, "batch.order.size", "expected context_lens of {} requests, got {}", count, context_lens.size());
  check(prompt_lens.empty() || prompt_lens.size() == count, "batch.order.size", "expected prompt_lens of {} requests or none, got {}",
        count, prompt_lens.size());
  std::vector<Region> regions(count);
  for (size_t r = 0; r < count; ++r) {
    const int32_t prompt = prompt_lens.empty() ? 0 : prompt_lens[r];
    check(query_lens[r] >= 0 && context_lens[r] >= 0 && prompt >= 0, "batch.order.length",
          "expected lengths of 0 or more, got {} query tokens, {} tokens before them and a prompt of {} in request {}", query_lens[r],
          context_lens[r], prompt, r);
    regions[r] = region_of(query_lens[r], context_lens[r], context_lens[r] < prompt, decode_threshold);
  }
  std::vector<Region> wanted = regions;
  std::sort(wanted.begin(), wanted.end());

  BatchOrder result;
  result.order.resize(count);
  std::iota(result.order.begin(), result.order.end(), 0);
  std::vector<int32_t> misplaced;  // places, ascending, whose request is of another region
  for (size_t r = 0; r < count; ++r)
    if (regions[r] != wanted[r]) misplaced.push_back(int32_t(r));
  std::vector<int32_t> sources = misplaced;  // the requests that come to these places
  std::stable_sort(sources.begin(), sources.end(), [&](int32_t a, int32_t b) { return regions[size_t(a)] < regions[size_t(b)]; });
  std::vector<int32_t> target(count);  // of the request at each place
  std::iota(target.begin(), target.end(), 0);
  for (size_t i = 0; i < misplaced.size(); ++i) {
    target[size_t(sources[i])] = misplaced[i];
    result.order[size_t(misplaced[i])] = sources[i];
  }
  // The request at `from` goes to its place; the one that stood there is at `from` then.
  for (const int32_t from : sources) {
    int32_t to = target[size_t(from)];
    while (to != from) {
      result.swaps.emplace_back(from, to);
      const int32_t next = target[size_t(to)];
      target[size_t(to)] = to;
      to = next;
    }
    target[size_t(from)] = from;
  }
  return result;
}

PhaseCounts split_decodes_and_prefills(std::span<const int32_t> query_start_loc, const PhaseOptions& options) {
  check_threshold(options.decode_threshold);
  check_starts(query_start_loc);
  const int32_t num_tokens = tokens_of(query_start_loc, options), num_reqs = int32_t(query_start_loc.size() - 1);
  const bool shorts = options.short_extends_are_decodes;
  check(shorts || int64_t(options.is_prefilling.size()) == num_reqs, "batch.phases.prefilling",
        "expected is_prefilling of {} requests where short extends are no decodes, got {}", num_reqs, options.is_prefilling.size());
  const auto query_len = [&](int32_t r) { return query_start_loc[size_t(r) + 1] - query_start_loc[size_t(r)]; };
  const int32_t uniform_len = num_reqs == 0 ? 0 : query_len(0);
  if (uniform_len > options.decode_threshold) return {.prefills = num_reqs, .prefill_tokens = num_tokens};
  int32_t first = num_reqs, longest = 0;  // the first request that is no decode
  bool only_padding_differs = true;       // from the first request's number of tokens
  for (int32_t r = 0; r < num_reqs; ++r) {
    const int32_t q_len = query_len(r);
    only_padding_differs &= q_len == uniform_len || q_len == 0;
    longest = std::max(longest, q_len);
    const bool other_len = options.uniform ? q_len != uniform_len : q_len > options.decode_threshold;
    if (first == num_reqs && (other_len || (!shorts && options.is_prefilling[size_t(r)] != 0))) first = r;
  }
  const bool all_short = longest <= options.decode_threshold && (!options.uniform || options.decode_threshold <= 1);
  if (first == num_reqs || (shorts && (all_short || (options.uniform && only_padding_differs))))
    return {.decodes = num_reqs, .decode_tokens = num_tokens};
  const int32_t decode_tokens = query_start_loc[size_t(first)];
  return {.decodes = first, .prefills = num_reqs - first, .decode_tokens = decode_tokens, .prefill_tokens = num_tokens - decode_tokens};
}

PhaseCounts split_decodes_prefills_and_extends(std::span<const int32_t> query_start_loc, std::span<const int32_t> seq_lens,
                                               const PhaseOptions& options) {
  check_threshold(options.decode_threshold);
  check_starts(query_start_loc);
  const int32_t num_tokens = tokens_of(query_start_loc, options), num_reqs = int32_t(query_start_loc.size() - 1);
  check(seq_lens.size() == size_t(num_reqs), "batch.order.size", "expected seq_lens of {} requests, got {}", num_reqs, seq_lens.size());
  int32_t decodes = num_reqs, first_prompt = num_reqs;
  for (int32_t r = 0; r < num_reqs; ++r) {
    const int32_t q_len = query_start_loc[size_t(r) + 1] - query_start_loc[size_t(r)];
    if (q_len <= options.decode_threshold) continue;
    decodes = std::min(decodes, r);
    if (seq_lens[size_t(r)] == q_len) first_prompt = std::min(first_prompt, r);
  }
  PhaseCounts counts{.decodes = decodes, .extends = first_prompt - decodes, .prefills = num_reqs - first_prompt};
  // Padding belongs to the last phase that has requests.
  const int32_t decode_end = decodes == num_reqs ? num_tokens : query_start_loc[size_t(decodes)];
  const int32_t extend_end = first_prompt == num_reqs ? num_tokens : query_start_loc[size_t(first_prompt)];
  counts.decode_tokens = decode_end;
  counts.extend_tokens = extend_end - decode_end;
  counts.prefill_tokens = num_tokens - extend_end;
  return counts;
}

std::vector<std::pair<int32_t, int32_t>> split_prefill_chunks(std::span<const int32_t> seq_lens, int64_t workspace, int32_t first_request) {
  check(workspace >= 0, "batch.chunks.workspace", "expected a workspace of 0 or more tokens, got {}", workspace);
  check(first_request >= 0 && seq_lens.size() <= size_t(std::numeric_limits<int32_t>::max() - first_request), "batch.chunks.request",
        "expected requests numbered from 0 to {}, got {} from {} on", std::numeric_limits<int32_t>::max(), seq_lens.size(), first_request);
  std::vector<std::pair<int32_t, int32_t>> chunks;
  int64_t sum = 0;  // of the last range; at most workspace and one length
  for (size_t r = 0; r < seq_lens.size(); ++r) {
    check(seq_lens[r] >= 0, "batch.seq_len.negative", "seq_lens[{}] is {}", r, seq_lens[r]);
    const int32_t request = first_request + int32_t(r);
    if (chunks.empty() || seq_lens[r] > workspace - sum) {
      chunks.emplace_back(request, request);
      sum = 0;
    }
    chunks.back().second = request + 1;
    sum += seq_lens[r];
  }
  return chunks;
}

}  // namespace imbrex

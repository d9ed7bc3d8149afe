// See batch_checks.h: sizes, limits, and lengths that do not contradict each other.
#include "imbrex/batch.h"

#include <algorithm>

#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "family/batch_checks.h"

namespace imbrex {

// Bounds of limits, far beyond any machine, and small enough that products of a few limits fit 63 bits.
static constexpr int kMostReqs = 1 << 24, kMostTokens = 1 << 30;

void PlanLimits::validate() const {
  check(max_num_reqs >= 0 && max_num_reqs <= kMostReqs, "limits.max_num_reqs", "expected 0 to {} requests, got {}", kMostReqs,
        max_num_reqs);
  check(max_num_tokens >= 0 && max_num_tokens <= kMostTokens, "limits.max_num_tokens", "expected 0 to {} query tokens, got {}", kMostTokens,
        max_num_tokens);
  check(max_seq_len >= 0, "limits.max_seq_len", "expected 0 or more keys, got {}", max_seq_len);
  check(max_query_len >= 0, "limits.max_query_len", "expected 0 (no limit of its own) or more query tokens, got {}", max_query_len);
  const int longest = max_query_len > 0 ? max_query_len : kMostTokens;
  check(min_query_len >= 0 && min_query_len <= longest, "limits.min_query_len", "expected 0 to {} query tokens, got {}", longest,
        min_query_len);
}

int Batch::max_query_len() const {
  int longest = 0;
  for (int r = 0; r < num_reqs(); ++r) longest = std::max(longest, query_len(r));
  return longest;
}

int Batch::max_seq_len() const { return seq_lens.empty() ? 0 : *std::max_element(seq_lens.begin(), seq_lens.end()); }

static void check_address(std::span<const int32_t> lengths, const char* name) {
  const auto behind = reinterpret_cast<uintptr_t>(lengths.data()) % alignof(int32_t);
  check(behind == 0, "tensor.alignment", "{}: expected an address that is a multiple of {} bytes, got one that begins {} bytes behind one",
        name, alignof(int32_t), behind);
}

void check_lengths(const Batch& batch, const PlanLimits& limits, bool queries_are_keys) {
  const auto& starts = batch.query_start_loc;
  check_address(starts, "query_start_loc");
  check_address(batch.seq_lens, "seq_lens");
  const int64_t num_reqs = int64_t(batch.seq_lens.size());
  check(num_reqs <= limits.max_num_reqs, "batch.num_reqs.limit", "expected at most {} requests (PlanLimits), got {}", limits.max_num_reqs,
        num_reqs);
  check(int64_t(starts.size()) == num_reqs + 1 || (num_reqs == 0 && starts.empty()), "batch.query_start_loc.size",
        "expected {} entries for {} requests, got {}", num_reqs + 1, num_reqs, starts.size());
  if (starts.empty()) return;
  check(starts[0] == 0, "batch.query_start_loc.start", "expected query_start_loc[0] = 0, got {}", starts[0]);
  for (int r = 0; r < int(num_reqs); ++r) {
    const int seq_len = batch.seq_lens[r];
    check(starts[r + 1] >= starts[r], "batch.query_start_loc.monotone", "query_start_loc falls from {} to {} at request {}", starts[r],
          starts[r + 1], r);
    check(seq_len >= 0, "batch.seq_len.negative", "seq_lens[{}] is {}", r, seq_len);
    check(seq_len <= limits.max_seq_len, "batch.seq_len.limit", "expected at most {} keys (PlanLimits), got {} in request {}",
          limits.max_seq_len, seq_len, r);
    check(!queries_are_keys || seq_len >= starts[r + 1] - starts[r], "batch.seq_len.shorter_than_query",
          "request {} has {} query tokens but only {} keys, its own included", r, starts[r + 1] - starts[r], seq_len);
  }
  check(limits.max_query_len <= 0 || batch.max_query_len() <= limits.max_query_len, "batch.query_len.limit",
        "expected at most {} query tokens of a request (PlanLimits), got {}", limits.max_query_len, batch.max_query_len());
  for (int r = 0; limits.min_query_len > 1 && r < int(num_reqs); ++r) {
    const int q_len = batch.query_len(r);
    check(q_len == 0 || q_len >= limits.min_query_len, "batch.query_len.limit",
          "expected no query tokens, or at least {} (PlanLimits), got {} in request {}", limits.min_query_len, q_len, r);
  }
  check(starts[num_reqs] <= limits.max_num_tokens, "batch.num_tokens.limit", "expected at most {} query tokens (PlanLimits), got {}",
        limits.max_num_tokens, starts[num_reqs]);
}

int max_tokens(const DeviceBatch& batch, const PlanLimits& limits) {
  return batch.max_num_tokens > 0 ? batch.max_num_tokens : limits.max_num_tokens;
}

void check_list(const TensorView& t, const char* name, int64_t count, std::string_view code) {
  check(t.rank == 1 && t.dtype == DType::i32 && t.size(0) == count && (count <= 1 || t.stride(0) == 1), code,
        "{}: expected contiguous i32[{}], got {}", name, count, t);
  check_layout(t, name);
}

void check_lengths(const DeviceBatch& batch, const PlanLimits& limits) {
  const int64_t reqs = batch.num_reqs();
  check(reqs >= 0 && reqs <= limits.max_num_reqs, "batch.num_reqs.limit", "expected 0 to {} requests (PlanLimits), got {}",
        limits.max_num_reqs, reqs);
  check(batch.max_num_tokens >= 0, "batch.num_tokens.limit", "expected max_num_tokens of 0 (those of PlanLimits) or more, got {}",
        batch.max_num_tokens);
  check(max_tokens(batch, limits) <= limits.max_num_tokens, "batch.num_tokens.limit",
        "expected at most {} query tokens (PlanLimits), got {}", limits.max_num_tokens, max_tokens(batch, limits));
  if (reqs == 0) return;
  check_list(batch.seq_lens, "seq_lens", reqs, "batch.lengths");
  check_list(batch.query_start_loc, "query_start_loc", reqs + 1, "batch.lengths");
}

}  // namespace imbrex

// See cost.h.
#include "mla/cost.h"

#include <fmt/format.h>

#include <algorithm>

#include "attention/mask.h"

namespace imbrex {

std::string MlaCost::str() const { return fmt::format("{:.3g} ms in latent space, {:.3g} ms expanded", latent * 1e3, expanded * 1e3); }

MlaOperations operations_of(const MlaSpec& spec) {
  const double heads = 2.0 * spec.num_heads;
  return {.product = heads * spec.kv_lora_rank * (double(spec.qk_nope_dim) + spec.v_dim),
          .latent_pair = heads * (double(spec.latent_dim()) + spec.kv_lora_rank),
          .expanded_pair = heads * (double(spec.qk_dim()) + spec.v_dim)};
}

KeySpan seen_keys(const Mask& mask, int64_t q_len, int64_t seq_len) {
  const int64_t first = seq_len - q_len, last = seq_len - 1;  // positions of queries
  int64_t end = seq_len;
  if (mask.causal) end = std::min(end, last + 1);
  if (mask.window_right >= 0) end = std::min(end, last + 1 + mask.window_right);
  return {std::min(first_visible_key(mask, first), end), end};
}

MlaCost cost_of(const MlaSpec& spec, const MlaRates& rates, int64_t q_len, int64_t seq_len) {
  const double heads = spec.num_heads, queries = double(q_len);
  const KeySpan span = seen_keys(spec.mask, q_len, seq_len);
  const double keys = double(span.end - span.begin);
  // Pairs of a query and a key that it sees: a causal mask hides a triangle, a window a part of every row.
  double pairs = queries * keys;
  if (spec.mask.causal) pairs -= queries * (queries - 1) / 2;
  if (spec.mask.window_left >= 0) pairs = std::min(pairs, queries * (double(spec.mask.window_left) + 1));
  const auto [product, latent_pair, expanded_pair] = operations_of(spec);
  const double expanded_bytes = heads * double(spec.qk_dim() + spec.v_dim) * double(size_of(spec.dtype));
  return {.latent = queries * product / rates.products + pairs * latent_pair / rates.latent +
                    keys * double(spec.kv_bytes_per_token()) / rates.bytes,
          .expanded = rates.round + keys * product / rates.expansion + pairs * expanded_pair / rates.expanded +
                      keys * 2 * expanded_bytes / rates.bytes};
}

}  // namespace imbrex

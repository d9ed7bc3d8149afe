#pragma once
// Position biases of a logit: that of ALiBi, and T5's relative position bias with its expansion to a bias for each distance, which the CPU
// kernels read.
#include <algorithm>
#include <cmath>
#include <vector>

#include "imbrex/spec.h"

namespace imbrex {

// The factor of ALiBi's slope for a key at a distance (its position minus the query's).
inline double alibi_distance(const ScoreMod& score, double distance) {
  return score.alibi_sqrt ? -std::sqrt(std::max(-distance, 0.)) : distance;
}

// Bucket of distance = key position - query position. Half of the (one-sided) buckets are exact, the others logarithmic up to
// relative_max_distance. Source: "Exploring the limits of transfer learning", section 2.1, and the released implementation.
int relative_bucket(const ScoreMod&, int distance);

// Distances beyond +-width/2 share the bias of the last one.
int relative_bias_width(const ScoreMod&);

// out [num_q_heads, width]: bias of head h at distance d is out[h * width + d + width / 2]. The table [relative_buckets, num_q_heads] is in
// host memory and of the right shape: check_run() of plan_checks.h has seen to it.
void expand_relative_bias(const AttentionSpec&, const TensorView& table, std::vector<float>& out);

}  // namespace imbrex

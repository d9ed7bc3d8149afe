// See position_bias.h.
#include "attention/position_bias.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace imbrex {

int relative_bucket(const ScoreMod& score, int distance) {
  int buckets = score.relative_buckets, bucket = 0;
  if (score.relative_bidirectional) {
    buckets /= 2;
    if (distance > 0) bucket += buckets;
    distance = std::abs(distance);
  } else {
    distance = std::max(0, -distance);
  }
  const int exact = buckets / 2;
  if (distance < exact) return bucket + distance;
  // This is float arithmetic on purpose: the trained models were bucketed with it, and double moves some boundaries.
  const float position = std::log(float(distance) / float(exact)) / std::log(float(score.relative_max_distance) / float(exact));
  return bucket + std::min(buckets - 1, exact + int(position * float(buckets - exact)));
}

int relative_bias_width(const ScoreMod& score) { return 2 * score.relative_max_distance + 1; }

void expand_relative_bias(const AttentionSpec& spec, const TensorView& table, std::vector<float>& out) {
  const int heads = spec.num_q_heads, width = relative_bias_width(spec.score);
  out.resize(size_t(heads) * width);
  for (int i = 0; i < width; ++i) {
    const float* row = table.as<const float>() + relative_bucket(spec.score, i - width / 2) * table.stride(0);
    for (int h = 0; h < heads; ++h) out[size_t(h) * width + i] = row[h * table.stride(1)];
  }
}

}  // namespace imbrex

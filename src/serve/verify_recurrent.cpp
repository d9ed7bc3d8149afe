// Recomputes sampled outputs of recurrent layers (see verify.h).
#include <algorithm>

#include "core/float_types.h"
#include "serve/exact_target.h"

namespace imbrex::serve {

int RecurrentTarget::heads_of(const RecurrentSpec& spec) {
  const int sharing = spec.num_v_heads / spec.num_k_heads;  // value heads of a key head
  if (spec.norm_groups > 0) {
    const int heads = spec.norm_heads();
    return heads % sharing == 0 || sharing % heads == 0 ? heads : spec.num_v_heads;
  }
  constexpr int kMostNumbers = 128;
  int heads = std::clamp(kMostNumbers / spec.head_dim_v, 1, sharing);
  while (sharing % heads != 0) --heads;
  return heads;
}

Verifier::Outcome Verifier::recompute(const VerifySample& sample, const RecurrentTarget& target, Worker&) const {
  const RecurrentSpec& spec = *target.spec;
  std::vector<uint64_t> keys;
  for (int p = 0; p <= sample.position; ++p) keys.push_back(key_of(sample, p));
  const RecurrentExpected expected = expected_of_target(target, synthetic_, sample.layer, keys);
  Outcome worst;
  for (size_t i = 0; i < expected.out.size(); ++i)
    worst.add(expected.out[i], bf16_to_float(sample.actual[i]), expected.allowed[i], target.first_head + int(i) / spec.head_dim_v,
              int(i) % spec.head_dim_v);
  if (sample.state.empty()) return worst;
  const size_t numbers = expected.state.size(), of_head = numbers / size_t(RecurrentTarget::heads_of(spec));
  for (size_t i = 0; i < numbers; ++i)
    worst.add(expected.state[i], load_as_double(sample.state.data(), spec.state_dtype, int64_t(i)), expected.allowed_state[i],
              target.first_head + int(i / of_head), int(i % of_head), true);
  const char* const kept = sample.state.data() + numbers * size_t(size_of(spec.state_dtype));
  const int64_t of_conv = expected.conv_state.empty() ? 0 : (spec.conv_width - 1) * spec_of_target(spec).conv_channels();
  for (int64_t i = 0; i < of_conv; ++i) worst.add(expected.conv_state.get(i), load_as_double(kept, DType::bf16, i), 0, -1, int(i), true);
  return worst;
}

}  // namespace imbrex::serve

// Recomputes sampled outputs of recurrent layers (see verify.h).
#include <algorithm>

#include "conformance/recurrent/judge.h"
#include "core/float_types.h"
#include "serve/verify.h"

namespace imbrex::serve {

int RecurrentTarget::heads_of(const RecurrentSpec& spec) {
  constexpr int kMostNumbers = 128;
  const int sharing = spec.num_v_heads / spec.num_k_heads;
  int heads = std::clamp(kMostNumbers / spec.head_dim_v, 1, sharing);
  while (sharing % heads != 0) --heads;
  return heads;
}

// The request's tokens up to this one, as one step: the heads' rows of what the synthesis made of each.
Verifier::Outcome Verifier::recompute(const VerifySample& sample, const RecurrentTarget& target, Worker&) const {
  const RecurrentSpec& spec = *target.spec;
  const int heads = RecurrentTarget::heads_of(spec), key_head = target.first_head / (spec.num_v_heads / spec.num_k_heads);
  const int64_t tokens = sample.position + 1, dim_k = spec.head_dim_k, dim_v = spec.head_dim_v;
  RecurrentCaseInputs in{.spec = spec,
                         .requests = {{.q_len = int(tokens)}},
                         .q = HostTensor::make(DType::bf16, {tokens, 1, dim_k}),
                         .k = HostTensor::make(DType::bf16, {tokens, 1, dim_k}),
                         .v = HostTensor::make(DType::bf16, {tokens, heads, dim_v}),
                         .gate = {},
                         .beta = {},
                         .rates = {},
                         .gate_bias = {},
                         .skip = {},
                         .state = HostTensor::make(spec.state_dtype, {1, 1, heads, dim_k, dim_v})};
  in.spec.num_k_heads = 1, in.spec.num_v_heads = heads, in.spec.num_drafts = 0;
  if (spec.gate != RecurrentGate::fixed)
    in.gate = HostTensor::make(DType::bf16, {tokens, spec.channel_gate ? heads : 1, spec.channel_gate ? dim_k : heads});
  if (spec.delta) in.beta = HostTensor::make(DType::bf16, {tokens, 1, heads});

  for (int p = 0; p <= sample.position; ++p) {
    const uint64_t key = key_of(sample, p);
    for (const RecurrentRow& row : recurrent_rows(spec)) {
      const bool of_keys = row.side == Side::q || row.side == Side::k;
      HostTensor& t = row.side == Side::q      ? in.q
                      : row.side == Side::k    ? in.k
                      : row.side == Side::v    ? in.v
                      : row.side == Side::gate ? in.gate
                                               : in.beta;
      const size_t count = size_t(t.sizes[1] * t.sizes[2]);
      const int of_head = row.numbers / (of_keys ? spec.num_k_heads : spec.num_v_heads);
      auto* const to = reinterpret_cast<uint16_t*>(t.bytes.data()) + size_t(p) * count;
      synthetic_.copy(row.side, sample.layer, row.numbers, (of_keys ? key_head : target.first_head) * of_head, key, {to, count});
    }
  }
  RecurrentInputs parameters;
  target.parameters->view(parameters, target.first_head, heads);
  const auto floats = [](const TensorView& t) {
    HostTensor copy;
    if (t.empty()) return copy;
    copy = HostTensor::make(DType::f32, {t.sizes.begin(), t.sizes.begin() + t.rank});
    std::copy_n(t.as<char>(), copy.bytes.size(), copy.bytes.begin());
    return copy;
  };
  in.rates = floats(parameters.rates), in.gate_bias = floats(parameters.gate_bias), in.skip = floats(parameters.skip);

  // A state of fewer bits than a float may have been rounded behind any token.
  const RecurrentExpected expected = expect(in, spec.state_dtype == DType::f32 ? 0 : 1, target.rounded_products);
  Outcome worst;
  const size_t row = size_t(heads) * size_t(dim_v), last = size_t(sample.position) * row;
  for (size_t i = 0; i < row; ++i) {
    worst.add(expected.out[last + i], bf16_to_float(sample.actual[i]), expected.allowed[last + i], target.first_head + int(i) / int(dim_v),
              int(i) % int(dim_v));
  }
  const size_t head_numbers = size_t(in.head_numbers()), numbers = sample.state.empty() ? 0 : size_t(heads) * head_numbers;
  for (size_t i = 0; i < numbers; ++i)
    worst.add(expected.state[i], load_as_double(sample.state.data(), spec.state_dtype, int64_t(i)), expected.allowed_state[i],
              target.first_head + int(i / head_numbers), int(i % head_numbers), true);
  return worst;
}

}  // namespace imbrex::serve
